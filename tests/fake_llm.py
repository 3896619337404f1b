"""A stand-in for ``jaxserve.LLM``: the same surface, bytes for tokens, and an answer that a script says."""

import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

from jaxserve.metrics import EngineMetrics
from jaxserve.request import (
    Delta,
    EngineDeadError,
    QueueFullError,
    RequestError,
    SamplingParams,
    TokenLogprob,
    Watermark,
)
from jaxserve.watermark.config import WatermarkConfig

BOS, EOS = 256, 257


class ByteTokenizer:
    """Bytes are tokens; 256 begins a sequence, 257 ends it."""

    vocab_size = 258
    eos_token_ids = (EOS,)
    bos_token_id = BOS
    special_ids = frozenset({BOS, EOS})
    chat_template = "yes"

    def __init__(self, *, add_bos: bool = False):
        self.add_bos = add_bos

    @property
    def tool_template(self) -> str:
        return self.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * (self.add_bos and add_special_tokens) + list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_str(self, id: int) -> str:
        return self.token_bytes(id).decode(errors="replace")

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b""

    def apply_chat_template(
        self, messages, *, tools=None, add_generation_prompt=True, continue_final_message=False, **kwargs
    ) -> str:
        if messages[-1]["content"] == "raise":
            raise ValueError("the template says no")
        text = "".join(f"<{m['role']}>{m['content']}" for m in messages) + "".join(f"[{k}]" for k in kwargs)
        return text + ("<assistant>" if add_generation_prompt else "")


@dataclass
class Health:
    alive: bool = True
    idle: bool = True
    seconds_since_progress: float = 0.0
    running: int = 0
    waiting: int = 0


@dataclass
class Job:
    id: str
    prompt: list[int]
    params: SamplingParams
    on_delta: Callable[[Delta], None]
    priority: int
    watermark: Watermark | None = None
    position: int = 0
    aborted: bool = False


