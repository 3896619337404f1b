"""Operators' cases (``test_operator_cases``) about what happens around the answers: memory, ids, preemption, limits."""

import gc
import json
import random
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tiny import FIXTURES, idle, roomy

import jaxserve
from jaxserve.models import model_config
from tests.operator_oracle import at_rest, metric, refused, well
from tests.serving import Server, serving

MEMORY = 32 << 20
"""Bytes that the process may grow by over the second half of many scored prompts."""

SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
]


@pytest.fixture(scope="module")
def server(llm: jaxserve.LLM) -> Iterator[Server]:
    with serving(llm, close_llm=False) as found:
        yield found


@pytest.fixture(scope="module")
def tight(speaking: Path, programs_dir: str) -> Iterator[Server]:
    """A server whose cache holds little more than the longest sequence."""
    with (
        roomy(programs_dir, speaking, kv_cache_memory_bytes=33 * 8 * 768) as llm,
        serving(llm, close_llm=False) as found,
    ):
        yield found


def test_two_hundred_scored_prompts_compile_and_leak_nothing(server: Server) -> None:
    """Case 20: any lengths, with and without log-probabilities of the prompt."""
    rng, process = random.Random(0), psutil.Process()

    def one(size: int) -> None:
        body = {
            "prompt": [rng.randrange(256) for _ in range(size)],
            "max_tokens": 2,
            "prompt_logprobs": rng.choice([0, 5]),
        }
        if rng.random() < 0.2:
            del body["prompt_logprobs"]
        status, answer, _ = server.send("/v1/completions", body)
        assert status == 200, answer
        if "prompt_logprobs" in body:
            assert len(answer["choices"][0]["prompt_logprobs"]) == size

    sizes = [rng.randrange(1, 250) for _ in range(200)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(one, sizes[:100]))
        gc.collect()
        middle = process.memory_info().rss
        list(pool.map(one, sizes[100:]))
    at_rest(server)  # which also says that nothing was compiled
    gc.collect()
    assert process.memory_info().rss - middle < MEMORY


def preempted(server: Server) -> int:
    return int(metric(server, "num_preemptions_total"))


def test_a_preempted_request_that_is_aborted_leaves_nothing(tight: Server) -> None:
    """Case 50, as far as sequences are computed again and not spilled: twenty rounds of aborts under pressure."""
    llm, before = tight.llm, preempted(tight)
    for round in range(20):
        ends = [threading.Event() for _ in range(4)]

        def on_delta(delta: Any, end: threading.Event) -> None:
            if delta.request_done:
                end.set()

        params = jaxserve.SamplingParams(max_tokens=150, ignore_eos=True)
        ids = [llm.submit([round] * 60, params, on_delta=lambda delta, end=end: on_delta(delta, end)) for end in ends]
        target = preempted(tight) + 1
        while preempted(tight) < target and not all(end.is_set() for end in ends):
            pass
        for request_id in ids:
            llm.abort(request_id)
        assert all(end.wait(20) for end in ends)
        idle(llm)
    assert preempted(tight) >= before + 10
    well(tight)


def test_preemptions_are_few_and_told(tight: Server) -> None:
    """Case 54: long prompts and a tiny pool; nobody is preempted again and again, and each says how often it was."""

    def one(seed: int) -> None:
        body = {"prompt": "x" * 100, "max_tokens": 100, "ignore_eos": True, "seed": seed}
        status, answer, _ = tight.send("/v1/completions", body)
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 100

    before, counted = preempted(tight), metric(tight, "request_num_preemptions_count")
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(24)))
    at_rest(tight)
    text = tight.send("/metrics")[1]
    buckets = {
        float(edge): float(count)
        for edge, count in re.findall(r'^jaxserve:request_num_preemptions_bucket{.*le="([^"]+)".*} (\S+)$', text, re.M)
    }
    assert preempted(tight) > before
    assert metric(tight, "request_num_preemptions_count") == counted + 24
    total = buckets[float("inf")]
    beyond = next(edge for edge in sorted(buckets) if edge >= 4)
    assert buckets[beyond] == total, buckets
    assert buckets[1.0] >= 0.8 * total, buckets


def test_equal_request_ids_side_by_side(server: Server) -> None:
    """Case 52: both are served, alone and streamed; an endless id is no reason to fall over."""
    headers = {"X-Request-Id": "the-same"}
    body = {"prompt": "Hi", "max_tokens": 60, "ignore_eos": True, "temperature": 0}

    def one(stream: bool) -> tuple[int, str | None]:
        status, _, found = server.send("/v1/completions", body | {"stream": stream}, headers=headers)
        return status, found["X-Request-Id"]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(one, [False, True, False, True])) == [(200, "the-same")] * 4
    at_rest(server)
    for size, status in ((200, 200), (100_000, 431), (1_000_000, 431)):
        found = server.send("/v1/completions", body, headers={"X-Request-Id": "x" * size})
        assert found[0] == status
        assert len(json.dumps(found[1])) < 8192
        assert len(found[2]["X-Request-Id"]) < 200
        well(server)


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_no_scaling_lengthens_the_context(scaling: dict[str, Any]) -> None:
    """Case 68: ``max_position_embeddings`` says how long the context is; frequencies are scaled, it is not."""
    config = json.loads((FIXTURES / "llama3" / "config.json").read_text())
    config |= {"max_position_embeddings": 32768, "rope_scaling": scaling}
    config.pop("rope_parameters", None)
    assert model_config(config).max_position == 32768


def test_what_is_refused_without_end_leaves_nothing(server: Server) -> None:
    """Complaint 1: the same bad requests over and over, among good ones."""
    before = psutil.Process().num_fds()
    for round in range(10):
        refused(server, "/v1/completions", {"prompt": "Hi", "stop_token_ids": [10**9], "n": 3})
        refused(server, "/v1/completions", b"{" * (round + 1))
        refused(server, "/v1/chat/completions", {"messages": [{"role": "odd", "content": "x"}]})
    assert psutil.Process().num_fds() <= before + 5
