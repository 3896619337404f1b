"""The metrics: right counts, parseable text, cheap at every step, and never an error for the engine."""

import json
import logging
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tiny import idle

import jaxserve
from jaxserve.executables import Tally
from jaxserve.metrics import EngineMetrics
from jaxserve.request import SamplingParams
from tests.serving import Server, complete, serving

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


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
    metrics.tokens([None])
    metrics.tokens([0.02] * 3)
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
    one.tokens([None] * 5)
    assert samples(one)["vllm:generation_tokens_total", ()] == 5
    assert samples(two)["vllm:generation_tokens_total", ()] == 0


def test_nonsense_neither_raises_nor_lowers_a_counter(caplog):
    metrics = EngineMetrics()
    metrics.tokens([0.01] * 7)
    metrics.preempted(-1)
    metrics.first_token(-5.0)
    with caplog.at_level(logging.ERROR):
        metrics.first_token("soon")  # type: ignore[arg-type]
        metrics.tokens(None)  # type: ignore[arg-type]
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
            metrics.tokens([0.001])

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
            metrics.tokens([0.004])

    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            step()
        best = min(best, (time.perf_counter() - start) / 20)
    assert best < 100e-6, f"{best * 1e6:.0f} microseconds"


# What the server prints.

PEER = [
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total"),
    *("generation_tokens_total", "request_success_total", "admission_rejections_total"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
    *("request_generation_tokens", "request_max_num_generation_tokens", "request_params_n"),
    *("request_params_max_tokens", "iteration_tokens_total", "request_num_preemptions"),
]
"""Names that the peer's dashboards ask for, without the prefix."""


def printed(server: Server) -> set[str]:
    """The names of all samples in /metrics."""
    families = text_string_to_metric_families(server.send("/metrics")[1])
    return {sample.name for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def server(llm: jaxserve.LLM) -> Iterator[Server]:
    with serving(llm, close_llm=False) as found:
        complete(found, model=found.state.model_name, max_tokens=3)
        yield found


def test_the_names_of_the_peer_are_there(server):
    found = printed(server)
    for name in PEER:
        assert {f"jaxserve:{name}", f"jaxserve:{name}_bucket"} & found, name
    assert {"http_requests_total", "http_request_duration_seconds_sum", "process_resident_memory_bytes"} <= found


def test_the_dashboard_asks_only_for_metrics_that_exist(server):
    board = json.loads((Path(__file__).parent.parent / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked += [item["query"]["query"] for item in board["templating"]["list"] if item["type"] == "query"]
    names = {name for text in asked for name in re.findall(r"(?:jaxserve:|http_|process_)\w+", text)}
    assert len(names) > 20
    assert names <= printed(server)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for text in asked:
        assert text.count("(") == text.count(")")
        assert not re.search(r"\b(?:sum|rate|by|le)\b\s*$", text)


def test_openmetrics_and_odd_versions_are_answered(server):
    for accept in ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text;version=x", "a;b=c,,"):
        status, text, _ = server.send("/metrics", headers={"Accept": accept})
        assert status == 200
        assert "num_requests_running" in text


def rest(llm: jaxserve.LLM) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The samples once the engine is idle and all its gauges say so."""
    idle(llm)
    end = time.monotonic() + 5
    while any((found := samples(llm._built.metrics))[f"jaxserve:{gauge}", ()] for gauge in GAUGES):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.mark.parametrize("at_once", [1, 8])
def test_the_times_of_a_request_add_up(llm, at_once):
    """Of eight requests one after another, or of eight at once for the engine's four places."""
    before, wall, tokens = rest(llm), 0.0, 40
    for first in range(0, 8, at_once):
        start = time.monotonic()
        prompts = [f"prompt {i}" for i in range(first, first + at_once)]
        llm.generate(prompts, max_tokens=tokens, ignore_eos=True, progress=False)
        wall += time.monotonic() - start
    after = rest(llm)

    def grown(metric: str, part: str = "sum") -> float:
        key = (f"jaxserve:{metric}_seconds_{part}", ())
        return after[key] - before[key]

    parts = ("queue", "prefill", "decode", "inference")
    for name in ("e2e_request_latency", "time_to_first_token", *(f"request_{part}_time" for part in parts)):
        assert grown(name, "count") == 8, name
    e2e, first_token = grown("e2e_request_latency"), grown("time_to_first_token")
    queue, prefill, decode, inference = (grown(f"request_{part}_time") for part in parts)
    assert min(queue, prefill, decode) > 0
    assert e2e <= wall * at_once
    assert queue + prefill + decode == pytest.approx(e2e, abs=1e-6)
    assert queue + prefill == pytest.approx(first_token, abs=1e-6)
    assert prefill + decode == pytest.approx(inference, abs=1e-6)
    if at_once > 4:  # half of them wait for the other half
        assert queue > 0.1 * e2e
    assert grown("inter_token_latency", "count") == 8 * (tokens - 1)
    assert 0.8 * decode < grown("inter_token_latency") <= decode + 1e-6
    assert grown("request_time_per_output_token") == pytest.approx(decode / (tokens - 1), abs=1e-6)


def test_gauges_come_back_after_every_way_to_end(llm, server):
    """Aborts, refusals, deadlines, ends: whatever happened, an idle engine says zero and every request is counted."""
    name = server.state.model_name
    before = samples(llm._built.metrics)
    complete(server, model=name, max_tokens=0)
    complete(server, model=name, prompt="x" * 100_000)
    complete(server, model=name, prompt=[10**6])
    with serving(llm, close_llm=False, request_timeout=0.05) as hasty:
        assert complete(hasty, model=name, max_tokens=240, ignore_eos=True, n=8)[0] == 504
    deltas = []
    for _ in range(6):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        llm.abort(llm.submit("abc", params, on_delta=deltas.append))
    complete(server, model=name, max_tokens=3, n=2)
    after = rest(llm)

    def grown(metric: str, **labels: str) -> float:
        key = (f"jaxserve:{metric}", tuple(labels.items()))
        return after[key] - before[key]

    assert grown("request_success_total", finished_reason="abort") == 6 + 8
    assert grown("admission_rejections_total", reason="deadline") == 1
    assert grown("admission_rejections_total", reason="too_long") == 1
    assert grown("request_params_n_count") == 6 + 1 + 1
    assert grown("metrics_errors_total") == 0
    assert server.send("/load")[1] == {"server_load": 0, "running": 0, "waiting": 0}


def test_stored_programs_are_counted_as_they_are_when_asked_for():
    """Some are loaded after ready."""
    tally = Tally(loaded=3, compiled=2, discarded=["x: damaged"])
    tally.kinds.update(["sources", "new"])
    metrics = EngineMetrics()
    metrics.follow_executables(tally)
    tally.loaded += 4
    tally.not_stored["No space left on device"] += 2
    found = samples(metrics)
    outcomes = {labels[0][1]: value for (name, labels), value in found.items() if name == "jaxserve:executables_total"}
    assert outcomes == {"loaded": 7, "compiled": 2, "discarded": 1, "evicted": 0, "not_stored": 2}
    reasons = {labels[0][1]: v for (name, labels), v in found.items() if name == "jaxserve:executables_missed_total"}
    assert reasons == {"sources": 1, "new": 1}
