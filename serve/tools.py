"""The tools of a conversation: checked, and their schemas brought to what can be enforced."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxserve.request import RequestError, StructuredOutputs
from serve.errors import ApiError, bad_request
from serve.parsers.family import Tool, is_tool_name

if TYPE_CHECKING:
    from serve.turn import Conversation

CHOICES = ("none", "auto", "required")
MAX_CHECKS = 512
"""Most schemas that are compiled to see what of a request's tools can be enforced."""


def check_tools(conversation: "Conversation") -> list[Tool]:
    """The tools as they are given. Raises a 400 that names the tool, or ``tool_choice``."""
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
    schema: dict[str, Any] = _bare(parameters or {})
    if schema.setdefault("type", "object") != "object":
        raise bad_request(f"{field}.type must be object", param=field)
    own = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"}
    if not own & schema.keys():
        schema["additionalProperties"] = False
    return schema


_NOTES = frozenset(
    {"title", "description", "$comment", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"}
)
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES = frozenset({"enum", "const", "required"})


def _bare(schema: Any) -> Any:
    """A schema without what it only tells people: the model reads that in its prompt, and grammars have limits."""
    if isinstance(schema, list):
        return [_bare(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            found[key] = {name: _bare(item) for name, item in value.items()}
        elif key not in _NOTES:
            found[key] = value if key in _VALUES else _bare(value)
    return found


def check_strict(tools: list[Tool], conversation: "Conversation", llm: Any) -> None:
    """Refuse the schema of a ``strict`` tool that the engine cannot enforce, naming it. May take seconds."""
    for index, tool in enumerate(tools):
        if conversation.tools[index]["function"].get("strict"):
            error = refusal(StructuredOutputs(json=tool.parameters), llm)
            if error is not None:
                raise named(error, conversation.tool_field.format(index))


def loosen(tools: list[Tool], llm: Any) -> list[Tool]:
    """The tools with schemas that the engine can enforce: the properties at fault may hold anything of their type.

    It is what a client that did not ask for strictness expects. May take seconds.
    """
    left = iter(range(MAX_CHECKS))

    def refused(schema: Mapping[str, Any]) -> bool:
        return next(left, None) is None or refusal(StructuredOutputs(json=schema), llm) is not None

    return [Tool(tool.name, _loosened(tool, refused)) if refused(tool.parameters) else tool for tool in tools]


def refusal(wish: StructuredOutputs, llm: Any) -> RequestError | None:
    """Why the engine cannot enforce ``wish``; None where it can."""
    try:
        llm.check_structured_outputs(wish)
    except RequestError as error:
        return error
    return None


def _loosened(tool: Tool, refused: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    shared = {name: tool.parameters[name] for name in ("$defs", "definitions") if name in tool.parameters}
    properties: dict[str, Any] = {}
    for key, schema in tool.properties().items():
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        options: tuple[Any, ...] = (schema, {"type": kind} if isinstance(kind, str) else {}, {})
        objects = ({"type": "object", "properties": {key: option}, **shared} for option in options)
        fine = (option for option, whole in zip(options, objects, strict=True) if not refused(whole))
        properties[key] = next(fine, {})
    found = {
        **{"type": "object", "properties": properties, **shared},
        "required": [key for key in properties if key in tool.required()],
        "additionalProperties": tool.parameters.get("additionalProperties") is not False,
    }
    return {"type": "object"} if refused(found) else found


def named(error: RequestError, field: str) -> ApiError:
    """An engine's complaint as one about the client's ``field``."""
    message = str(error)
    if error.param and message.startswith(error.param):
        message = field + message[len(error.param) :]
    return bad_request(message, param=field, code=error.code)


def size(conversation: "Conversation") -> int:
    """About how many characters the prompt has, at a glance."""
    messages = sum(
        len(message.get("content") or "") + 1024 * len(message.get("tool_calls") or ())
        for message in conversation.messages
    )
    return messages + 1024 * len(conversation.tools)
