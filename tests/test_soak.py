"""Random requests of every kind, through one engine and over HTTP: nothing compiles, leaks, or ends wrongly."""

import asyncio
import dataclasses
import gc
import random
import threading
import time
from typing import Any

import psutil
import pytest
from tiny import idle

import jaxserve
from benchmarks.soak import soak, verdict
from jaxserve.request import Delta, SamplingParams
from tests.operator_oracle import at_rest
from tests.serving import serving

REQUESTS = 500
AT_ONCE = 24
MEMORY = 48 << 20
"""Bytes the process may grow by over the second half of the run."""


def random_params(rng: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 20, 60])}
    choices: dict[str, Any] = {
        "n": rng.choice([2, 3]),
        "temperature": rng.choice([0.0, 0.3, 1.5, 100.0]),
        "top_k": rng.choice([-1, 1, 3, 50, 10**6]),
        "top_p": rng.choice([1e-9, 0.5, 0.99]),
        "min_p": rng.choice([0.05, 1.0]),
        "seed": rng.randrange(-(2**63), 2**63),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.choice([0.5, 1.3, 100.0]),
        "logit_bias": {rng.randrange(256): rng.uniform(-100, 100) for _ in range(rng.choice([1, 200]))},
        "allowed_token_ids": rng.sample(range(3, 256), rng.choice([3, 100])),
        "bad_words": rng.choice([["a"], ["ab", "x y z"], ["é", "the"]]),
        "min_tokens": 1,
        "ignore_eos": True,
        "stop": rng.choice([["e"], ["th", "zz"]]),
        "stop_token_ids": rng.sample(range(256), 5),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": rng.choice([0, 1, 20]),
        "prompt_logprobs": rng.choice([0, 1, 20]),
        "echo": True,
    }
    fields |= {name: choices[name] for name in rng.sample(sorted(choices), rng.choice([0, 1, 3, 8]))}
    if rng.random() < 0.05:
        fields = {"max_tokens": 0, "echo": True, "prompt_logprobs": 1}
    return SamplingParams(**fields)


