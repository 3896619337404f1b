"""A conversation and its answer, however they were asked for: chat completions and responses both render from this.

The model's text becomes parts: what it says, what it thinks, the tools it calls. One parser a completion.
``serve.answer.Answer`` runs a ``Turn`` on the engine and yields its parts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.request import SamplingParams, StructuredOutputs
from serve.errors import bad_request
from serve.generation import PromptInput
from serve.parsers.parts import (
    Part,
    PlainParser,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBegin,
    TurnParser,
)
from serve.state import State

__all__ = [
    "Conversation",
    "Part",
    "Reasoning",
    "Text",
    "ToolCallArguments",
    "ToolCallBegin",
    "Turn",
    "TurnParser",
    "prepare_turn",
]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """A conversation to be answered, checked and in one form."""

    messages: Sequence[Mapping[str, Any]]
    """As chat templates take them: role, content (a string), tool_calls (arguments as objects), tool_call_id, name,
    reasoning_content."""
    tools: Sequence[Mapping[str, Any]] = ()
    """``{"type": "function", "function": {"name", "description", "parameters", "strict"}}`` each."""
    tool_choice: Literal["none", "auto", "required"] | str = "auto"
    """Or the name of the one tool to be called (no tool may have one of these words as its name)."""
    parallel_tool_calls: bool = True
    structured_outputs: StructuredOutputs | None = None
    reasoning_effort: str | None = None
    """none, minimal, low, medium, high or xhigh."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords for the chat template, add_generation_prompt and continue_final_message among them."""
    structured_field: str = "structured_outputs"
    """What the client calls the field that ``structured_outputs`` came from; errors name it."""
    tool_field: str = "tools[{}].function.parameters"
    """The same for a tool's parameters."""


@dataclass(frozen=True)
class Turn:
    """A conversation made ready for the engine."""

    prompt: PromptInput
    params: SamplingParams
    parser: Callable[[], TurnParser]
    """A fresh parser for each completion."""
    stop: Sequence[str] = ()
    """Stop strings that are looked for in what is said, not by the engine in the whole text."""
    calls_end_as: Literal["tool_calls", "stop"] = "tool_calls"
    """The finish reason of a completion that called tools."""
    grammar_field: str = "structured_outputs"
    """What the client calls the field that ``params.structured_outputs`` came from."""


async def prepare_turn(conversation: Conversation, params: SamplingParams, state: State) -> Turn:
    """The prompt by the model's chat template, and how to read the answer.

    ``params`` are the client's wishes without structured outputs, which the conversation carries. Raises an ApiError
    (400) that names ``messages`` or what else is at fault.
    """
    prompt = await encode_conversation(conversation, state)
    return Turn(prompt, params.replace(structured_outputs=conversation.structured_outputs), PlainParser)


async def encode_conversation(conversation: Conversation, state: State) -> PromptInput:
    """The conversation by the model's chat template, as token ids. Raises a 400 that names ``messages``."""
    tokenizer = state.tokenizer

    def encode() -> PromptInput:
        try:
            text = tokenizer.apply_chat_template(conversation.messages, **conversation.template_options)
        except ValueError as error:
            raise bad_request(f"messages: {error}", param="messages", code="chat_template_error") from error
        return PromptInput(tokenizer.encode(text, add_special_tokens=False), text)

    size = sum(len(message.get("content") or "") for message in conversation.messages)
    found = await state.offload(size, encode)
    if not found.ids:
        raise bad_request("messages: the conversation comes to no token", param="messages", code="empty_prompt")
    return found
