"""Latency and throughput of a running OpenAI-style server under load, over HTTP with server-sent events.

Open loop: requests arrive at a rate (``--request-rate``, Poisson unless ``--burstiness`` says otherwise) whatever the
server does. Closed loop: at most ``--max-concurrency`` are out at once. Both may be given, and several values of each
are run one after another. The definitions are those of the peer's ``bench serve``:

TTFT, from sending to the first chunk with a choice; ITL, between successive chunks; E2EL, from sending to the last
chunk; TPOT, (E2EL - TTFT) / (output tokens - 1). Throughputs are over the whole run, first sending to last answer.
"""

import argparse
import asyncio
import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks import report
from benchmarks.load import Prompt, arrival_times, dataset_prompts, random_prompts
from benchmarks.stats import summary

HELP = "latency and throughput of a running server, open or closed loop"
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass
class Outcome:
    """One request as the client saw it; times in seconds."""

    started: float = 0.0
    ttft: float | None = None
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    input_tokens: int = 0
    output_tokens: int = 0
    chunk_times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        if self.ttft is None or self.output_tokens < 2:
            return None
        return (self.latency - self.ttft) / (self.output_tokens - 1)

    def meets(self, goals: dict[str, float]) -> bool:
        """Whether it succeeded within every goal (milliseconds)."""
        values = {"ttft": self.ttft, "tpot": self.tpot or 0.0, "e2el": self.latency}
        return self.error is None and all((values[name] or 0.0) * 1e3 <= goal for name, goal in goals.items())


async def ask(session: aiohttp.ClientSession, base_url: str, body: dict[str, Any], prompt: Prompt) -> Outcome:
    """Send one streaming request and time what comes back. Never raises for what a server may do wrong."""
    outcome = Outcome()
    payload = body | prompt.body | {"max_tokens": prompt.output_len}
    payload |= {"stream": True, "stream_options": {"include_usage": True}}
    outcome.started = last = time.perf_counter()
    finished = False
    try:
        async with session.post(base_url + prompt.endpoint, json=payload) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return outcome
            async for raw in response.content:
                line = raw.strip()
                if not line.startswith(b"data:"):  # comments keep the connection alive
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    finished = True
                    break
                chunk = json.loads(data)
                if chunk.get("error"):
                    outcome.error = f"in the stream: {chunk['error']}"
                    return outcome
                if usage := chunk.get("usage"):
                    outcome.input_tokens = usage["prompt_tokens"]
                    outcome.output_tokens = usage["completion_tokens"]
                if not chunk.get("choices"):
                    continue
                now = time.perf_counter()
                if outcome.ttft is None:
                    outcome.ttft = now - outcome.started
                else:
                    outcome.itl.append(now - last)
                outcome.chunk_times.append(now)
                last = now
    except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return outcome
    outcome.latency = last - outcome.started
    if not finished:
        outcome.error = "the stream ended without [DONE]"
    elif outcome.ttft is None:
        outcome.error = "the stream held no choice"
    elif not outcome.output_tokens:
        outcome.error = "the stream held no usage"
    return outcome


@dataclass
class Load:
    """One run of the load generator, and what came of it."""

    outcomes: list[Outcome]
    duration: float
    most_at_once: int

    def figures(self, goals: dict[str, float]) -> dict[str, Any]:
        good = [o for o in self.outcomes if o.error is None]
        tokens_in, tokens_out = sum(o.input_tokens for o in good), sum(o.output_tokens for o in good)
        seconds: dict[int, float] = defaultdict(float)
        for outcome in good:
            for when in outcome.chunk_times:  # a chunk may hold several tokens; the client sees only their sum
                seconds[int(when)] += outcome.output_tokens / len(outcome.chunk_times)
        samples: dict[str, list[float]] = {
            "ttft": [o.ttft for o in good if o.ttft is not None],
            "tpot": [o.tpot for o in good if o.tpot is not None],
            "itl": [gap for o in good for gap in o.itl],
            "e2el": [o.latency for o in good],
        }
        return {
            "completed": len(good),
            "failed": len(self.outcomes) - len(good),
            "duration": self.duration,
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": len(good) / self.duration,
            "request_goodput": sum(o.meets(goals) for o in good) / self.duration if goals else None,
            "output_throughput": tokens_out / self.duration,
            "total_token_throughput": (tokens_in + tokens_out) / self.duration,
            "max_output_tokens_per_s": max(seconds.values(), default=0),
            "max_concurrent_requests": self.most_at_once,
        } | {f"{name}_ms": summary(samples[name], 1e3) for name in METRICS}


async def run_load(
    base_url: str,
    body: dict[str, Any],
    prompts: Sequence[Prompt],
    times: Sequence[float],
    concurrency: int | None,
    *,
    timeout: float,
    api_key: str | None = None,
) -> Load:
    """Send each prompt at its time (seconds from now), with at most ``concurrency`` out at once."""
    gate = asyncio.Semaphore(concurrency) if concurrency else contextlib.nullcontext()
    out = most = 0
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    limit = aiohttp.ClientTimeout(total=timeout)
    async with aiohttp.ClientSession(connector=connector, timeout=limit, headers=headers) as session:
        start = time.perf_counter()

        async def one(prompt: Prompt, when: float) -> Outcome:
            nonlocal out, most
            await asyncio.sleep(max(0.0, start + when - time.perf_counter()))
            async with gate:
                out += 1
                most = max(most, out)
                try:
                    return await ask(session, base_url, body, prompt)
                finally:
                    out -= 1

        outcomes = await asyncio.gather(*(one(p, t) for p, t in zip(prompts, times, strict=True)))
        return Load(list(outcomes), time.perf_counter() - start, most)


