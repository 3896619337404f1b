"""Worker processes: one engine each, started once, given jobs in turns, stopped in between so none disturbs another."""

import contextlib
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

PEERS = Path(__file__).parent / "peers"
ENGINES = ("jaxserve", "transformers", "llama_cpp", "vllm")


class WorkerError(RuntimeError):
    """A worker that could not start, failed a job or took too long; holds the end of what it printed."""


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One engine with one set of weights."""

    engine: str
    model: str
    dtype: str = "float32"
    python: str = sys.executable
    options: dict[str, str] = field(default_factory=dict)

    @property
    def label(self) -> str:
        extra = "".join(f" {key}={value}" for key, value in self.options.items())
        return f"{self.engine} {self.dtype}{extra}"

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @classmethod
    def parse(cls, text: str) -> "Contender":
        """``ENGINE=PYTHON,model=PATH[,dtype=bfloat16][,option=value...]``; unknown keys go to the engine."""
        head, *rest = text.split(",")
        engine, _, python = head.partition("=")
        if engine not in ENGINES:
            raise ValueError(f"{text!r}: unknown engine {engine!r}; known: {', '.join(ENGINES)}")
        options = {}
        for item in rest:
            key, equals, value = item.partition("=")
            if not equals:
                raise ValueError(f"{text!r}: {item!r} is not key=value")
            options[key] = value
        if "model" not in options:
            raise ValueError(f"{text!r}: model=PATH is missing")
        model, dtype = options.pop("model"), options.pop("dtype", "float32")
        return cls(engine=engine, model=model, dtype=dtype, python=python or sys.executable, options=options)


@dataclass(frozen=True)
class Job:
    """``batch`` greedy requests at once, each ``input_len`` tokens in and ``output_len`` out."""

    batch: int
    input_len: int
    output_len: int

    @property
    def label(self) -> str:
        return f"{self.batch} x {self.input_len}+{self.output_len}"

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Random prompts, no two with a common beginning, so that no engine's prefix reuse helps."""
        rng = random.Random(f"{self}/{seed}")
        low = min(100, vocab_size // 2)  # special tokens stand at the beginning of most vocabularies
        return [[rng.randrange(low, vocab_size) for _ in range(self.input_len)] for _ in range(self.batch)]


@dataclass(frozen=True)
class Result:
    seconds: float
    ttft: float | None
    token_ids: list[list[int]]
    peak_rss: int

    @property
    def output_tokens(self) -> int:
        return sum(map(len, self.token_ids))

    @property
    def throughput(self) -> float:
        """Output tokens a second, prefill included."""
        return self.output_tokens / self.seconds

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first; for a single request whose engine tells the time of the first."""
        if len(self.token_ids) != 1 or self.ttft is None or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / (self.seconds - self.ttft)


class Worker:
    """A contender in a process of its own.

    Between jobs the whole process group is stopped (SIGSTOP), so that spinning threads and background work of one
    engine take nothing from another. Use as a context manager: leaving it ends the process group.
    """

    def __init__(self, contender: Contender, *, threads: int, max_seqs: int, max_len: int, timeout: float = 1800):
        self.contender = contender
        self.timeout = timeout
        self.info: dict[str, Any] = {}
        self.start_seconds = 0.0
        self._stderr: IO[str] = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [contender.python, str(PEERS / f"{contender.engine}_worker.py"), "--model", contender.model]
        command += ["--dtype", contender.dtype, "--threads", str(threads)]
        command += ["--max-seqs", str(max_seqs), "--max-len", str(max_len)]
        for key, value in contender.options.items():
            command += ["--option", f"{key}={value}"]
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        start = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                text=True,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise WorkerError(f"{contender.label}: cannot start {contender.python}: {error}") from error
        self._replies: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self.info = self._reply()
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._replies.put(line)
        self._replies.put(None)

    def _reply(self) -> dict[str, Any]:
        try:
            line = self._replies.get(timeout=self.timeout)
        except queue.Empty:
            raise WorkerError(f"{self.contender.label}: no answer in {self.timeout:.0f} s{self._tail()}") from None
        if line is None:
            code = self._process.wait()
            raise WorkerError(f"{self.contender.label}: ended with code {code}{self._tail()}")
        message = json.loads(line)
        if message["event"] == "error":
            raise WorkerError(f"{self.contender.label}: {message['message']}{self._tail()}")
        return message

    def _tail(self, lines: int = 15) -> str:
        self._stderr.seek(0)
        return "".join("\n    " + line.rstrip() for line in self._stderr.readlines()[-lines:])

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Result:
        """Run one job; WorkerError where it fails or a prompt did not get exactly ``max_tokens`` tokens."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
            message = self._reply()
        except BrokenPipeError:
            raise WorkerError(f"{self.contender.label}: has ended{self._tail()}") from None
        finally:
            self._signal(signal.SIGSTOP)
        message.pop("event")
        result = Result(**message)
        counts = {len(ids) for ids in result.token_ids}
        if counts != {max_tokens} or len(result.token_ids) != len(prompts):
            raise WorkerError(f"{self.contender.label}: gave {sorted(counts)} tokens where {max_tokens} were asked for")
        return result

    def close(self) -> None:
        """End the worker: by the end of its input, by force where that does not do within ten seconds."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=10)
        self._stderr.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
