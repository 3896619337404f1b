"""The life of a server process: signals drain it or cut it short, a dead engine ends it, a port in use is one line."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest

from serve import ServerOptions, bind

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import logging, sys, threading
from serve import ServerOptions, bind, run
from tests.fake_llm import FakeLLM
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
llm = FakeLLM(step_seconds=0.02, max_model_len=100_000)
options = ServerOptions(port=0, shutdown_timeout=float(sys.argv[1]))
bound = bind(options)
print(bound.getsockname()[1], flush=True)
if len(sys.argv) > 2:
    threading.Timer(float(sys.argv[2]), lambda: setattr(llm.state, "alive", False)).start()
sys.exit(run(llm, options, bound=bound))
"""


class Process:
    """A server in a process of its own."""

    def __init__(self, *args: str):
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str]:
        """Exit status and log, waiting for both."""
        log = self.process.communicate(timeout=20)[1]
        return self.process.returncode, log

    async def ready(self, session: aiohttp.ClientSession) -> None:
        for _ in range(400):
            try:
                async with session.get(self.url + "/ready"):
                    return
            except aiohttp.ClientError:
                await asyncio.sleep(0.05)
        raise AssertionError("the server did not come up")


async def stream(session: aiohttp.ClientSession, url: str, tokens: int, begun: asyncio.Event) -> list[str]:
    """The events of one completion; ``begun`` is set with the first."""
    body = {"prompt": "Hi", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    found = []
    async with session.post(url + "/v1/completions", json=body) as reply:
        async for line in reply.content:
            if line.strip():
                found.append(line.decode().strip().removeprefix("data: "))
                begun.set()
    return found


def run_with_signals(process: Process, tokens: int, signals: int):
    """Stream, signal once streaming, ask for readiness and a new completion, signal again; (events, statuses)."""

    async def go():
        async with aiohttp.ClientSession() as session:
            await process.ready(session)
            begun = asyncio.Event()
            task = asyncio.create_task(stream(session, process.url, tokens, begun))
            await begun.wait()
            process.process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.2)
            statuses = []
            async with session.get(process.url + "/health") as reply:
                statuses.append(reply.status)
            async with session.get(process.url + "/ready") as reply:
                statuses.append(reply.status)
            async with session.post(process.url + "/v1/completions", json={"prompt": "Hi"}) as reply:
                statuses.append(reply.status)
                assert (await reply.json())["error"]["code"] == "shutting_down"
            if signals == 2:
                process.process.send_signal(signal.SIGTERM)
            return await task, statuses

    return asyncio.run(go())


def test_the_first_signal_lets_running_requests_finish():
    with Process("20") as process:
        events, statuses = run_with_signals(process, tokens=60, signals=1)
        assert statuses == [200, 503, 503]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        status, log = process.end()
        assert status == 0
        assert "draining" in log


@pytest.mark.parametrize(("timeout", "signals"), [("1", 1), ("600", 2)], ids=["deadline", "second signal"])
def test_the_deadline_or_a_second_signal_cuts_requests_short(timeout, signals):
    with Process(timeout) as process:
        start = time.monotonic()
        events, statuses = run_with_signals(process, tokens=50_000, signals=signals)
        assert statuses == [200, 503, 503]
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["error"]["code"] == "shutting_down"
        status, log = process.end()
        assert status == 1
        assert "unfinished" in log
        assert time.monotonic() - start < 20


def test_an_idle_server_ends_at_once():
    with Process("600") as process:

        async def go():
            async with aiohttp.ClientSession() as session:
                await process.ready(session)
                process.process.send_signal(signal.SIGINT)

        asyncio.run(go())
        assert process.end()[0] == 0


def test_a_dead_engine_ends_the_process():
    with Process("600", "1.0") as process:
        status, log = process.end()
        assert status == 1
        assert "engine has stopped" in log


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(ServerOptions(port=port))


@pytest.mark.parametrize(
    ("field", "value"),
    [("port", -1), ("port", 70_000), ("max_body_bytes", 0), ("stall_seconds", 0), ("api_key", ("",))],
)
def test_bad_options_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        ServerOptions(**{field: value})
