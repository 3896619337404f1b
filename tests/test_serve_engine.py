"""The server over the real engine with a tiny model: what a fake cannot show. Random numbers and random company."""

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tiny import roomy

from tests.serving import Server, counts, events, serving

CONTEXT = 256


@pytest.fixture(scope="module")
def server(speaking: Path, programs_dir: str) -> Iterator[Server]:
    with roomy(programs_dir, speaking, served_name="tiny") as llm, serving(llm, close_llm=False) as found:
        yield found


def complete(server: Server, **fields: Any):
    return server.send("/v1/completions", {"prompt": "Hi", "max_tokens": 12, "temperature": 0} | fields)


def gauges(server: Server) -> dict[str, float]:
    text = server.send("/metrics")[1]
    return {
        name: float(re.search(rf"^jaxserve:{name}{{.*}} (\S+)$", text, re.MULTILINE)[1])
        for name in (
            "num_requests_running",
            "num_requests_waiting",
            "kv_cache_usage_perc",
            "compilations_after_ready_total",
        )
    }


def check_idle(server: Server) -> None:
    """Nothing runs, waits or holds pages, nothing was compiled, and the server is well; within a few seconds."""
    end = time.monotonic() + 20
    while any(gauges(server).values()) and time.monotonic() < end:
        time.sleep(0.05)
    assert gauges(server) == dict.fromkeys(gauges(server), 0.0)
    status, health, _ = server.send("/health")
    assert (status, health["running"], health["waiting"]) == (200, 0, 0)
    assert not server.state.channels


