"""The tools of a conversation: checked, and their schemas brought to what can be enforced."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.request import RequestError, StructuredOutputs
from serve.errors import ApiError, bad_request
from serve.parsers.family import Tool, is_tool_name

if TYPE_CHECKING:
    from serve.turn import Conversation

MAX_TOOLS = 512
CHOICES = ("none", "auto", "required")


def check_tools(conversation: "Conversation") -> list[Tool]:
    """The tools as they are given. Raises a 400 that names the tool, or ``tool_choice``."""
    if len(conversation.tools) > MAX_TOOLS:
        raise bad_request(f"tools holds more than {MAX_TOOLS} functions", param="tools")
    found: dict[str, Tool] = {}
    for index, item in enumerate(conversation.tools):
        function = item["function"]
        name, field = function["name"], conversation.tool_field.format(index)
        name_field = field.removesuffix("parameters") + "name"
        if not is_tool_name(name) or name in CHOICES:
            message = f"{name_field} must be 1 to 128 letters, digits, _, . or -, and none of {', '.join(CHOICES)}"
            raise bad_request(message, param=name_field)
        if name in found:
            raise bad_request(f"{name_field}: there are two functions of this name", param=name_field)
        found[name] = Tool(name, _as_object(function.get("parameters"), field))
    choice = conversation.tool_choice
    if choice not in ("none", "auto"):
        if not found:
            raise bad_request("tool_choice asks for a call, and there are no tools", param="tool_choice")
        if choice != "required" and choice not in found:
            raise bad_request("tool_choice names a function that is not among the tools", param="tool_choice")
    return list(found.values())


def _as_object(parameters: Any, field: str) -> dict[str, Any]:
    """The schema of the arguments. A tool that says nothing of other properties takes none."""
    schema = dict(parameters or {})
    if schema.setdefault("type", "object") != "object":
        raise bad_request(f"{field}.type must be object", param=field)
    own = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if not own & schema.keys():
        schema["additionalProperties"] = False
    return schema


def enforceable(tools: list[Tool], conversation: "Conversation", llm: Any) -> list[Tool]:
    """The tools with schemas that the engine can enforce. May take seconds: not for the event loop.

    A schema that it cannot enforce is refused, naming it, where the tool is ``strict``. Otherwise the properties at
    fault may hold anything: what a client that did not ask for strictness expects.
    """
    found = []
    for index, tool in enumerate(tools):
        error = _refusal(tool.parameters, llm)
        if error is not None:
            if conversation.tools[index]["function"].get("strict"):
                raise named(error, conversation.tool_field.format(index))
            tool = Tool(tool.name, _loosened(tool, llm))
        found.append(tool)
    return found


def _refusal(schema: Mapping[str, Any], llm: Any) -> RequestError | None:
    try:
        llm.check_structured_outputs(StructuredOutputs(json=schema))
    except RequestError as error:
        return error
    return None


def _loosened(tool: Tool, llm: Any) -> dict[str, Any]:
    properties = {}
    for key, schema in tool.properties().items():
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        plain = {"type": kind} if isinstance(kind, str) else {}
        whole = {"type": "object", "properties": {key: schema}}
        whole |= {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
        for option, candidate in ((schema, whole), (plain, {"type": "object", "properties": {key: plain}})):
            if _refusal(candidate, llm) is None:
                properties[key] = option
                break
    found: dict[str, Any] = {"type": "object", "properties": properties}
    found |= {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    found["required"] = [key for key in properties if key in tool.required()]
    found["additionalProperties"] = tool.parameters.get("additionalProperties") is not False
    return found if _refusal(found, llm) is None else {"type": "object"}


def named(error: RequestError, field: str) -> ApiError:
    """An engine's complaint as one about the client's ``field``."""
    message = str(error)
    if error.param and message.startswith(error.param):
        message = field + message[len(error.param) :]
    return bad_request(message, param=field, code=error.code)


def size(conversation: "Conversation") -> int:
    """About how many characters the prompt has."""
    text = sum(len(message.get("content") or "") + 64 for message in conversation.messages)
    return text + sum(len(json.dumps(tool)) for tool in conversation.tools)
