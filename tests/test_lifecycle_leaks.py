"""Many streams, many of which are left in the middle: nothing piles up, and /health answers throughout.

``python -m tests.test_lifecycle_leaks SECONDS`` does the same with a real engine and a tiny model, as long as you like.
"""

import asyncio
import contextlib
import gc
import os
import random
import re
import sys
import threading
import time
from typing import Any

import aiohttp
import psutil

from tests.fake_llm import FakeLLM
from tests.serving import Server, serving

STREAMS = 64


async def stream(session: aiohttp.ClientSession, url: str, rng: random.Random, model: str) -> str:
    """One stream, read to its end or left after a few chunks; what became of it."""
    body = {"model": model, "prompt": "Hi", "max_tokens": rng.choice([5, 20, 100]), "stream": True, "ignore_eos": True}
    patience = rng.randrange(20) if rng.random() < 0.2 else None
    async with session.post(url + "/v1/completions", json=body) as reply:
        assert reply.status == 200
        count = 0
        async for line in reply.content:
            if line == b"data: [DONE]\n":
                return "whole"
            count += line.startswith(b"data: ")
            if count == patience:
                reply.close()
                return "left"
    raise AssertionError("the stream broke off")


async def load(url: str, seconds: float, seed: int, model: str) -> tuple[dict[str, int], float]:
    """``STREAMS`` streams at a time for ``seconds``; how they ended, and how long /health took at worst."""
    end, found, worst = time.monotonic() + seconds, {"whole": 0, "left": 0}, 0.0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def client(number: int) -> None:
            rng = random.Random(seed * 1000 + number)
            while time.monotonic() < end:
                found[await stream(session, url, rng, model)] += 1

        async def probe() -> None:
            nonlocal worst
            while time.monotonic() < end:
                begun = time.monotonic()
                async with session.get(url + "/health") as reply:
                    assert reply.status == 200
                worst = max(worst, time.monotonic() - begun)
                await asyncio.sleep(0.02)

        await asyncio.gather(probe(), *(client(i) for i in range(STREAMS)))
    return found, worst


def standing(server: Server) -> dict[str, int]:
    """What must not grow: tasks and channels of the server, file descriptors, threads, bytes."""
    end = time.monotonic() + 5
    while server.state.channels and time.monotonic() < end:
        time.sleep(0.01)
    tasks: list[int] = []
    done = threading.Event()

    def count() -> None:
        tasks.append(len(asyncio.all_tasks(server._loop)))
        done.set()

    time.sleep(0.3)
    server._loop.call_soon_threadsafe(count)
    assert done.wait(5)
    gc.collect()
    process = psutil.Process(os.getpid())
    return {
        "tasks": tasks[0],
        "channels": len(server.state.channels),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "bytes": process.memory_info().rss,
    }


def check(before: dict[str, int], after: dict[str, int], memory: int) -> None:
    assert after["channels"] == 0
    for name in ("tasks", "descriptors", "threads"):
        assert after[name] <= before[name] + 2, (name, before, after)
    assert after["bytes"] - before["bytes"] < memory


def test_streams_that_are_left_leave_nothing_behind():
    llm = FakeLLM(step_seconds=0.002)
    with serving(llm) as server:
        asyncio.run(load(server.url, 1.5, 1, "tiny"))
        llm.wait_idle()
        llm.submitted.clear()
        before = standing(server)
        found, worst = asyncio.run(load(server.url, 3.0, 2, "tiny"))
        llm.wait_idle()
        llm.submitted.clear()
        check(before, standing(server), 16 << 20)
        assert found["whole"] > 100
        assert found["left"] > 20
        assert worst < 1.0  # 0.1 on a quiet machine
        assert server.send("/load")[1] == {"server_load": 0, "running": 0, "waiting": 0}


def main(seconds: float) -> None:
    """The same with a real engine; prints what it saw."""
    import tempfile
    from pathlib import Path

    from tests.tiny import idle, roomy, write_model

    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "tiny")
        programs = str(Path(folder) / "programs")
        with (
            roomy(programs, model, served_name="tiny", max_num_seqs=32) as llm,
            serving(llm, close_llm=False) as server,
        ):
            print("warm-up:", asyncio.run(load(server.url, min(20.0, seconds), 1, "tiny")))
            idle(llm)
            before = standing(server)
            found, worst = asyncio.run(load(server.url, seconds, 2, "tiny"))
            idle(llm)
            after = standing(server)
            print(f"{seconds:g} s: {found}, /health at worst {worst * 1e3:.0f} ms")
            print("before", before, "after", after)
            check(before, after, 32 << 20)
            text: Any = server.send("/metrics")[1]
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
                value = re.search(rf"^jaxserve:{name}{{.*}} (\S+)$", text, re.MULTILINE)
                assert value is not None
                assert float(value[1]) == 0, name


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main(float(sys.argv[1]))