def random_prompt(rng: random.Random) -> str | list[int]:
    size = rng.choice([1, 3, 16, 32, 33, 64, 120, 190])
    if rng.random() < 0.3:
        return "".join(rng.choices("aeé😀 \n", k=size // 3 + 1))
    return [rng.randrange(256) for _ in range(size)]


@dataclasses.dataclass
class Client:
    """One request: what was asked, what came, and when it will hang up."""

    params: SamplingParams
    prompt: list[int]
    patience: int | None
    """Deltas until it aborts."""
    deltas: list[Delta]
    request_id: str = ""
    aborted: bool = False


def check(llm: jaxserve.LLM, client: Client) -> None:
    """Everything that can be said of a finished request without knowing the model."""
    params, prompt = client.params, client.prompt
    assert [d.request_done for d in client.deltas] == [False] * (len(client.deltas) - 1) + [True]
    assert {d.request_id for d in client.deltas} == {client.request_id}
    for index in range(params.n):
        mine = [d for d in client.deltas if d.index == index]
        assert [d.finish_reason is not None for d in mine] == [False] * (len(mine) - 1) + [True]
        ids = [t for d in mine for t in d.token_ids]
        text = "".join(d.text for d in mine)
        reason, stop = mine[-1].finish_reason, mine[-1].stop_reason
        if params.echo and (ids or reason != "abort"):
            assert ids[: len(prompt)] == prompt
            ids = ids[len(prompt) :]
        assert all(0 <= t < llm.vocab_size for t in ids)
        longest = min(params.max_tokens, llm.max_model_len - len(prompt))
        assert len(ids) <= longest
        if reason == "length":
            assert len(ids) == longest
        elif reason == "stop":
            assert stop is None or stop in params.stop or ids[-1] == stop
            assert stop is not None or (ids[-1] == 2 and not params.ignore_eos)
            assert len(ids) > params.min_tokens or isinstance(stop, str)
        else:
            assert reason == "abort"
            assert client.aborted
        if params.allowed_token_ids is not None:
            assert set(ids) <= set(params.allowed_token_ids)
        logprobs = [p for d in mine for p in d.logprobs or ()]
        assert [p.token_id for p in logprobs] == (ids if params.logprobs is not None else [])
        assert all(p.logprob <= 0 and p.rank >= 1 and len(p.top) == params.logprobs for p in logprobs)
        scored = [d.prompt_logprobs for d in mine if d.prompt_logprobs is not None]
        if params.prompt_logprobs is None or index:
            assert not scored
        elif reason != "abort":
            assert [p and p.token_id for p in scored[0]] == [None, *prompt[1:]]
            assert all(len(p.top) == params.prompt_logprobs for p in scored[0][1:])
        plain = reason != "abort" and params.skip_special_tokens and not params.stop and not params.echo
        if plain and prompt[-1] < 128:  # otherwise the answer may complete the prompt's last character
            hidden = reason == "stop" and not (params.include_stop_str_in_output and isinstance(stop, int))
            assert text == llm.tokenizer.decode(ids[:-1] if hidden else ids)


def run(llm: jaxserve.LLM, seed: int, count: int) -> list[Client]:
    """``AT_ONCE`` requests at a time, a fifth of which hang up after a while."""
    rng = random.Random(seed)
    gate, finished = threading.Semaphore(AT_ONCE), []

    def start() -> None:
        params, prompt = random_params(rng), random_prompt(rng)
        patience = rng.choice([0, 1, 2, 10, 40]) if rng.random() < 0.2 else None
        ids = prompt if isinstance(prompt, list) else llm.tokenizer.encode(prompt)
        client = Client(params, ids, patience, [])

        def on_delta(delta: Delta) -> None:
            client.deltas.append(delta)
            if client.patience == len(client.deltas):
                client.aborted = True
                llm.abort(delta.request_id)
            if delta.request_done:
                finished.append(client)
                gate.release()

        client.request_id = llm.submit(prompt, params, on_delta=on_delta, priority=rng.choice([0, 0, 1, -1]))
        if client.patience == 0:
            client.aborted = True
            llm.abort(client.request_id)

    for _ in range(count):
        assert gate.acquire(timeout=60)
        start()
    deadline = time.monotonic() + 60
    while len(finished) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return finished


@pytest.mark.timeout(120)
def test_five_hundred_random_requests_leave_nothing_behind(llm: jaxserve.LLM) -> None:
    process = psutil.Process()
    clients = run(llm, 1, REQUESTS // 2)
    idle(llm)
    gc.collect()
    middle = process.memory_info().rss
    clients += run(llm, 2, REQUESTS // 2)
    idle(llm)
    assert len(clients) == REQUESTS
    for client in clients:
        check(llm, client)
    reasons = {d.finish_reason for client in clients for d in client.deltas}
    assert reasons == {None, "stop", "length", "abort"}
    assert llm.compilations_after_ready == 0
    assert not llm._built.engine._entries
    del clients
    gc.collect()
    assert process.memory_info().rss - middle < MEMORY


@pytest.mark.timeout(120)
def test_streams_and_disconnects_leave_a_server_as_it_was(llm: jaxserve.LLM) -> None:
    """Ten seconds of what ``python -m benchmarks soak`` does for three minutes to a server of its own.

    Clients and server share one interpreter here, so health is slower than it would be.
    """
    with serving(llm, close_llm=False) as server:
        found = asyncio.run(soak(server.url, seconds=10, streams=24, disconnects=0.3, longest=100, every=1))
        checks = verdict(found, health_ms=2000, growth_mib=MEMORY / 2**20)
        assert all(holds for *_, holds in checks), [check for check in checks if not check[-1]]
        assert found.counts["done"] > 20
        assert found.counts["hung up"] > 2
        assert found.counts["large prompts refused"] > 3
        assert len(found.latencies(while_large=True)) > 3
        at_rest(server)