def test_echo_and_log_probabilities_of_prompt_and_completion(server):
    whole = complete(server, prompt="abc", echo=True, logprobs=2, return_token_ids=True)[1]["choices"][0]
    assert whole["text"].startswith("abc")
    assert whole["prompt_token_ids"] == [97, 98, 99]
    found = whole["logprobs"]
    assert {len(values) for values in found.values()} == {3 + 12}
    assert found["token_logprobs"][0] is None
    assert all(value < 0 for value in found["token_logprobs"][1:])
    again = complete(server, prompt=[97, 98, 99, *whole["token_ids"]], echo=True, logprobs=2, max_tokens=0)[1]
    scored = again["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[1:] == pytest.approx(found["token_logprobs"][1:], abs=1e-4)
    assert [again["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [15, 0, 15]


def test_stop_strings_and_ids_name_themselves(server):
    ids = complete(server, return_token_ids=True, ignore_eos=True)[1]["choices"][0]["token_ids"]
    choice = complete(server, stop_token_ids=[ids[5]], return_token_ids=True, ignore_eos=True)[1]["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] == ids[5]
    assert choice["token_ids"] == ids[: ids.index(ids[5]) + 1]


def test_the_context_is_the_limit(server):
    answer = complete(server, prompt="x" * (CONTEXT - 5), max_tokens=100, ignore_eos=True)[1]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 5
    body = {"messages": [{"role": "user", "content": "x" * 200}], "ignore_eos": True}
    answer = server.send("/v1/chat/completions", body)[1]
    assert answer["usage"]["total_tokens"] == CONTEXT
    status, answer, _ = complete(server, prompt="x" * CONTEXT)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert str(CONTEXT) in answer["error"]["message"]


def random_fields(rng: random.Random) -> dict[str, Any]:
    """A request that is fine, save for what the engine's own random choices make of it."""
    fields: dict[str, Any] = {
        "prompt": "".join(rng.choices("abc é漢😀\n", k=rng.choice([1, 5, 40, 100]))),
        "max_tokens": rng.choice([1, 2, 10, 30]),
        "temperature": rng.choice([0, 0.7, 1.5]),
        "seed": rng.randrange(2**40),
        "n": rng.choice([1, 1, 2]),
    }
    extras = {
        "top_k": rng.choice([1, 3, 50]),
        "top_p": 0.8,
        "min_p": 0.05,
        "logprobs": rng.choice([0, 3]),
        "stop": [rng.choice("aeiou"), "th"],
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {str(rng.randrange(256)): 5},
        "min_tokens": 1,
        "ignore_eos": True,
        "bad_words": ["a b"],
        "include_stop_str_in_output": True,
    }
    return fields | {name: extras[name] for name in rng.sample(sorted(extras), rng.randrange(4))}


def test_a_stream_says_what_the_whole_answer_says_in_any_company(server):
    """Each request alone, and then all at once as streams: same text, tokens, reasons and usage."""
    rng = random.Random(0)
    requests = [random_fields(rng) | {"return_token_ids": True} for _ in range(24)]
    alone = [complete(server, **fields)[1] for fields in requests]

    async def together() -> list[str]:
        async with aiohttp.ClientSession() as session:

            async def one(fields: dict[str, Any]) -> str:
                body = fields | {"stream": True, "stream_options": {"include_usage": True}}
                async with session.post(server.url + "/v1/completions", json=body) as reply:
                    return await reply.text()

            return await asyncio.gather(*map(one, requests))

    for whole, text in zip(alone, asyncio.run(together()), strict=True):
        chunks = events(text)
        assert counts(chunks.pop()["usage"]) == counts(whole["usage"])
        for expected in whole["choices"]:
            pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
            assert "".join(piece["text"] for piece in pieces) == expected["text"]
            assert [token for piece in pieces for token in piece["token_ids"]] == expected["token_ids"]
            assert pieces[-1]["finish_reason"] == expected["finish_reason"]
            assert pieces[-1]["stop_reason"] == expected["stop_reason"]
    check_idle(server)


EXTREMES = [0, -1, 1, 2**31, 2**32, 2**40, 2**63, 2**64, 10**30, 1e-30, 1e30, 0.5]
NUMBERS = [
    *("n", "temperature", "top_k", "top_p", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "min_tokens", "max_tokens", "logprobs", "prompt_logprobs", "priority"),
]
LISTS = ["allowed_token_ids", "stop_token_ids", "prompt"]


@pytest.mark.parametrize("name", [*NUMBERS, *LISTS, "logit_bias", "logit_bias value"])
def test_extreme_numbers_are_served_or_refused_but_never_break_the_engine(server, name):
    for value in EXTREMES:
        field: dict[str, Any] = {name: value}
        if name in LISTS:
            field = {name: [value]}
        elif name == "logit_bias":
            field = {name: {str(value): 1.0}}
        elif name == "logit_bias value":
            field = {"logit_bias": {"5": value}}
        fields = {"max_tokens": 4, "temperature": 0.9, "top_p": 0.9} | field
        if name in ("max_tokens", "n"):
            fields |= {"stop_token_ids": list(range(256))}  # or it might go on to the end of the context
        status, answer, _ = complete(server, **fields)
        assert status in (200, 400), (field, answer)
        if status == 400:
            assert len(str(answer)) < 2048
    assert complete(server)[0] == 200
    check_idle(server)


def test_random_requests_with_disconnects_leave_nothing_behind(server):
    rng = random.Random(1)

    async def go() -> list[int | None]:
        gate = asyncio.Semaphore(16)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def one(fields: dict[str, Any], patience: float | None) -> int | None:
                async with gate:
                    with contextlib.suppress(TimeoutError):
                        async with (
                            asyncio.timeout(patience),
                            session.post(server.url + "/v1/completions", json=fields) as reply,
                        ):
                            await reply.read()
                            return reply.status
                return None

            work = []
            for _ in range(120):
                fields = random_fields(rng) | {"stream": rng.random() < 0.5}
                if rng.random() < 0.1:
                    fields["stop_token_ids"] = [10**9]
                work.append(one(fields, rng.uniform(0.0, 0.1) if rng.random() < 0.3 else None))
            return await asyncio.gather(*work)

    statuses = asyncio.run(go())
    assert set(statuses) <= {200, 400, None}
    assert statuses.count(200) > 60
    check_idle(server)