@dataclass
class FakeLLM:
    """Answers every prompt with ``answer``, a byte a step, until ``max_tokens`` or its end (anew with ``ignore_eos``).

    ``step_seconds`` paces it; ``explode_at`` is the position where a request fails; ``most`` refuses more;
    ``worse`` makes completion i less likely, by ``i % 3`` a token; ``mute`` gives tokens and no text.
    """

    answer: str = "Hello, wörld! 😀"
    step_seconds: float = 0.0
    max_model_len: int = 512
    most: int = 1000
    explode_at: int | None = None
    add_bos: bool = False
    worse: bool = False
    mute: bool = False
    watermark: WatermarkConfig | None = None
    tokenizer: ByteTokenizer | None = None
    aborted: list[str] = field(default_factory=list)
    submitted: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokenizer = ByteTokenizer(add_bos=self.add_bos)
        self.config = SimpleNamespace(
            model="/models/tiny",
            served_name="tiny",
            max_queued_requests=max(1, self.most),
            watermark=self.watermark,
        )
        self._metrics = EngineMetrics(model_name="tiny")
        self.metrics = self._metrics.registry
        self.state = Health()
        self._ids = itertools.count()
        self._jobs: dict[str, Job] = {}
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    # The public face.

    def submit(self, prompt, params, *, on_delta, priority=0, cache_salt="") -> str:
        if not self.state.alive:
            raise EngineDeadError("the engine has stopped")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        for token in ids:
            if not 0 <= token < 258:
                raise RequestError(f"prompt: token id {token} is out of range", param="prompt")
        params.check(258)
        if len(ids) + (params.max_tokens is None or params.max_tokens > 0) > self.max_model_len:
            message = f"the prompt has {len(ids)} tokens; the context holds {self.max_model_len}"
            raise RequestError(message, param="prompt", code="context_length_exceeded")
        if len(self._jobs) >= self.most:
            raise QueueFullError("the queue is full")
        job = Job(f"r{next(self._ids)}", list(ids), params, on_delta, priority, self._mark(params))
        self._jobs[job.id] = job
        self.submitted.append(job)
        self._inbox.put(job)
        return job.id

    def _mark(self, params: SamplingParams) -> Watermark | None:
        if self.watermark is None:
            if params.watermarking:
                raise RequestError("watermarking: no watermark_config", param="watermarking")
            return None
        try:
            decision = self.watermark.decide(params.watermarking, params.greedy, params.choiceless)
        except ValueError as error:
            raise RequestError(str(error), param="watermarking") from None
        marked = decision.status == "watermarked"
        if not marked:
            return Watermark(decision.status, decision.reason)
        return Watermark(decision.status, decision.reason, self.watermark.key_in_force().id, 0)

    def check_structured_outputs(self, wish) -> None:
        """Refuses schemas that hold "not"; enforces nothing."""
        if '"not"' in (wish.grammar or json.dumps(wish.json)):
            raise RequestError('structured_outputs.json: at /: keyword "not"', param="structured_outputs.json")

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if (job := self._jobs.get(request_id)) is not None:
            job.aborted = True

    def health(self) -> Health:
        self.state.running, self.state.idle = len(self._jobs), not self._jobs
        return self.state

    def report(self) -> dict:
        return {"model": "tiny"}

    def print_report(self) -> None:
        pass

    def count_rejection(self, reason: str) -> None:
        self._metrics.rejected(reason)

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join()

    # For tests.

    def wait_idle(self, seconds: float = 5.0) -> None:
        """Every job is gone, or an AssertionError."""
        end = time.monotonic() + seconds
        while self._jobs and time.monotonic() < end:
            time.sleep(0.005)
        assert not self._jobs

    # The engine.

    def _loop(self) -> None:
        running: list[Job] = []
        while True:
            while not self._inbox.empty() or not running:
                job = self._inbox.get()
                if job is None:
                    return
                running.append(job)
            if self.step_seconds:
                time.sleep(self.step_seconds)
            running = [job for job in running if not self._step(job)]
            self._metrics.step(len(running), len(running), 0, 0.0)

    def _step(self, job: Job) -> bool:
        """One token for every completion; True at the end."""
        params, first = job.params, job.position == 0
        answer = self.answer.encode()
        most = min(params.max_tokens if params.max_tokens is not None else 10**9, self.max_model_len - len(job.prompt))
        if self.explode_at == job.position:
            job.on_delta(Delta(job.id, 0, finish_reason="error", error="boom", request_done=True))
            return self._end(job)
        if job.aborted:
            return self._end(job)
        place = job.position % len(answer)
        token = () if most == 0 else (answer[place],)
        job.position += 1
        reason = None
        if job.position >= most:
            reason = "length"
        elif job.position >= len(answer) and not params.ignore_eos:
            reason = "stop"
        # The text of a character comes with its last byte.
        done, before = answer[: place + 1], answer[:place]
        text = _whole(done)[len(_whole(before)) :] if token else ""
        if reason is not None and token:
            text = done.decode(errors="replace")[len(_whole(before)) :]
        if self.mute:
            text = ""
        for index in range(params.n):
            logprobs = prompt_logprobs = None
            if params.logprobs is not None:
                logprobs = tuple(_logprob(t, params.logprobs, index % 3 * self.worse) for t in token)
            if params.prompt_logprobs is not None and first and index == 0:
                prompt_logprobs = (None, *(_logprob(t, params.prompt_logprobs) for t in job.prompt[1:]))
            last = reason is not None and index == params.n - 1
            mark = job.watermark
            delta = Delta(job.id, index, token, text, logprobs, prompt_logprobs, reason, None, last, watermark=mark)
            job.on_delta(delta)
        return self._end(job) if reason is not None else False

    def _end(self, job: Job) -> bool:
        del self._jobs[job.id]
        return True


def _whole(data: bytes) -> str:
    """The text of ``data`` without a half character at its end."""
    for cut in range(4):
        try:
            return data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
    return ""


def _logprob(token: int, top: int, worse: int = 0) -> TokenLogprob:
    return TokenLogprob(token, -0.25 - worse, 1, tuple(((token + i) % 256, -0.25 - i) for i in range(top)))
