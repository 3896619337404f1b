"""From a parsed request to the engine and back: tokenize, submit, follow, and abort what was abandoned."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from jaxserve.request import CompletionOutput, Delta, OwnFault, RequestError, RequestOutput, SamplingParams
from serve.errors import ApiError, bad_request, unavailable
from serve.mark import announced
from serve.protocol.base import Body, load_json, validate
from serve.record import CURRENT, Record
from serve.state import Channel, State

PROMPT_CHARACTERS = 64
"""What it costs to tokenize any text at all, in characters."""
SUBMIT_SECONDS = 0.01
"""Longest that submitting many prompts holds the event loop at a time."""


@dataclass(frozen=True)
class PromptInput:
    """A prompt ready for the engine, and its text where it came as text."""

    ids: list[int]
    text: str | None = None
    dropped: int = 0
    """Tokens that ``truncate_prompt_tokens`` took from its beginning."""


async def read_body[B: Body](
    request: web.Request, state: State, kind: type[B] | Callable[[dict[str, Any]], type[B]]
) -> B:
    """The body as a ``kind``, which may depend on the JSON, and its model name checked.

    Raises ApiError: a 413 before reading where the length says it is too large, a 408 where it takes too long, a 400.
    """
    raw = await _read(request, state.options.max_body_bytes, state.options.body_timeout)

    def make() -> B:
        value = load_json(raw)
        chosen = kind if isinstance(kind, type) else kind(value)
        return validate(chosen, value, ignore_unknown=state.options.ignore_unknown_fields)

    body = await state.offload(len(raw) // 16, make)
    state.check_model(getattr(body, "model", None))
    return body


async def _read(request: web.Request, most: int, seconds: float) -> bytes:
    large = ApiError(413, f"the request body exceeds {most} bytes", code="request_too_large")
    if request.content_length is not None and request.content_length > most:
        raise large
    pieces, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for piece in request.content.iter_any():
                size += len(piece)
                if size > most:
                    raise large
                pieces.append(piece)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {seconds:g} seconds", code="body_timeout") from None
    return b"".join(pieces)


async def encode_prompts(
    prompt: str | list[str] | list[int] | list[list[int]], state: State, *, add_special_tokens: bool
) -> list[PromptInput]:
    """Each prompt as token ids. Raises a 400 for one that comes to no token at all."""
    first = prompt if isinstance(prompt, str) else prompt[0]
    if isinstance(first, int):
        return [PromptInput(prompt)]  # type: ignore[arg-type]
    if isinstance(first, list):
        return [PromptInput(ids) for ids in prompt]  # type: ignore[arg-type]
    texts: list[str] = [prompt] if isinstance(prompt, str) else prompt  # type: ignore[assignment]
    tokenizer = state.tokenizer
    for text in texts:
        state.check_text(text)

    def encode() -> list[PromptInput]:
        return [PromptInput(tokenizer.encode(text, add_special_tokens=add_special_tokens), text) for text in texts]

    inputs = await state.offload(sum(len(text) + PROMPT_CHARACTERS for text in texts), encode)
    if not all(item.ids for item in inputs):
        raise ApiError(400, "the prompt is empty: it comes to no token", param="prompt", code="empty_prompt")
    return inputs


def truncate(prompt: PromptInput, keep: int | None, params: SamplingParams, state: State) -> PromptInput:
    """The prompt's last ``keep`` tokens; all for None, and for -1 what leaves room for the output asked for."""
    if keep == -1:
        output = max(1, params.min_tokens) if params.max_tokens is None else params.max_tokens
        keep = max(1, state.llm.max_model_len - output)
    if keep is None or keep >= len(prompt.ids):
        return prompt
    return PromptInput(prompt.ids[-keep:], None, len(prompt.ids) - keep)


def truncation(prompts: Sequence[PromptInput], keep: int | None) -> dict[str, int]:
    """What the answer says where ``truncate_prompt_tokens`` was given: how many tokens were dropped."""
    return {} if keep is None else {"truncated_prompt_tokens": sum(prompt.dropped for prompt in prompts)}


