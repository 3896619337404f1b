"""A turn on the engine: its deltas as parts, cut at stop strings, and whole."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from jaxserve.detokenizer import StopMatcher
from jaxserve.request import Delta, RequestError, TokenLogprob, Watermark
from serve.generation import Generation
from serve.parsers.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin
from serve.state import State
from serve.tools import named
from serve.turn import Turn

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one engine step adds to completion ``index``. The last one has a finish reason."""

    index: int
    parts: list[Part]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of ``token_ids``, whatever became of their text."""
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    """Of the prompt; said once."""
    watermark: Watermark | None = None


@dataclass(slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Completion:
    """A whole completion. ``text`` and ``reasoning`` are None where there was none."""

    index: int
    text: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    watermark: Watermark | None = None

    def add(self, step: Step) -> None:
        for part in step.parts:
            match part:
                case Text(text):
                    self.text = (self.text or "") + text
                case Reasoning(text):
                    self.reasoning = (self.reasoning or "") + text
                case ToolCallBegin(_, id, name):
                    self.tool_calls.append(ToolCall(id, name))
                case ToolCallArguments(index, json):
                    self.tool_calls[index].arguments += json
        self.token_ids.extend(step.token_ids)
        if step.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *step.logprobs]
        if step.prompt_logprobs is not None:
            self.prompt_logprobs = list(step.prompt_logprobs)
        self.reasoning_tokens += step.reasoning_tokens
        self.cached_tokens += step.cached_tokens
        self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason
        self.watermark = step.watermark


class _Follower:
    """Reads one completion. ``done`` once it has ended, be it at a stop string that the engine does not know of."""

    def __init__(self, turn: Turn):
        self._turn, self._parser, self._called = turn, turn.parser(), False
        self._stops = StopMatcher(turn.stop, turn.params.include_stop_str_in_output)
        self.done = False

    def add(self, delta: Delta) -> Step:
        thinking = getattr(self._parser, "thinking", False)
        parts = self._parser.push(delta.text)
        ended = delta.finish_reason is not None
        if ended:
            parts += self._parser.finish()
        parts, stopped = self._said(parts, last=ended) if self._turn.stop else (parts, None)
        self._called |= any(isinstance(part, ToolCallBegin) for part in parts)
        self.done = ended or stopped is not None
        reason: FinishReason | None = None
        if delta.finish_reason == "length" and stopped is None:
            reason = "length"
        elif self.done:
            reason = self._turn.calls_end_as if self._called else "stop"
        return Step(
            delta.index,
            parts,
            delta.token_ids,
            delta.logprobs,
            delta.prompt_logprobs,
            len(delta.token_ids) if thinking else 0,
            reason,
            delta.stop_reason if stopped is None else stopped,
            delta.cached_tokens or 0,
            delta.watermark,
        )

    def _said(self, parts: list[Part], *, last: bool) -> tuple[list[Part], str | None]:
        """The parts up to the first stop string in what is said, and that string."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Text):
                text, stopped = self._stops.push(part.text)
                if text:
                    found.append(Text(text))
                if stopped is not None:
                    return found, stopped
                continue
            if held := self._stops.flush():
                found.append(Text(held))
            found.append(part)
        if last and (held := self._stops.flush()):
            found.append(Text(held))
        return found, None


class Answer:
    """The engine request behind a turn.

    As a context manager it submits on entry and aborts on exit what is unfinished. Iterating yields lists of ``Step``;
    ``completions`` gives all of it at once. Errors name fields as the client does.
    """

    def __init__(self, state: State, turn: Turn, priority: int = 0, cache_salt: str | None = None):
        self._turn = turn
        self._generation = Generation(state, [turn.prompt], turn.params, priority, cache_salt)

    async def __aenter__(self) -> Self:
        try:
            await self._generation.__aenter__()
        except RequestError as error:
            if (error.param or "").startswith("structured_outputs"):
                raise named(error, self._turn.grammar_field) from None
            if error.param == "prompt":  # a conversation that is too long
                raise RequestError(str(error), param="messages", code=error.code) from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._generation.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncGenerator[list[Step]]:
        followers = [_Follower(self._turn) for _ in range(self._turn.params.n)]
        async with aclosing(aiter(self._generation)) as batches:
            async for items in batches:
                steps = []
                for _, delta in items:
                    if not (follower := followers[delta.index]).done:
                        steps.append(follower.add(delta))
                yield steps
                if all(follower.done for follower in followers):
                    return

    async def completions(self) -> list[Completion]:
        """Every completion, once all are done."""
        found = [Completion(index) for index in range(self._turn.params.n)]
        async for steps in self:
            for step in steps:
                found[step.index].add(step)
        return found
