"""The messages of a conversation."""

from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import Field, SkipValidation, Tag

from serve.errors import bad_request
from serve.protocol.base import BY_TYPE, Body

MAX_PARTS = 1024
"""Most parts of a message's content."""


class TextPart(Body):
    type: Literal["text"]
    text: str


class RefusalPart(Body):
    """What an assistant's message may hold too; for the model it is text."""

    type: Literal["refusal"]
    refusal: str


type Part = Annotated[Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], BY_TYPE]

type Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS), Tag("<list>")],
    BY_TYPE,
]


def _text(content: str | list[TextPart | RefusalPart]) -> str:
    """What the model sees of it: parts are joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


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
    content: Content | None = None
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
        content = self.refusal if self.content is None else _text(self.content)
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