async def first_model(base_url: str, api_key: str | None) -> str:
    """The first model the server lists."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
    async with aiohttp.ClientSession(headers=headers) as session, session.get(base_url + "/v1/models") as response:
        response.raise_for_status()
        return (await response.json())["data"][0]["id"]


def goal(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    if name not in ("ttft", "tpot", "e2el"):
        raise argparse.ArgumentTypeError(f"{text!r}: ttft, tpot or e2el, a colon and milliseconds are wanted")
    return name, float(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="name in the requests; the server's first model where not given")
    parser.add_argument("--api-key")
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--request-rate", nargs="+", type=float, default=[float("inf")], help="requests a second")
    parser.add_argument("--burstiness", type=float, default=1.0, help="1 Poisson, less burstier, more evener")
    parser.add_argument("--max-concurrency", nargs="+", type=int, default=[0], help="0 is no limit")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--spread", type=float, default=0.0, help="lengths vary by this share around their mean")
    parser.add_argument("--prefix-len", type=int, default=0, help="tokens that all random prompts begin with")
    parser.add_argument("--vocab-size", type=int, default=32000, help="random token ids are below this")
    parser.add_argument("--dataset", metavar="FILE", help="JSON lines with prompt or messages, instead of random ids")
    parser.add_argument("--stop-at-eos", action="store_true", help="let sequences end early")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="more fields of each request")
    parser.add_argument("--num-warmups", type=int, default=2)
    parser.add_argument("--goodput", nargs="*", type=goal, default=[], metavar="METRIC:MS", help="ttft, tpot, e2el")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds a request may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--detailed", action="store_true", help="keep every request in the JSON")
    parser.add_argument("--plot", metavar="FILE", help="median and p99 TTFT and TPOT of each run")


def make_prompts(args: argparse.Namespace, seed: int) -> list[Prompt]:
    if args.dataset:
        return dataset_prompts(args.dataset, args.num_prompts, output_len=args.output_len, seed=seed)
    return random_prompts(
        args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        spread=args.spread,
        prefix_len=args.prefix_len,
        vocab_size=args.vocab_size,
        seed=seed,
    )


async def run_all(args: argparse.Namespace) -> list[dict[str, Any]]:
    model = args.model or await first_model(args.base_url, args.api_key)
    body = {"model": model, "temperature": args.temperature} | args.extra_body
    if not args.stop_at_eos:
        body["ignore_eos"] = True
    settings = {"timeout": args.timeout, "api_key": args.api_key}
    if args.num_warmups:
        warm = make_prompts(args, args.seed - 1)[:1] * args.num_warmups
        load = await run_load(args.base_url, body, warm, [0.0] * len(warm), None, **settings)
        if error := load.outcomes[0].error:
            raise SystemExit(f"the warm-up request failed: {error}")
    runs = []
    for number, (rate, concurrency) in enumerate((r, c) for r in args.request_rate for c in args.max_concurrency):
        prompts = make_prompts(args, args.seed + number)  # fresh ones, so that no run finds another's prefixes
        times = arrival_times(len(prompts), rate, args.burstiness, args.seed + number)
        load = await run_load(args.base_url, body, prompts, times, concurrency or None, **settings)
        run = {"request_rate": None if rate == float("inf") else rate, "max_concurrency": concurrency or None}
        run |= load.figures(dict(args.goodput))
        runs.append(run)
        errors = Counter(o.error for o in load.outcomes if o.error)
        for error, count in errors.most_common(3):
            report.CONSOLE.print(f"[red]{count} requests failed: {error}[/red]", highlight=False)
        if args.detailed:
            run["requests"] = [vars(o) for o in load.outcomes]
        show(run)
    return runs


def show(run: dict[str, Any]) -> None:
    rate, concurrency = run["request_rate"] or "unlimited", run["max_concurrency"] or "unlimited"
    names = ("mean", "median", "std", "p90", "p99")
    rows = [[name.upper() + " ms", *(run[f"{name}_ms"].get(column) for column in names)] for name in METRICS]
    goodput = "" if run["request_goodput"] is None else f", {run['request_goodput']:.2f} within the goals"
    caption = (
        f"{run['completed']} completed, {run['failed']} failed in {run['duration']:.1f} s, "
        f"at most {run['max_concurrent_requests']} at once\n"
        f"{run['request_throughput']:.2f} requests/s{goodput}; {run['output_throughput']:.1f} output tokens/s "
        f"(peak second {run['max_output_tokens_per_s']:.0f}), {run['total_token_throughput']:.1f} tokens/s in all"
    )
    report.show(f"Request rate {rate}, concurrency {concurrency}", ["", *names], rows, caption)


def run(args: argparse.Namespace) -> None:
    where = report.environment()
    try:
        runs = asyncio.run(run_all(args))
    except (ValueError, aiohttp.ClientError) as error:
        raise SystemExit(f"{error}") from None
    arguments = {key: value for key, value in vars(args).items() if key not in ("run", "api_key")}
    arguments["request_rate"] = [run["request_rate"] for run in runs]
    report.save_json(args.json, {"benchmark": "serving", "environment": where, "arguments": arguments, "runs": runs})
    axis = "max_concurrency" if len(args.max_concurrency) > 1 else "request_rate"
    lines = {
        f"{metric.upper()} {column}": [
            (run[axis], run[f"{metric}_ms"][column]) for run in runs if run[axis] and run[f"{metric}_ms"]
        ]
        for metric in ("ttft", "tpot")
        for column in ("median", "p99")
    }
    report.plot_lines(args.plot, "Latency under load", axis.replace("_", " "), "ms", lines)
