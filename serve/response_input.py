"""The items of a ``/v1/responses`` request as the conversation that they are."""

from collections.abc import Sequence
from typing import Any

import pydantic_core

from serve.errors import bad_request
from serve.protocol.responses import (
    FunctionCallItem,
    FunctionOutputItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponsesRequest,
    TextPart,
)
from serve.turn import Conversation


def conversation(body: ResponsesRequest) -> Conversation:
    """Raises ApiError that names the item at fault, or RequestError."""
    options = dict(body.chat_template_kwargs or {})
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"):
        if name in options:
            raise bad_request(f"chat_template_kwargs must not set {name}", param=f"chat_template_kwargs.{name}")
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        messages += _messages(body.input)
    fields = body.structured_outputs
    return Conversation(
        messages=messages,
        tools=[tool.chat_form() for tool in body.tools or ()],
        tool_choice=body.choice,
        parallel_tool_calls=body.parallel_tool_calls,
        structured_outputs=body.language(),
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        template_options=options | {"add_generation_prompt": True, "continue_final_message": False},
        structured_field="text.format.schema" if fields is None else fields.field(),
        tool_field="tools[{}].parameters",
    )


def _messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """What one turn of the assistant thought, said and called, in this order, becomes one message."""
    found: list[dict[str, Any]] = []
    calls: dict[str, str] = {}
    for index, item in enumerate(items):
        if isinstance(item, ReasoningItem):
            text = "\n".join(part.text for part in item.content or item.summary or ())
            _assistant(found, {"content", "tool_calls", "reasoning_content"})["reasoning_content"] = text
        elif isinstance(item, FunctionCallItem):
            calls[item.call_id] = item.name
            message = _assistant(found, set())
            message.setdefault("tool_calls", []).append(_call(item, f"input[{index}].arguments"))
        elif isinstance(item, FunctionOutputItem):
            if item.call_id not in calls:
                param = f"input[{index}].call_id"
                raise bad_request(f"{param} is that of no function_call before it", param=param)
            tool = {"role": "tool", "tool_call_id": item.call_id, "name": calls[item.call_id]}
            found.append(tool | {"content": _text(item.output)})
        elif isinstance(item, MessageItem) and item.role == "assistant":
            _assistant(found, {"content", "tool_calls"})["content"] = _text(item.content)
        else:
            role = "system" if item.role == "developer" else item.role
            found.append({"role": role, "content": _text(item.content)})
    for message in found:
        message.setdefault("content", "")
    return found


def _assistant(messages: list[dict[str, Any]], full: set[str]) -> dict[str, Any]:
    """The assistant's message to add to: the last one, unless it has something of ``full``."""
    if not messages or messages[-1]["role"] != "assistant" or full & messages[-1].keys():
        messages.append({"role": "assistant"})
    return messages[-1]


def _call(item: FunctionCallItem, param: str) -> dict[str, Any]:
    try:
        arguments = pydantic_core.from_json(item.arguments or "{}", allow_inf_nan=False)
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        raise bad_request(f"{param} must be a JSON object, as text", param=param)
    return {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": arguments}}


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
