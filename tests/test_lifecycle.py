"""A server process from its first second to its last: loading, draining, dying, hanging."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Process:
    """A running server, its log as it comes, and plain requests to it."""

    def __init__(self, **asked: Any):
        command = [sys.executable, "-m", "tests.lifecycle_server", json.dumps(asked)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=1
        )
        self.log: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.wait_for(r"listening on (http://\S+)")[1]

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)

    def wait_for(self, pattern: str, seconds: float = 20.0) -> re.Match[str]:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if (found := re.search(pattern, "".join(self.log))) is not None:
                return found
            time.sleep(0.01)
        raise AssertionError(f"{pattern} not in {''.join(self.log)}")

    def get(self, path: str, body: dict | None = None) -> tuple[int, dict, dict]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=20) as reply:
                return reply.status, json.load(reply), dict(reply.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error), dict(error.headers)

    def stream(self, **fields: Any) -> "Stream":
        self.wait_for("serving")
        stream = Stream(self.url, {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True} | fields)
        stream.begun.wait(10)
        return stream

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 20.0) -> tuple[int, float]:
        """Its exit status, and how long it took to end."""
        begun = time.monotonic()
        status = self.process.wait(seconds)
        self._reader.join(5)
        return status, time.monotonic() - begun


class Stream:
    """A completion that is streamed on a thread of its own."""

    def __init__(self, url: str, body: dict):
        self.text, self.begun = "", threading.Event()
        self._url, self._body = url, body
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        request = urllib.request.Request(self._url + "/v1/completions", json.dumps(self._body).encode())
        with (
            contextlib.suppress(ConnectionError, urllib.error.URLError),
            urllib.request.urlopen(request, timeout=20) as reply,
        ):
            for line in reply:
                self.text += line.decode()
                self.begun.set()
        self.begun.set()

    def whole(self) -> str:
        self._thread.join(20)
        return self.text


@contextlib.contextmanager
def server(**asked: Any) -> Iterator[Process]:
    found = Process(**asked)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait()
        found._reader.join(5)
        found.process.stdout.close()
        found.process.stderr.close()


ASK = {"prompt": "Hi", "max_tokens": 5}


def test_it_listens_while_the_model_loads():
    with server(load=1.5) as found:
        assert found.get("/health")[:2] == (200, {"status": "starting"})
        status, answer, headers = found.get("/ready")
        assert (status, answer, headers["Retry-After"]) == (503, {"status": "loading", "phase": "weights"}, "5")
        for path, body in (("/v1/completions", ASK), ("/v1/models", None), ("/tokenize", {"prompt": "Hi"})):
            status, answer, headers = found.get(path, body)
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "loading", "5"), path
        assert found.get("/load")[1] == {"server_load": 0, "running": 0, "waiting": 0}
        found.wait_for("serving tiny on")
        assert found.get("/ready")[:2] == (200, {"status": "ready"})
        assert found.get("/v1/completions", ASK)[1]["choices"][0]["text"] == "Hello"
        found.send(signal.SIGTERM)
        assert found.end()[0] == 0
        assert found.process.stdout.read() == "closed\n"


def test_a_load_that_fails_ends_the_process_with_its_own_error():
    with server(load=0.3, fail="no such folder") as found:
        assert found.end()[0] == 7
        assert "error: no such folder" in found.log[-1]
        assert "Traceback" not in "".join(found.log)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading_ends_it_at_once(number):
    with server(load=60) as found:
        found.send(number)
        status, seconds = found.end()
        assert status == 0
        assert seconds < 3


def test_a_signal_drains():
    with server(llm={"step_seconds": 0.02}) as found:
        stream = found.stream(max_tokens=60)
        found.send(signal.SIGTERM)
        found.wait_for("draining")
        assert found.get("/health")[1]["status"] == "ok"
        assert found.get("/ready")[:2] == (503, {"status": "shutting down"})
        status, answer, headers = found.get("/v1/completions", ASK)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "shutting_down", "1")
        assert headers["Connection"] == "close"
        assert stream.whole().endswith("data: [DONE]\n\n")
        assert '"finish_reason":"length"' in stream.whole()
        assert found.end()[0] == 0
        assert found.process.stdout.read() == "closed\n"


@pytest.mark.parametrize("second", [True, False])
def test_draining_ends_at_the_deadline_or_the_second_signal(second):
    with server(llm={"step_seconds": 0.05}, options={"shutdown_timeout": 60 if second else 0.3}) as found:
        stream = found.stream()
        found.send(signal.SIGTERM)
        found.wait_for("draining")
        if second:
            found.send(signal.SIGINT)
        status, seconds = found.end()
        assert status == 1
        assert seconds < 5
        assert '"code":"shutting_down"' in stream.whole()
        assert stream.whole().endswith("data: [DONE]\n\n")
        # The deadline leaves time to close the engine, which may have pages to write; the second signal does not.
        assert found.process.stdout.read() == ("" if second else "closed\n")


def test_the_death_of_the_engine_ends_the_process():
    with server(llm={"step_seconds": 0.05}, hang="die") as found:
        assert found.end()[0] == 1
        assert "CRITICAL serve.runner: the engine has stopped; the server ends" in "".join(found.log)


@pytest.mark.parametrize("how", ["hang", "gil"])
def test_a_hung_engine_turns_health_red_and_is_ended_with_all_stacks(how):
    options = {"stall_seconds": 0.2, "watchdog_timeout": 2.0}
    with server(llm={"step_seconds": 30.0}, hang=how, options=options) as found:
        found.wait_for("serving")
        stream = Stream(found.url, {"prompt": "Hi", "stream": True})
        if how == "hang":
            end = time.monotonic() + 5
            while found.get("/health")[1]["status"] != "stalled":
                assert time.monotonic() < end
                time.sleep(0.05)
            assert found.get("/health")[0] == 503
        status, seconds = found.end()
        assert status == 1
        assert seconds < 10
        log = "".join(found.log)
        assert "fake_llm.py" in log  # where the engine's thread stands
        assert "Thread 0x" in log
        assert ("the engine has finished no step for" in log) == (how == "hang")
        stream.whole()


def test_an_idle_engine_is_neither_stalled_nor_ended():
    options = {"stall_seconds": 0.1, "watchdog_timeout": 0.4}
    with server(hang="hang", options=options) as found:
        found.wait_for("serving")
        time.sleep(1.0)
        assert found.get("/health")[:1] == (200,)
        found.send(signal.SIGTERM)
        assert found.end()[0] == 0


FREEZES = """
import gc, os, signal
from serve import ServerOptions
from serve.runner import run
from tests.fake_llm import FakeLLM

