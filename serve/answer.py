"""A turn on the engine: its deltas as parts, cut at stop strings, and whole."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from jaxserve.request import Delta, RequestError, TokenLogprob
from serve.errors import bad_request
from serve.generation import Generation
from serve.parsers.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin
from serve.state import State
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
        self.finish_reason, self.stop_reason = step.finish_reason, step.stop_reason


class _Follower:
    """Reads one completion."""

    def __init__(self, turn: Turn):
        self._turn, self._parser, self._called = turn, turn.parser(), False

    def add(self, delta: Delta) -> Step:
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.finish()
        self._called |= any(isinstance(part, ToolCallBegin) for part in parts)
        reason: FinishReason | None = None
        if delta.finish_reason == "length":
            reason = "length"
        elif delta.finish_reason is not None:
            reason = self._turn.calls_end_as if self._called else "stop"
        return Step(
            delta.index,
            parts,
            delta.token_ids,
            delta.logprobs,
            delta.prompt_logprobs,
            finish_reason=reason,
            stop_reason=delta.stop_reason,
        )


class Answer:
    """The engine request behind a turn.

    As a context manager it submits on entry and aborts on exit what is unfinished. Iterating yields lists of ``Step``;
    ``completions`` gives all of it at once. Errors name fields as the client does.
    """

    def __init__(self, state: State, turn: Turn, priority: int = 0):
        self._turn = turn
        self._generation = Generation(state, [turn.prompt], turn.params, priority)

    async def __aenter__(self) -> Self:
        try:
            await self._generation.__aenter__()
        except RequestError as error:
            raise _renamed(error, self._turn.grammar_field) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._generation.__aexit__(kind, error, trace)

    async def __aiter__(self) -> AsyncGenerator[list[Step]]:
        followers = [_Follower(self._turn) for _ in range(self._turn.params.n)]
        async for items in self._generation:
            yield [followers[delta.index].add(delta) for _, delta in items]

    async def completions(self) -> list[Completion]:
        """Every completion, once all are done."""
        found = [Completion(index) for index in range(self._turn.params.n)]
        async for steps in self:
            for step in steps:
                found[step.index].add(step)
        return found


def _renamed(error: RequestError, grammar_field: str) -> Exception:
    param = error.param or ""
    if not param.startswith("structured_outputs"):
        return error
    message = str(error).replace(param, grammar_field, 1)
    return bad_request(message, param=grammar_field, code=error.code)
