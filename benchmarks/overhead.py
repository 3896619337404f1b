"""What HTTP costs: the same prompts through ``LLM.generate`` and through the server over the same engine, alternating.

The server runs on a thread of this process, as it would beside the engine; every request is a stream. The client is a
process of its own that only counts events, but it works on the same CPUs, and that is part of the figure.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import jaxserve
from benchmarks import report
from benchmarks.compare import own_contenders
from benchmarks.stats import median
from benchmarks.workers import Job

HELP = "throughput over HTTP beside LLM.generate, on the same prompts"


@contextlib.contextmanager
def served(llm: jaxserve.LLM) -> Iterator[int]:
    """The port of a server over ``llm`` on a thread of its own."""
    import serve

    options = serve.ServerOptions(port=0, access_log="off")
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def main() -> None:
        runner = serve.make_runner(serve.create_app(llm, options))
        await runner.setup()
        server = await serve.listen(runner, options, bound)
        ready.set()
        await stop.wait()
        server.close()
        await runner.cleanup()

    with serve.bind(options) as bound:
        thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
        thread.start()
        ready.wait()
        try:
            yield bound.socket.getsockname()[1]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


def client(port: int, pipe: Connection) -> None:
    """Send the bodies that come through the pipe, all of a batch at once; answer with (seconds, events)."""

    async def one(body: bytes) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        text = await reader.read()
        writer.close()
        if not text.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in text:
            raise RuntimeError(f"the server answered {text[:300]!r}")
        return text.count(b"data: {")

    async def batch(bodies: list[bytes]) -> tuple[float, int]:
        start = time.perf_counter()
        events = await asyncio.gather(*map(one, bodies))
        return time.perf_counter() - start, sum(events)

    while (bodies := pipe.recv()) is not None:
        pipe.send(asyncio.run(batch(bodies)))


def measure(llm: jaxserve.LLM, job: Job, rounds: int, seed: int) -> dict[str, Any]:
    """Tokens a second both ways, in each round."""
    params = jaxserve.SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
    direct: list[float] = []
    http: list[float] = []
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with served(llm) as port:
        process = spawn.Process(target=client, args=(port, theirs), daemon=True)
        process.start()

        def generate(prompts: list[list[int]]) -> float:
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, progress=False)
            seconds = time.perf_counter() - start
            assert sum(len(output.outputs[0].token_ids) for output in outputs) == job.batch * job.output_len
            return seconds

        def ask(prompts: list[list[int]]) -> float:
            fields = {"max_tokens": job.output_len, "temperature": 0.0, "ignore_eos": True, "stream": True}
            ours.send([json.dumps({"prompt": prompt} | fields).encode() for prompt in prompts])
            return ours.recv()[0]

        for number in range(-1, rounds):
            prompts = job.prompts(llm.vocab_size, seed + number)
            ways = [(generate, direct), (ask, http)]
            for way, times in ways if number % 2 else reversed(ways):
                seconds = way(prompts)
                if number >= 0:  # the first round warms both up
                    times.append(seconds)
        ours.send(None)
        process.join()
    tokens = job.batch * job.output_len
    return {
        "job": vars(job),
        "generate": [tokens / seconds for seconds in direct],
        "http": [tokens / seconds for seconds in http],
        "ratio": median(a / b for a, b in zip(direct, http, strict=True)),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--streams", nargs="+", type=int, default=[32], help="requests at once")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an engine option")
    parser.add_argument("--json", metavar="FILE")


def run(args: argparse.Namespace) -> None:
    where = report.environment()
    report.warn_if_busy()
    results, rows = [], []
    for contender in own_contenders(args):
        options: dict[str, Any] = {key: json.loads(value) for key, value in contender.options.items()}
        limits = {"max_num_seqs": max(args.streams), "max_model_len": args.input_len + args.output_len + 8}
        options = {**limits, "prefix_caching": False, **options}  # whoever comes second would find its prompts computed
        with jaxserve.LLM(args.model, dtype=contender.dtype, **options) as llm:
            for streams in args.streams:
                result = measure(llm, Job(streams, args.input_len, args.output_len), args.rounds, args.seed)
                results.append(result | {"dtype": contender.dtype})
                pair = median(result["generate"]), median(result["http"])
                rows.append([f"{streams} streams, {contender.dtype}", *pair, result["ratio"]])
    report.show("Output tokens a second", ["", "LLM.generate", "HTTP", "median ratio"], rows)
    report.save_json(args.json, {"benchmark": "overhead", "environment": where, "results": results})
