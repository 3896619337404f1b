"""Rounds of prompts with common beginnings, a third of them hung up on, over too little memory: never a wrong token.

Every request is greedy and known beforehand from an engine that reuses nothing. Engines with a host tier, without,
with hardly any, and with a disk below that take the same rounds; at the end nothing may be held, and memory may not
have grown.
"""

import gc
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jaxserve
from jaxserve.request import Delta, SamplingParams

REQUESTS = 32
MEMORY = 64 << 20
"""Bytes the process may grow by after the first fifth of the rounds."""
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "page_size": 8,
    "load_progress": False,
    "forbid_compile": True,
}
PAGES = 24
"""What the device holds; a request needs up to 11."""
HOSTS = {"tier": (400, 0), "off": (0, 0), "tight": (12, 0), "disk": (12, 150)}
"""Pages that the host holds, and the disk, by engine."""

Ask = tuple[tuple[int, ...], int]
"""A prompt, and how many tokens are wanted."""


def questions(rng: random.Random, count: int) -> list[Ask]:
    """Prompts of at most 60 tokens, every three of which begin alike for 33 to 47 tokens."""
    beginnings = [[rng.randrange(3, 250) for _ in range(47)] for _ in range(max(1, count // 24))]
    found = []
    for _ in range(count):
        start = rng.choice(beginnings)[: rng.choice([33, 40, 47])]
        tail = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 13))]
        found.append((tuple(start + tail), rng.randrange(1, 25)))
    return found


def answers(llm: jaxserve.LLM, asks: list[Ask]) -> dict[Ask, list[int]]:
    params = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for _, count in asks]
    outputs = llm.generate([list(prompt) for prompt, _ in asks], params, progress=False)
    return {ask: output.outputs[0].token_ids for ask, output in zip(asks, outputs, strict=True)}


class Round:
    """Requests that run at once on one engine."""

    def __init__(self, llm: jaxserve.LLM, rng: random.Random, asks: list[Ask]):
        self.llm, self.asks = llm, asks
        self.said: list[list[int]] = [[] for _ in asks]
        self.reasons: list[str | None] = [None] * len(asks)
        self.patience = [rng.randrange(0, 12) if rng.random() < 0.2 else None for _ in asks]
        """Tokens after which it is hung up on."""
        self.left = threading.Semaphore(0)
        ids = [self.submit(number) for number in range(len(asks))]
        for request_id in rng.sample(ids, len(ids) // 6):
            time.sleep(rng.random() * 0.004)
            llm.abort(request_id)

    def submit(self, number: int) -> str:
        prompt, count = self.asks[number]
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)

        def on_delta(delta: Delta) -> None:
            self.said[number] += delta.token_ids
            patience = self.patience[number]
            if patience is not None and len(self.said[number]) >= patience and not delta.request_done:
                self.llm.abort(delta.request_id)
            if delta.request_done:
                self.reasons[number] = delta.finish_reason
                self.left.release()

        return self.llm.submit(list(prompt), params, on_delta=on_delta)

    def check(self, expected: dict[Ask, list[int]]) -> int:
        """Wait for all; raises AssertionError for a wrong token. Returns how many were answered whole."""
        for _ in self.asks:
            assert self.left.acquire(timeout=120), "a request does not end"
        whole = 0
        for ask, said, reason in zip(self.asks, self.said, self.reasons, strict=True):
            right = expected[ask]
            assert reason in ("length", "abort"), reason
            assert said == right[: len(said)], f"{said} instead of {right}"
            assert reason == "abort" or said == right
            whole += reason == "length"
        return whole


def check_idle(llm: jaxserve.LLM) -> None:
    """Raise AssertionError unless everything has come back and every gauge says so."""
    engine = llm._built.engine
    scheduler, deadline = engine.scheduler, time.monotonic() + 10
    moving = ("kv_offload_pending_transfers", "kv_store_pending_writes", "kv_backup_pending_pages")
    while not (scheduler.idle and llm.health().idle and all(gauge(llm, name) == 0 for name in moving)):
        assert time.monotonic() < deadline, "the engine does not come to rest"
        time.sleep(0.005)
    scheduler.check()
    assert scheduler.pool.free == scheduler.pool.usable
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert gauge(llm, name) == 0, name
    tier, stores = scheduler.cache.tier, scheduler.cache.stores
    assert stores is None or not stores.reading
    if tier is not None:
        tier.check()
        assert tier.nbytes == tier.records * tier.record_bytes <= tier.budget_bytes


def resident() -> int:
    """Bytes of memory that the process takes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def gauge(llm: jaxserve.LLM, name: str) -> float:
    name = f"{llm.config.metrics_prefix}:{name}"
    return sum(s.value for family in llm.metrics.collect() for s in family.samples if s.name == name)


def stress(
    model: str | Path,
    rounds: int,
    log: Callable[[str], object] = lambda line: None,
    *,
    seed: int = 0,
    hosts: dict[str, tuple[int, int]] = HOSTS,
    **options: Any,
) -> dict[str, Any]:
    """Run all of it, and raise AssertionError for whatever is wrong. ``model`` has at least 250 tokens."""
    rng = random.Random(seed)
    asks = questions(rng, 240)
    with jaxserve.LLM(str(model), prefix_caching=False, **LIMITS, kv_cache_memory_bytes=4 << 20, **options) as plain:
        expected = answers(plain, asks)
        page = plain._built.programs.record_bytes
    whole, begun = 0, time.perf_counter()
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(
                jaxserve.LLM(
                    str(model),
                    **LIMITS,
                    kv_cache_memory_bytes=(PAGES + 1) * page,
                    max_model_len=12 * LIMITS["page_size"],
                    host_kv_gib=host * page / 2**30,
                    **disk_options(stack, disk * page),
                    **options,
                )
            )
            for name, (host, disk) in hosts.items()
        }
        base = 0
        for number in range(rounds):
            chosen = [rng.choice(asks) for _ in range(REQUESTS)]
            for llm in llms.values():
                whole += Round(llm, rng, chosen).check(expected)
            if number == rounds // 5:
                for llm in llms.values():
                    check_idle(llm)
                gc.collect()
                base = resident()
            if number % 100 == 99:
                log(f"{number + 1} rounds, {time.perf_counter() - begun:.0f} s")
        for llm in llms.values():
            check_idle(llm)
        gc.collect()
        grown = resident() - base
        counts = {name: count(llm) for name, llm in llms.items()}
    assert grown < MEMORY, f"the process has grown by {grown} bytes"
    return {"rounds": rounds, "whole": whole, "grown_bytes": grown, "seconds": time.perf_counter() - begun} | counts


def disk_options(stack: ExitStack, room: int) -> dict[str, Any]:
    """A folder of ``room`` bytes that goes with the stack."""
    if not room:
        return {}
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxserve-tiers-"))
    return {"disk_kv_path": folder, "disk_kv_gib": room / 2**30}


def count(llm: jaxserve.LLM) -> dict[str, int]:
    scheduler = llm._built.engine.scheduler
    tier = scheduler.cache.tier
    moved = {} if tier is None else {"spilled": tier.counts.spilled, "restored": tier.counts.restored}
    stores = scheduler.cache.stores
    if stores is not None:
        counts = stores.stores[0].counts
        moved |= {"written": counts.written, "read": counts.read}
    return {"preemptions": scheduler.preemptions} | moved
