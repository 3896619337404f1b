"""Many streams for minutes, a share of which hang up, against a real server: does it leak, does health stay quick?

Streams follow one another in ``--streams`` lanes. Each asks for a completion or a chat of random length; a share hangs
up after a random time. Every few seconds a prompt of 8 MB is sent, which must be refused. Meanwhile a process of its
own asks for ``/health``, and ``/metrics`` is read. At the end the server must be as it was: no sequence, page, task or
connection left, nothing compiled, and memory flat after the first third.
"""

import argparse
import asyncio
import contextlib
import io
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from benchmarks import report

HELP = "streams and disconnects for minutes: leaks, and the latency of /health"
LARGE = 8_000_000
"""Characters of the prompts that are refused."""
PROBE_SECONDS, SAMPLE_SECONDS, REST_SECONDS = 0.05, 1.0, 60.0
WORDS = ["the", "river", "runs", "over", "stone", "and", "under", "bridges", "to", "a", "sea", "é", "漢", "😀", "👩‍👧"]
GAUGES = {
    "running": r"jaxserve:num_requests_running{.*}",
    "waiting": r"jaxserve:num_requests_waiting{.*}",
    "pages": r"jaxserve:kv_cache_usage_perc{.*}",
    "compiled": r"jaxserve:compilations_after_ready_total{.*}",
    "memory": r"process_resident_memory_bytes",
    "files": r"process_open_fds",
    "tasks": r"asyncio_tasks",
}


@dataclass(frozen=True)
class Sample:
    """What ``/metrics`` says at a time."""

    time: float
    values: dict[str, float]


@dataclass
class Soak:
    """What was done and seen."""

    counts: Counter[str] = field(default_factory=Counter)
    """Of streams: done, hung up, and what went wrong; of large prompts: refused."""
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    probes: list[tuple[float, float, int, float]] = field(default_factory=list)
    """Of each: time, seconds, status, and seconds that the probe itself overslept: how busy the machine was."""
    large: list[tuple[float, float]] = field(default_factory=list)
    """From and to when a large prompt was on its way."""

    def latencies(self, *, while_large: bool = False) -> list[float]:
        """Seconds that ``/health`` took; all, or those while a large prompt was on its way."""
        found = []
        for at, seconds, *_ in self.probes:
            if not while_large or any(begun <= at + seconds and at <= end for begun, end in self.large):
                found.append(seconds)
        return found

    def memory_growth(self) -> float:
        """Bytes from the second third of the run to the last tenth."""
        memory = [sample.values["memory"] for sample in self.samples]
        third, tenth = len(memory) // 3, max(1, len(memory) // 10)
        return float(np.median(memory[-tenth:]) - np.median(memory[third : 2 * third + 1]))


