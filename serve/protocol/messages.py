"""The messages of a conversation."""

from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import PlainValidator, SkipValidation

from serve.errors import bad_request
from serve.protocol.base import Body


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant's message may hold too; for the model it is text."""

    type: Literal["refusal"]
    refusal: str


def _check_content(value: object) -> str | None:
    """Message content: a string, or a list of text parts, which are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of parts")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str):
            raise ValueError(f'[{index}] must be an object with a "type"')
        if kind not in ("text", "refusal"):
            raise ValueError(f"[{index}]: parts of type {kind[:40]!r} are not supported; only text is")
        if not isinstance(part.get(kind), str) or part.keys() - {"type", kind}:
            raise ValueError(f'[{index}] must hold "type" and "{kind}" (a string) and nothing else')
        texts.append(part[kind])
    return "\n".join(texts)


type Content = Annotated[
    str | None, PlainValidator(_check_content, json_schema_input_type=str | list[TextPart | RefusalPart])
]


class CalledFunction(Body):
    name: str
    arguments: str
    """A JSON object, as text."""
    parsed_arguments: SkipValidation[Any] = None
    """What clients keep beside it; not used."""


class CalledTool(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """What clients keep of a stream; not used."""

    def for_template(self, path: str) -> dict[str, Any]:
        """With its arguments as an object. Raises ApiError where they are none."""
        text = self.function.arguments
        try:
            arguments = pydantic_core.from_json(text, allow_inf_nan=False) if text.strip() else {}
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            param = f"{path}.function.arguments"
            raise bad_request(f"{param} must be a JSON object, as text", param=param)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Body):
    """One message. Which fields it must have depends on its role."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    """Of an assistant, whose content may then be missing."""
    tool_call_id: str | None = None
    """Of a tool: the call that it answers."""
    reasoning_content: str | None = None
    """Of an assistant; whether the model sees it is the template's choice."""
    refusal: str | None = None
    annotations: SkipValidation[Any] = None
    """Clients send their answers back as they came; this is not used, nor is what follows."""
    parsed: SkipValidation[Any] = None
    audio: None = None
    function_call: None = None

    def for_template(self, path: str) -> dict[str, Any]:
        """As templates take it. Raises ApiError that names the field at fault below ``path``."""

        def need(name: str) -> None:
            if getattr(self, name) is None:
                raise bad_request(f"{path}.{name} is missing", param=f"{path}.{name}")

        if self.role != "assistant":
            for name in ("tool_calls", "reasoning_content", "refusal"):
                if getattr(self, name):
                    message = f"{path}.{name} may only be given in an assistant's message"
                    raise bad_request(message, param=f"{path}.{name}")
        if self.role == "tool":
            need("tool_call_id")
        elif self.tool_call_id is not None:
            message = f"{path}.tool_call_id may only be given in a tool's message"
            raise bad_request(message, param=f"{path}.tool_call_id")
        content = self.refusal if self.content is None else self.content
        if content is None and not self.tool_calls:
            need("content")
        role = "system" if self.role == "developer" else self.role
        found: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                found[name] = getattr(self, name)
        if self.tool_calls:
            calls = (call.for_template(f"{path}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls))
            found["tool_calls"] = list(calls)
        return found
