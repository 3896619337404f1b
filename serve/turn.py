"""A conversation and its answer, however they were asked for: chat completions and responses both render from this.

The model's text becomes parts: what it says, what it thinks, the tools it calls. One parser a completion.
``serve.answer.Answer`` runs a ``Turn`` on the engine and yields its parts.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from jaxserve.request import RequestError, SamplingParams, StructuredOutputs
from serve.errors import bad_request
from serve.generation import PromptInput
from serve.parsers.choose import Formats
from serve.parsers.family import Family, Tool
from serve.parsers.grammar import turn_grammar
from serve.parsers.lark import Lark
from serve.parsers.parts import (
    Part,
    PlainParser,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBegin,
    TurnParser,
)
from serve.parsers.reasoning import Thinking, ThinkingParser
from serve.state import State
from serve.tools import CHOICES, check_tools, enforceable, named, size

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
    """The prompt by the model's chat template, how to read the answer, and the grammar that makes it readable.

    ``params`` are the client's wishes without structured outputs, which the conversation carries. Raises an ApiError
    (400) that names ``messages`` or what else is at fault.
    """
    tools = check_tools(conversation)
    formats = state.formats
    family = formats.tools if tools and conversation.tool_choice != "none" else None
    if tools and conversation.tool_choice != "none" and family is None:
        raise bad_request("tools are not supported: this server has no tool parser for its model", param="tools")
    prompt = await encode_conversation(conversation, state)
    thinking, opened = _thinking(conversation, prompt, formats.thinking)
    wanted = conversation.structured_outputs
    field = conversation.structured_field
    if family is not None or (thinking is not None and wanted is not None):
        compose = partial(_compose, conversation, tools, state, family, thinking, opened)
        tools, wanted = await state.in_thread(compose)
        field = "tools" if family is not None else field

    def parser() -> TurnParser:
        inner = PlainParser() if family is None else family.parser(tools)
        return inner if thinking is None else ThinkingParser(thinking, opened=opened, then=inner)

    changes: dict[str, Any] = {"structured_outputs": wanted}
    if family is not None or thinking is not None:
        changes["stop"] = ()
        if params.skip_special_tokens:
            changes["keep_special_ids"] = _kept(formats, family, thinking)
    return Turn(
        prompt,
        params.replace(**changes),
        parser,
        stop=tuple(params.stop) if "stop" in changes else (),
        calls_end_as="tool_calls" if conversation.tool_choice in CHOICES else "stop",
        grammar_field=field,
    )


def _thinking(
    conversation: Conversation, prompt: PromptInput, thinking: Thinking | None
) -> tuple[Thinking | None, bool]:
    """How reasoning may come in this answer, if at all, and whether the prompt has begun it."""
    text = prompt.text or ""
    if thinking is None or thinking.settled_by(text):
        return None, False
    if conversation.template_options.get("continue_final_message"):
        begun = str(conversation.messages[-1].get("content") or "")
        opened = begun.rfind(thinking.opening) > begun.rfind(thinking.closing)
        return (thinking, True) if opened else (None, False)
    return thinking, thinking.opened_by(text)


def _compose(
    conversation: Conversation,
    tools: list[Tool],
    state: State,
    family: Family | None,
    thinking: Thinking | None,
    opened: bool,
) -> tuple[list[Tool], StructuredOutputs]:
    """The tools with schemas that can be enforced, and the language of the whole answer. Takes time."""
    wanted, choice = conversation.structured_outputs, conversation.tool_choice
    forced = family is not None and choice != "auto"
    if wanted is not None and not forced:
        try:
            state.llm.check_structured_outputs(wanted)
        except RequestError as error:
            raise named(error, conversation.structured_field) from None
    if family is not None:
        tools = enforceable(tools, conversation, state.llm)
    grammar = turn_grammar(
        Lark(state.formats.special, _markers(family, thinking)),
        thinking=thinking,
        opened=opened,
        family=family,
        tools=[tool for tool in tools if choice in ("auto", "required", tool.name)],
        forced=forced,
        parallel=conversation.parallel_tool_calls and choice in CHOICES,
        wanted=wanted,
    )
    return tools, StructuredOutputs(grammar=grammar)


def _markers(family: Family | None, thinking: Thinking | None) -> tuple[str, ...]:
    own = () if thinking is None else (thinking.opening, thinking.closing)
    return tuple(dict.fromkeys((*own, *(() if family is None else family.markers))))


def _kept(formats: Formats, family: Family | None, thinking: Thinking | None) -> tuple[int, ...]:
    """Special tokens that stay in the text, for the parsers to see."""
    ids = (formats.special(marker) for marker in _markers(family, thinking))
    return tuple(token for token in ids if token is not None)


async def encode_conversation(conversation: Conversation, state: State) -> PromptInput:
    """The conversation by the model's chat template, as token ids. Raises a 400 that names ``messages``."""
    tokenizer, family = state.tokenizer, state.formats.tools
    options = template_options(conversation, state.formats)

    def encode() -> PromptInput:
        tools = list(conversation.tools) if conversation.tool_choice != "none" else []
        messages = conversation.messages
        if family is not None:
            messages = family.messages(messages) if family.teach is None else family.teach(messages, tools)
            tools = tools if family.teach is None else []
        try:
            text = tokenizer.apply_chat_template(messages, **options, **({"tools": tools} if tools else {}))
        except ValueError as error:
            raise bad_request(f"messages: {error}", param="messages", code="chat_template_error") from error
        state.check_text(text, "messages")
        return PromptInput(tokenizer.encode(text, add_special_tokens=False), text)

    found = await state.offload(size(conversation), encode)
    if not found.ids:
        raise bad_request("messages: the conversation comes to no token", param="messages", code="empty_prompt")
    return found


def template_options(conversation: Conversation, formats: Formats) -> dict[str, Any]:
    """Keywords for the template, the reasoning effort among them. Raises a 400 where the template knows none."""
    options, effort = dict(conversation.template_options), conversation.reasoning_effort
    if effort is None:
        return options
    switches = [name for name in ("enable_thinking", "thinking") if re.search(rf"\b{name}\b", formats.template)]
    known = re.search(r"\breasoning_effort\b", formats.template) is not None
    if known:
        options.setdefault("reasoning_effort", effort)
    for name in switches:
        options.setdefault(name, effort != "none")
    if not known and not switches:
        message = f"reasoning_effort {effort!r} is not supported: the model's chat template has no such switch"
        raise bad_request(message, param="reasoning_effort", code="unsupported_parameter")
    return options