class Generation:
    """The engine requests behind one HTTP request, one for each prompt.

    As a context manager it submits on entry (all or none) and aborts whatever is unfinished on exit, so that a client
    that went away costs nothing more. Iterating yields lists of (prompt index, delta) until all are done.
    """

    def __init__(
        self,
        state: State,
        prompts: Sequence[PromptInput],
        params: SamplingParams,
        priority: int,
        cache_salt: str | None = None,
    ):
        self._state, self._prompts, self._params, self._priority = state, prompts, params, priority
        self._channel = Channel()
        self._open: dict[int, str] = {}
        self._deadline: asyncio.TimerHandle | None = None
        self._record = CURRENT.get() or Record("")
        tenant = self._record.tenant if state.options.cache_salt_from == "api-key" else ""
        self._cache_salt = f"{tenant} {cache_salt}" if tenant else cache_salt or ""
        self._record.prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
        self._record.watermark = announced(state, params)

    async def __aenter__(self) -> Self:
        self._state.channels.add(self._channel)
        if seconds := self._state.options.request_timeout:
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._expire, seconds)
        try:
            self._check_size()
            begun = time.perf_counter()
            for index, prompt in enumerate(self._prompts):
                submit = partial(
                    self._state.llm.submit,
                    prompt.ids,
                    self._params,
                    on_delta=self._state.poster(self._channel, index),
                    priority=self._priority,
                    cache_salt=self._cache_salt,
                )
                # A grammar may take seconds to compile. Whoever goes away meanwhile leaves the request behind.
                slow = self._params.structured_outputs is not None
                left = self._state.llm.abort
                self._open[index] = await self._state.in_thread(submit, undo=left) if slow else submit()
                if time.perf_counter() - begun > SUBMIT_SECONDS:
                    await asyncio.sleep(0)
                    begun = time.perf_counter()
        except BaseException:
            self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _check_size(self) -> None:
        """Refuse what is hopelessly long at once, for the engine looks at every token before it counts them; and what
        could never be queued as a whole, since trying again later, as a full queue says, would not help."""
        count, queue = len(self._prompts) * self._params.n, self._state.llm.config.max_queued_requests
        if count > queue:
            param = "prompt" if len(self._prompts) > 1 else "n"
            message = f"{param}: these would be {count} completions, more than the {queue} that may wait"
            raise RequestError(message, param=param, code="too_many_completions")
        most = self._state.llm.max_model_len
        for prompt in self._prompts:
            if len(prompt.ids) > most:
                size = f"{len(prompt.ids)} token{'s' * (len(prompt.ids) != 1)}"
                message = f"the prompt has {size}, and the context holds {most}, prompt and output"
                raise RequestError(message, param="prompt", code="context_length_exceeded")

    def _expire(self, seconds: float) -> None:
        self._state.count_rejection("deadline")
        self._channel.fail(ApiError(504, f"the request took longer than {seconds:g} seconds", code="deadline_exceeded"))

    def _close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._open:
            self._record.reasons["abort"] = None
        self._state.channels.discard(self._channel)
        for request_id in self._open.values():
            self._state.llm.abort(request_id)
        self._open.clear()

    async def __aiter__(self) -> AsyncGenerator[list[tuple[int, Delta]]]:
        while self._open:
            items = await self._channel.get()
            for number, (index, delta) in enumerate(items):
                if (error := _failure(delta)) is not None:
                    yield items[:number]
                    raise error
                self._record.completion_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    self._record.reasons[delta.finish_reason] = None
                if delta.request_done:
                    self._open.pop(index, None)
            yield items

    async def outputs(self) -> list[RequestOutput]:
        """Everything, once all is done."""
        found = [
            RequestOutput("", prompt.text, prompt.ids, [CompletionOutput(i) for i in range(self._params.n)])
            for prompt in self._prompts
        ]
        async for items in self:
            for index, delta in items:
                found[index].add(delta)
        return found


def _failure(delta: Delta) -> ApiError | None:
    if isinstance(delta.error, OwnFault):
        return bad_request(delta.error, code="impossible_request")
    if delta.error is not None or delta.finish_reason == "error":
        return ApiError(500, delta.error or "the engine failed on this request", code="engine_error")
    if delta.finish_reason == "abort":
        return unavailable("the request was aborted by the server", code="aborted")
    return None


def prompt_usage(prompts: Sequence[PromptInput], completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """The ``usage`` object. A prompt counts once, however many completions it has."""
    prompt_tokens = sum(len(prompt.ids) for prompt in prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
