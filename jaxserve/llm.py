"""The public face of the engine: ``LLM`` for programs and servers, ``generate`` for three lines in a script."""

import atexit
import dataclasses
import functools
import gc
import queue
import random
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeGuard, cast

import jax

from jaxserve.build import build
from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.engine import Health, OnDelta
from jaxserve.keeping import keep
from jaxserve.output import SequenceOutput
from jaxserve.progress import Progress
from jaxserve.request import (
    CompletionOutput,
    Delta,
    EngineDeadError,
    RequestError,
    RequestOutput,
    SamplingParams,
    StructuredOutputs,
    Watermark,
)
from jaxserve.sequence import Sequence as EngineSequence
from jaxserve.tokenizer import Tokenizer
from jaxserve.watermark.config import Mark

if TYPE_CHECKING:
    from jaxserve.grammar import Grammars

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""

_SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)}
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class LLM:
    """A model ready to generate. Owns one engine thread; a context manager; every method may be called from any thread.

    Keywords are the fields of ``EngineConfig``; ``on_phase`` is told the name of each part of the start. Raises
    ``ConfigError``, ``checkpoints.CheckpointError`` or ``WeightError`` naming what is wrong; with ``needs_tokenizer``
    a ``TokenizerError`` at once where the model came without one, which takes prompts as token ids only.
    """

    def __init__(
        self,
        model: str = "smollm2-135m",
        *,
        on_phase: Callable[[str], None] | None = None,
        needs_tokenizer: bool = False,
        **engine_options: Any,
    ):
        self.config = EngineConfig.from_options(model, engine_options)
        self._built = build(self.config, on_phase, needs_tokenizer=needs_tokenizer)
        self.tokenizer: Tokenizer | None = self._built.tokenizer
        self.model_config: ModelConfig = self._built.model
        self.max_model_len: int = self._built.limits.max_model_len
        self.vocab_size: int = self._built.model.vocab_size
        self._engine = self._built.engine
        self._seeds = random.Random(self.config.seed)
        self._seeds_lock = threading.Lock()
        self.compilations_after_ready = 0
        self._listener: Callable[..., None] | None = None
        self._watch_compilation()
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)
        self._closed = False
        self._engine.start()
        self._built.runner.compiled.load_rest()

    @functools.cached_property
    def _grammars(self) -> "Grammars":
        from jaxserve.grammar import Grammars  # its library takes a tenth of a second that a start need not wait for

        return Grammars(self.tokenizer, self.vocab_size, self._built.eos_ids)

    # -- whole requests -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt, in one batch, and return the outputs in the order of the prompts.

        ``params`` is for all, or one for each; instead of it, its fields may be given as keywords. Raises
        ``RequestError`` naming the offending prompt or field, before anything runs.
        """
        many = [prompts] if _is_prompt(prompts) else list(cast(Sequence[Prompt], prompts))
        each = self._params(params, sampling, len(many))
        done: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        ready = [self._prepare(prompt, p, done.put) for prompt, p in zip(many, each, strict=True)]
        outputs = {request_id: output for request_id, _, output in ready}
        open_ids = set(outputs)
        try:
            for request_id, sequences, _ in ready:
                self._engine.submit(request_id, sequences, done.put)
            with Progress(progress and len(many) > 1) as bars:
                bar = bars.bar("requests")
                while open_ids:
                    delta = done.get()
                    outputs[delta.request_id].add(delta)
                    if delta.request_done:
                        open_ids.discard(delta.request_id)
                        bar(len(many) - len(open_ids), len(many))
        finally:
            for request_id in open_ids:
                self._engine.abort(request_id)
        if self._engine.error is not None and any(output.error for output in outputs.values()):
            raise EngineDeadError(f"the engine has stopped: {self._engine.error!r}") from self._engine.error
        return [output for _, _, output in ready]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template; otherwise as ``generate``."""
        return self.generate(messages, params, **sampling)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **sampling: Any) -> Iterator[Delta]:
        """Yield what each step adds to the completion; closing the iterator early aborts the request."""
        (one,) = self._params(params, sampling, 1)
        deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request_id = self.submit(prompt, one, on_delta=deltas.put)
        return self._drain(request_id, deltas)

    def _drain(self, request_id: str, deltas: "queue.SimpleQueue[Delta]") -> Iterator[Delta]:
        done = False
        try:
            while not done:
                delta = deltas.get()
                done = delta.request_done
                yield delta
        finally:
            if not done:
                self.abort(request_id)

    # -- for servers --------------------------------------------------------------------------------------------------

    def submit(
        self, prompt: Prompt, params: SamplingParams, *, on_delta: OnDelta, priority: int = 0, cache_salt: str = ""
    ) -> str:
        """Queue a request; ``on_delta`` is called on the engine's thread and must be quick. Returns the request's id.

        Only requests with the same ``cache_salt`` reuse each other's KV pages. With ``structured_outputs`` the grammar
        is compiled here, on the caller's thread. Raises ``RequestError`` (what is wrong with the request),
        ``QueueFullError`` or ``EngineDeadError``.
        """
        request_id, sequences, _ = self._prepare(prompt, params, on_delta, priority, cache_salt)
        self._engine.submit(request_id, sequences, on_delta)
        return request_id

    def check_structured_outputs(self, wish: StructuredOutputs) -> None:
        """Raise ``RequestError`` for what cannot be enforced. Compiles, so that a request with it starts at once."""
        self._grammars.compile(wish)

    def abort(self, request_id: str) -> None:
        """End a request early; its last delta says "abort". Unknown ids are ignored."""
        self._engine.abort(request_id)

    def health(self) -> Health:
        return self._engine.health()

    def report(self) -> dict[str, Any]:
        """The start-up report, with the compilations after ready (there ought to be none)."""
        return {**self._built.report.as_dict(), "compilations_after_ready": self.compilations_after_ready}

    def print_report(self) -> None:
        self._built.report.print()

    @property
    def metrics(self) -> Any:
        """A ``prometheus_client.CollectorRegistry``."""
        return self._built.metrics.registry

    def count_rejection(self, reason: str) -> None:
        """Count a request that was refused before ``submit``, in the metric ``admission_rejections``."""
        self._built.metrics.rejected(reason)

    def close(self) -> None:
        """Stop the engine; open requests end with "abort". Happens by itself when the process ends."""
        self._engine.close()
        atexit.unregister(self._at_exit)
        self._built.runner.compiled.close()
        cache = self._engine.scheduler.cache
        if not self._closed:
            keep(cache, self._built.runner if self._engine.error is None else None)
        self._closed = True
        if self._engine.error is None:
            self._built.runner.wait()
        if self._built.link is not None:
            self._built.link.close()
        if self._listener is not None:
            jax.monitoring.unregister_event_duration_listener(self._listener)
            self._listener = None
        gc.collect()  # engines of before: their programs hold thousands of mappings, of which a process has 65,530

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests to sequences ----------------------------------------------------------------------------------------

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, sampling: dict[str, Any], count: int
    ) -> list[SamplingParams]:
        unknown = set(sampling) - _SAMPLING
        if unknown:
            name = min(unknown)
            raise RequestError(f"unknown sampling option {name!r}; known: {', '.join(sorted(_SAMPLING))}", param=name)
        if params is None:
            return [SamplingParams(**sampling)] * count
        if sampling:
            raise RequestError("give params or sampling keywords, not both", param="params")
        if isinstance(params, SamplingParams):
            return [params] * count
        if not _is_sequence(params) or not all(isinstance(item, SamplingParams) for item in params):
            raise RequestError(f"params must be SamplingParams or a list of them, not {params!r:.80}", param="params")
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling params for {count} prompts", param="params")
        return list(params)

    def _prepare(
        self, prompt: Prompt, params: SamplingParams, on_delta: OnDelta, priority: int = 0, cache_salt: str = ""
    ) -> tuple[str, list[SequenceOutput], RequestOutput]:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority must be an integer, got {priority!r:.80}", param="priority")
        params.check(self.vocab_size)
        text, ids = self.encode_prompt(prompt)
        limit = self._limit(ids, params)
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, which this model has not", param="stop")
        bad = self._bad_words(params)
        self._check_choice_left(params, bad)
        wish = params.structured_outputs
        grammar = None if wish is None else self._grammars.compile(wish)
        request_id = f"req-{uuid.uuid4().hex}"
        if params.echo and text is None and self.tokenizer is not None:
            text = self.tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)
        sequences = []
        cache = self._engine.scheduler.cache
        base = params.seed if params.seed is not None else self._fresh_seed()
        marks = self._marks(params, base, limit > len(ids))
        for index in range(params.n):
            own = params if index == 0 or params.prompt_logprobs is None else params.replace(prompt_logprobs=None)
            seq = EngineSequence(
                request_id=request_id,
                index=index,
                prompt=ids,
                params=own,
                seed=(base + index) & 0xFFFFFFFFFFFFFFFF,
                limit=limit,
                bad_words=bad,
                constraint=None if grammar is None else grammar.start(),
                priority=priority,
                mark=marks[index][0],
                watermark=marks[index][1],
                chain=cache.chain(ids, cache_salt) if self.config.prefix_caching else None,
            )
            if own.prompt_logprobs is not None:
                seq.prompt_logprobs = [None] * len(ids)
            echo = (text or "") if params.echo else None
            sequences.append(SequenceOutput(seq, self.tokenizer, self._built.eos_ids, echo))
        output = RequestOutput(request_id, text, ids, [CompletionOutput(i) for i in range(params.n)])
        return request_id, sequences, output

    def _marks(self, params: SamplingParams, seed: int, anything: bool) -> list[tuple[Mark | None, Watermark | None]]:
        """What marks each completion, and what is said of that; ``anything``: whether there is a token to generate."""
        config = self.config.watermark
        if config is None:
            if params.watermarking:
                raise RequestError("watermarking: the engine has no watermark_config", param="watermarking")
            return [(None, None)] * params.n
        try:
            decision = config.decide(params.watermarking, params.greedy, params.choiceless)
        except ValueError as error:
            raise RequestError(str(error), param="watermarking") from None
        if decision.status != "watermarked" or not anything:
            reason = decision.reason or "nothing to generate"
            status = "skipped" if decision.status == "watermarked" else decision.status
            return [(None, Watermark(status, reason))] * params.n
        streams = [config.stream(seed, index, params.n) for index in range(params.n)]
        marks = [config.mark(stream) for stream in streams]
        said = [Watermark("watermarked", None, mark.key_id, each) for mark, each in zip(marks, streams, strict=True)]
        return list(zip(marks, said, strict=True))

    def encode_prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The prompt's text where it has one, and its token ids. Raises ``RequestError``."""
        text: str | None = None
        if isinstance(prompt, str):
            text, ids = prompt, self._words().encode(prompt)
        elif not _is_sequence(prompt):
            raise _no_prompt(prompt)
        elif _is_messages(prompt):
            text = self._words().apply_chat_template([dict(m) for m in prompt])
            ids = self._words().encode(text, add_special_tokens=False)
        else:
            ids = list(prompt)
            for token in ids:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise RequestError(f"prompt holds {token!r:.80}, which is no token id", param="prompt")
                if not 0 <= token < self.vocab_size:
                    message = f"prompt: token id {token} is out of range; the vocabulary holds {self.vocab_size} tokens"
                    raise RequestError(message, param="prompt")
        if not ids:
            raise RequestError("the prompt is empty: it has no tokens", param="prompt")
        return text, ids

    def _words(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model has no tokenizer; give prompts as token ids", param="prompt")
        return self.tokenizer

    def _limit(self, ids: list[int], params: SamplingParams) -> int:
        """Most tokens of the sequence. A prompt without room is refused; max_tokens beyond the context is capped."""
        longest, room = self.max_model_len, 0 if params.max_tokens == 0 else 1
        if len(ids) + max(room, params.min_tokens) > longest:
            size = f"{len(ids)} token{'s' * (len(ids) != 1)}"
            raise RequestError(
                f"the prompt has {size}, and the context holds {longest}, prompt and output "
                f"(at least {max(room, params.min_tokens)} of output were asked for)",
                param="prompt",
                code="context_length_exceeded",
            )
        return min(longest, len(ids) + params.max_tokens) if params.max_tokens is not None else longest

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences of each bad word, at the start of a text and after a space."""
        out = []
        for word in params.bad_words:
            for form in (word, " " + word.lstrip()):
                ids = tuple(self._words().encode(form, add_special_tokens=False))
                if ids and ids not in out:
                    out.append(ids)
        return tuple(out)

    def _check_choice_left(self, params: SamplingParams, bad: tuple[tuple[int, ...], ...]) -> None:
        """Refuse a request that may come to where it can choose no token at all."""
        held = (
            {*params.stop_token_ids, *(() if params.ignore_eos else self._built.eos_ids)}
            if params.min_tokens
            else set()
        )
        name, allowed = "allowed_token_ids", params.allowed_token_ids
        if allowed is None:
            if len(held) + len(bad) < self.vocab_size:
                return
            name, allowed = "stop_token_ids", range(self.vocab_size)
        left = set(allowed) - held
        if left - {word[-1] for word in bad}:
            return
        for said in {(), *(word[:-1] for word in bad)}:
            banned = {word[-1] for word in bad if said[max(0, len(said) - len(word) + 1) :] == word[:-1]}
            if left <= banned:
                message = f"{name} leaves no token to choose once bad_words and min_tokens have taken theirs"
                raise RequestError(message, param=name)

    def _fresh_seed(self) -> int:
        with self._seeds_lock:
            return self._seeds.getrandbits(63)

    def _watch_compilation(self) -> None:
        """Count compilations on the engine's thread from now on; an error there where the config forbids them."""
        thread, me = self._engine.thread, weakref.ref(self)

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event == _COMPILE_EVENT and threading.current_thread() is thread and (llm := me()) is not None:
                llm.compilations_after_ready += 1
                llm._built.metrics.compiled_after_ready(1)
                if llm.config.forbid_compile:
                    raise RuntimeError(f"a program was compiled after ready ({duration_secs:.2f} s)")

        jax.monitoring.register_event_duration_secs_listener(listen)
        self._listener = listen


def _close(llm: "weakref.ref[LLM]") -> None:
    if (alive := llm()) is not None:
        alive.close()


def _is_sequence(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)


def _is_messages(prompt: Sequence[Any]) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    return bool(prompt) and all(isinstance(item, Mapping) for item in prompt)


def _is_prompt(prompts: Any) -> TypeGuard[Prompt]:
    """True for one prompt, False for a list of them, which are sequences themselves."""
    if not _is_sequence(prompts):
        raise _no_prompt(prompts)
    return isinstance(prompts, str) or (bool(prompts) and not all(isinstance(item, Sequence) for item in prompts))


def _no_prompt(value: Any) -> RequestError:
    return RequestError(f"a prompt is text, token ids or chat messages, not {value!r:.80}", param="prompt")


def generate(model: str, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[RequestOutput]:
    """Load ``model``, complete ``prompts``, and let go of it again.

    Prompts are strings, lists of token ids, or chat messages (one prompt or a list of them); ``options`` are fields of
    ``SamplingParams`` and ``EngineConfig`` by name: ``max_tokens=48, temperature=0.0, dtype="float32"``.
    Raises ``RequestError``, ``ConfigError`` or ``checkpoints.CheckpointError``.
    """
    engine_fields = {field.name for field in dataclasses.fields(EngineConfig)} - {"seed"}
    engine = {name: options.pop(name) for name in list(options) if name in engine_fields}
    unknown = set(options) - _SAMPLING - {"progress"}
    if unknown:
        name = min(unknown)
        known = ", ".join(sorted(_SAMPLING | engine_fields))
        raise RequestError(f"unknown option {name!r}; known: {known}", param=name)
    progress = options.pop("progress", True)
    params = SamplingParams(**options)  # refused before the model loads
    with LLM(model, **engine) as llm:
        return llm.generate(prompts, params, progress=progress)
