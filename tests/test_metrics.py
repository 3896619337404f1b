"""The metrics: right counts, parseable text, cheap at every step, and never an error for the engine."""

import logging
import threading
import time

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from jaxserve.metrics import EngineMetrics


def samples(metrics: EngineMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample, by name and labels without the model's name, read back from the printed text."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k not in ("model_name", "engine")))
            found[sample.name, labels] = sample.value
    return found


def test_counts_come_back_in_the_printed_text():
    metrics = EngineMetrics(model_name="tiny")
    metrics.admitted(0.2, prompt_tokens=11)
    metrics.step(tokens=11, running=1, waiting=2, page_usage=0.25)
    metrics.first_token(0.3)
    metrics.tokens(1)
    metrics.tokens(3, 0.02)
    metrics.preempted()
    metrics.compiled_after_ready(2)
    metrics.rejected("queue_full")
    metrics.finished(
        "length",
        prompt_tokens=11,
        generated_tokens=4,
        seconds=0.9,
        queue_seconds=0.2,
        first_token_seconds=0.3,
        preemptions=1,
    )
    metrics.request_finished(2, None, 4)
    metrics.prefix_lookup(11, 8)
    metrics.cache_config(block_size=32, num_gpu_blocks=100)
    found = samples(metrics)
    expected = {
        "jaxserve:num_requests_running": 1,
        "jaxserve:num_requests_waiting": 2,
        "jaxserve:kv_cache_usage_perc": 0.25,
        "jaxserve:prompt_tokens_total": 11,
        "jaxserve:generation_tokens_total": 4,
        "jaxserve:num_preemptions_total": 1,
        "jaxserve:compilations_after_ready_total": 2,
        "jaxserve:metrics_errors_total": 0,
        "jaxserve:inter_token_latency_seconds_count": 3,
        "jaxserve:inter_token_latency_seconds_sum": pytest.approx(0.06),
        "jaxserve:time_to_first_token_seconds_sum": pytest.approx(0.3),
        "jaxserve:request_time_per_output_token_seconds_sum": pytest.approx(0.2),
        "jaxserve:e2e_request_latency_seconds_sum": pytest.approx(0.9),
        "jaxserve:request_queue_time_seconds_count": 1,
        "jaxserve:request_prompt_tokens_sum": 11,
        "jaxserve:request_generation_tokens_sum": 4,
        "jaxserve:request_num_preemptions_sum": 1,
        "jaxserve:iteration_tokens_total_sum": 11,
        "jaxserve:request_prefill_time_seconds_sum": pytest.approx(0.1),
        "jaxserve:request_decode_time_seconds_sum": pytest.approx(0.6),
        "jaxserve:request_inference_time_seconds_sum": pytest.approx(0.7),
        "jaxserve:request_params_n_sum": 2,
        "jaxserve:request_params_max_tokens_count": 0,
        "jaxserve:request_max_num_generation_tokens_sum": 4,
        "jaxserve:prefix_cache_queries_total": 11,
        "jaxserve:prefix_cache_hits_total": 8,
    }
    assert {name: found[name, ()] for name in expected} == expected
    assert found["jaxserve:request_success_total", (("finished_reason", "length"),)] == 1
    assert found["jaxserve:request_success_total", (("finished_reason", "stop"),)] == 0
    assert found["jaxserve:admission_rejections_total", (("reason", "queue_full"),)] == 1
    assert found["jaxserve:cache_config_info", (("block_size", "32"), ("num_gpu_blocks", "100"))] == 1
    assert b'engine="0"' in generate_latest(metrics.registry)
    assert b'model_name="tiny"' in generate_latest(metrics.registry)


def test_histogram_buckets_are_cumulative_and_hold_their_bound():
    metrics = EngineMetrics()
    for seconds in (0.0005, 0.001, 0.0011, 1e9):
        metrics.first_token(seconds)
    found = samples(metrics)
    buckets = {
        dict(labels)["le"]: v for (name, labels), v in found.items() if name.endswith("first_token_seconds_bucket")
    }
    assert buckets["0.001"] == 2
    assert buckets["0.005"] == 3
    assert buckets["2560.0"] == 3
    assert buckets["+Inf"] == 4 == found["jaxserve:time_to_first_token_seconds_count", ()]


def test_prefix_and_two_engines_side_by_side():
    one, two = EngineMetrics(prefix="vllm"), EngineMetrics(prefix="vllm")
    one.tokens(5)
    assert samples(one)["vllm:generation_tokens_total", ()] == 5
    assert samples(two)["vllm:generation_tokens_total", ()] == 0


def test_nonsense_neither_raises_nor_lowers_a_counter(caplog):
    metrics = EngineMetrics()
    metrics.tokens(7, 0.01)
    metrics.tokens(-3, -1.0)
    metrics.preempted(-1)
    metrics.first_token(-5.0)
    with caplog.at_level(logging.ERROR):
        metrics.first_token("soon")  # type: ignore[arg-type]
        metrics.tokens(None, 0.1)  # type: ignore[arg-type]
    found = samples(metrics)
    assert found["jaxserve:generation_tokens_total", ()] == 7
    assert found["jaxserve:num_preemptions_total", ()] == 0
    assert found["jaxserve:time_to_first_token_seconds_sum", ()] == 0
    assert found["jaxserve:metrics_errors_total", ()] == 2
    assert len(caplog.records) == 1


def test_threads_lose_no_count():
    metrics = EngineMetrics()

    def work() -> None:
        for _ in range(2000):
            metrics.tokens(1, 0.001)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert samples(metrics)["jaxserve:generation_tokens_total", ()] == 8000


def test_a_step_of_32_sequences_costs_under_100_microseconds():
    metrics = EngineMetrics()

    def step() -> None:
        metrics.step(32, 32, 5, 0.5)
        for _ in range(32):
            metrics.tokens(1, 0.004)

    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            step()
        best = min(best, (time.perf_counter() - start) / 20)
    assert best < 100e-6, f"{best * 1e6:.0f} microseconds"
