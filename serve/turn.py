"""A conversation and its answer, however they were asked for: chat completions and responses both render from this.

The model's text becomes parts: what it says, what it thinks, the tools it calls. One parser a completion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from jaxserve.request import SamplingParams, StructuredOutputs
from serve.generation import PromptInput


@dataclass(frozen=True, slots=True)
class Text:
    """What is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What stood between think tags."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """Tool call ``index`` (from 0) of this completion starts; its name is whole."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the arguments of tool call ``index``; all fragments together parse as a JSON object."""

    index: int
    json: str


type Part = Text | Reasoning | ToolCallBegin | ToolCallArguments


class TurnParser(Protocol):
    """Splits one completion's text into parts as it comes. Whatever arrives, nothing is lost and nothing repeated."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """The text has ended: what was held back."""
        ...


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation to be answered, checked and in one form."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates take them: role, content, tool_calls (arguments as objects), tool_call_id, name."""
    tools: Sequence[Mapping[str, Any]] = ()
    """``{"type": "function", "function": {"name", "description", "parameters", "strict"}}`` each."""
    tool_choice: Literal["none", "auto", "required"] | str = "auto"
    """Or the name of the one tool to be called."""
    parallel_tool_calls: bool = True
    structured_outputs: StructuredOutputs | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """A conversation made ready for the engine."""

    prompt: PromptInput
    params: SamplingParams
    parser: Callable[[], TurnParser]
    """A fresh parser for each completion."""