async def read_gauges(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as reply:
        text = await reply.text()
    found = {}
    for name, pattern in GAUGES.items():
        match = re.search(rf"^{pattern} (\S+)$", text, re.MULTILINE)
        if match is None:
            raise SystemExit(f"/metrics does not tell {name}")
        found[name] = float(match[1])
    return found


def request(rng: random.Random, longest: int) -> tuple[str, dict[str, Any]]:
    text = " ".join(rng.choices(WORDS, k=rng.randrange(1, longest // 8)))
    body: dict[str, Any] = {"max_tokens": rng.randrange(1, longest // 4), "stream": True, "seed": rng.randrange(2**40)}
    body |= {"stop": ["\n\n\n"]} if rng.random() < 0.2 else {}
    body |= {"stream_options": {"include_usage": True}} if rng.random() < 0.5 else {}
    body |= {"n": 2} if rng.random() < 0.1 else {}
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": text, "logprobs": 1} if rng.random() < 0.2 else body | {
            "prompt": text
        }
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}


async def stream(session: aiohttp.ClientSession, path: str, body: dict[str, Any], patience: float | None) -> str:
    """Follow one stream, at most for ``patience`` seconds; what became of it."""
    last = b""
    try:
        async with asyncio.timeout(patience), session.post(path, json=body) as reply:
            if reply.status != 200:
                return f"HTTP {reply.status}"
            async for line in reply.content:
                last = line.strip() or last
                if last.startswith(b'data: {"error"'):
                    return "error in the stream"
    except TimeoutError:
        return "hung up"
    except aiohttp.ClientError as error:
        return type(error).__name__
    return "done" if last == b"data: [DONE]" else "ended without [DONE]"


async def soak(
    url: str, *, seconds: float, streams: int, disconnects: float, longest: int, seed: int = 0, every: float = 5.0
) -> Soak:
    """Run it. ``longest`` is about how many tokens a request may have; a large prompt is sent ``every`` so often."""
    found, rng = Soak(), random.Random(seed)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        found.before = await read_gauges(session)
        end = time.time() + seconds

        async def lane() -> None:
            while time.time() < end:
                patience = rng.uniform(0, 4) if rng.random() < disconnects else None
                found.counts[await stream(session, *request(rng, longest), patience)] += 1

        async def large() -> None:
            prompt = json.dumps({"prompt": "x " * (LARGE // 2)}).encode()
            chat = json.dumps({"messages": [{"role": "user", "content": "x " * (LARGE // 2)}]}).encode()
            while time.time() < end:
                for path, raw in (("/v1/completions", prompt), ("/v1/chat/completions", chat)):
                    begun = time.time()
                    async with session.post(path, data=io.BytesIO(raw)) as reply:
                        error = (await reply.json()).get("error", {})
                        refused = reply.status == 400 and error.get("code") == "context_length_exceeded"
                    found.large.append((begun, time.time()))
                    found.counts["large prompts refused" if refused else "large prompts answered otherwise"] += 1
                    await asyncio.sleep(every)

        async def watch() -> None:
            while time.time() < end:
                found.samples.append(Sample(time.time(), await read_gauges(session)))
                await asyncio.sleep(min(SAMPLE_SECONDS, seconds / 20))

        with probing(url, found):
            await asyncio.gather(*(lane() for _ in range(streams)), large(), watch())
    async with aiohttp.ClientSession(url) as session:  # the connections of the other are closed
        end = time.time() + REST_SECONDS
        while not at_rest(found) and time.time() < end:
            await asyncio.sleep(0.5)
            found.after = await read_gauges(session)
    return found


@contextlib.contextmanager
def probing(url: str, found: Soak) -> Iterator[None]:
    command = [sys.executable, "-m", "benchmarks.probe", url, str(PROBE_SECONDS)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield
    finally:
        out, _ = process.communicate("")
        found.probes = [tuple(item) for item in json.loads(out)]


def at_rest(found: Soak) -> bool:
    return bool(found.after) and all(ok for _, _, _, ok in rest_checks(found))


type Check = tuple[str, float, float, bool]
"""What, how much, at most how much, and whether that holds."""


def rest_checks(found: Soak) -> list[Check]:
    """That nothing is left."""
    checks: list[Check] = []
    for name in ("running", "waiting", "pages", "compiled"):
        checks.append((name, found.after[name], 0, found.after[name] == 0))
    for name, slack in (("files", 2), ("tasks", 1)):
        most = found.before[name] + slack
        checks.append((name, found.after[name], most, found.after[name] <= most))
    return checks


def verdict(found: Soak, *, health_ms: float, growth_mib: float) -> list[Check]:
    fine = ("done", "hung up", "large prompts refused")
    bad = sum(count for what, count in found.counts.items() if what not in fine)
    growth = found.memory_growth() / 2**20
    slowest = max(found.latencies(), default=float("inf")) * 1e3
    unwell = sum(status != 200 for _, _, status, _ in found.probes)
    return [
        ("streams that went wrong", bad, 0, bad == 0),
        ("/health not 200", unwell, 0, unwell == 0),
        ("/health, ms", slowest, health_ms, slowest <= health_ms),
        ("memory after warm-up, MiB", growth, growth_mib, growth <= growth_mib),
        *((f"{name} at rest", value, most, holds) for name, value, most, holds in rest_checks(found)),
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", help="of a running server; without it one is started")
    parser.add_argument("--model", default="smollm2-135m", help="what the server that is started serves")
    parser.add_argument("--duration", type=float, default=180, help="seconds")
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--disconnects", type=float, default=0.2, help="share of streams that hang up")
    parser.add_argument("--longest", type=int, default=256, help="about how many tokens a request may have")
    parser.add_argument("--health-ms", type=float, default=100, help="longest that /health may take")
    parser.add_argument("--growth-mib", type=float, default=48, help="most that memory may grow after warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")


@contextlib.contextmanager
def server(model: str) -> Iterator[str]:
    """A server process for ``model``; its address once it is ready."""
    command = [sys.executable, "-m", "jaxserve", "serve", model, "--port", "0", "--access-log", "off"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    assert process.stderr is not None
    try:
        url = next((m[1] for line in process.stderr if (m := re.search(r"serving .* on (http\S+)", line))), None)
        if url is None:
            raise SystemExit(f"the server did not start: status {process.wait()}")
        threading.Thread(target=process.stderr.read, daemon=True).start()  # what it logs is not wanted, and must go
        yield url
    finally:
        process.terminate()
        process.wait()


def run(args: argparse.Namespace) -> None:
    where = report.environment()
    report.warn_if_busy()
    with contextlib.nullcontext(args.base_url) if args.base_url else server(args.model) as url:
        found = asyncio.run(
            soak(
                url,
                seconds=args.duration,
                streams=args.streams,
                disconnects=args.disconnects,
                longest=args.longest,
                seed=args.seed,
            )
        )
    checks = verdict(found, health_ms=args.health_ms, growth_mib=args.growth_mib)
    rows = [[name, value, most, "yes" if ok else "NO"] for name, value, most, ok in checks]
    report.show(f"{args.streams} streams, {args.duration:g} s", ["", "found", "at most", "holds"], rows)
    health: dict[str, list[float]] = {"all": found.latencies(), "while large": found.latencies(while_large=True)}
    health["the probe's own sleep"] = [late for *_, late in found.probes]
    table = [
        [name, len(v), *(f"{np.percentile(v, p) * 1e3:.1f}" for p in (50, 90, 99, 100))]
        for name, v in health.items()
        if v
    ]
    report.show("/health, milliseconds", ["probes", "count", "p50", "p90", "p99", "max"], table)
    report.CONSOLE.print(", ".join(f"{count} {what}" for what, count in found.counts.most_common()), highlight=False)
    arguments = {key: value for key, value in vars(args).items() if key != "run"}
    payload = {"counts": found.counts, "before": found.before, "after": found.after, "probes": found.probes}
    payload["samples"] = [{"time": sample.time} | sample.values for sample in found.samples]
    report.save_json(args.json, {"benchmark": "soak", "environment": where, "arguments": arguments} | payload)
    if not all(ok for *_, ok in checks):
        raise SystemExit(1)