class Telling(FakeLLM):
    def print_report(self):
        print(gc.get_freeze_count(), gc.isenabled())
        os.kill(os.getpid(), signal.SIGTERM)

run(lambda phase: Telling(), ServerOptions(port=0, access_log="off"))
"""


def test_collections_pass_over_what_was_loaded():
    """Else a full one stops every stream for as long as it takes to look at a model's objects."""
    found = subprocess.run([sys.executable, "-c", FREEZES], cwd=ROOT, capture_output=True, text=True, timeout=30)
    count, enabled = found.stdout.split()
    assert int(count) > 10_000, found.stderr
    assert enabled == "True"


def test_hup_reads_the_keys_again(tmp_path):
    file = tmp_path / "keys"
    file.write_text("one")
    with server(options={"api_key_file": str(file)}) as found:

        def status(key: str) -> int:
            request = urllib.request.Request(found.url + "/v1/models", headers={"Authorization": f"Bearer {key}"})
            try:
                with urllib.request.urlopen(request) as reply:
                    return reply.status
            except urllib.error.HTTPError as error:
                with error:
                    return error.code

        found.wait_for("serving")
        assert [status("one"), status("two")] == [200, 401]
        file.write_text("two")
        found.send(signal.SIGHUP)
        found.wait_for("read again")
        assert [status("one"), status("two")] == [401, 200]
        file.unlink()
        found.send(signal.SIGHUP)
        found.wait_for("cannot be read: No such file")
        assert [status("one"), status("two")] == [401, 200]


def test_a_port_in_use_is_known_before_anything_loads():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "jaxserve", "serve", "--port", str(taken.getsockname()[1])]
        begun = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("jaxserve: error: ")
        assert "cannot listen on" in done.stderr
        assert time.monotonic() - begun < 30


@pytest.mark.timeout(120)
def test_the_command_serves_a_real_model_and_drains(speaking: Path, programs_dir: str):
    command = [sys.executable, "-m", "jaxserve", "serve", str(speaking), "--served-name", "tiny", "--port", "0"]
    command += ["--cache-dir", programs_dir, "--dtype", "float32", "--max-num-seqs", "4", "--page-size", "8"]
    command += ["--max-num-batched-tokens", "64", "--kv-cache-memory-bytes", str(4 << 20), "--metrics-prefix", "vllm"]
    command += ["--access-log", "json"]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        url = next(m[1] for line in process.stderr if (m := re.search(r"listening on (http://\S+)", line)))
        end = time.monotonic() + 90
        phases = set()
        while True:
            try:
                with urllib.request.urlopen(url + "/ready", timeout=20):
                    break
            except urllib.error.HTTPError as error:
                with error:
                    phases.add(json.load(error)["phase"])
                with urllib.request.urlopen(url + "/health", timeout=20) as health:
                    assert json.load(health) == {"status": "starting"}
            assert time.monotonic() < end
            time.sleep(0.05)
        assert phases - {"starting"}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(ASK).encode())
        with urllib.request.urlopen(request, timeout=20) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] <= 5
        with urllib.request.urlopen(url + "/metrics", timeout=20) as reply:
            assert b"vllm:cache_config_info{" in reply.read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        lines = [json.loads(line) for line in out.splitlines()]
        assert [line["path"] for line in lines] == ["/v1/completions"]  # probes are not logged
        assert "Traceback" not in err
    finally:
        process.kill()
        process.communicate()
