"""Which language a completion must belong to: ``response_format``, and the peer's ``structured_outputs``."""

from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import Field, Tag, WithJsonSchema

from jaxserve.request import StructuredOutputs
from serve.errors import bad_request
from serve.protocol.base import BY_TYPE, Body


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Accepted and not used: schemas are always enforced."""


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


type ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    BY_TYPE,
]


class StructuredFields(Body):
    """``structured_outputs``: exactly one of these."""

    json_: Annotated[Any, Field(alias="json"), WithJsonSchema({"type": ["object", "boolean", "string"]})] = None
    """A JSON schema, or the text of one."""
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def field(self) -> str:
        """Which one was given."""
        given = (name for name in ("json_", "regex", "choice", "grammar") if getattr(self, name) is not None)
        return f"structured_outputs.{next(given, 'json_object').rstrip('_')}"

    def language(self) -> StructuredOutputs:
        """Raises RequestError, or ApiError where ``json`` is a string and no JSON."""
        schema = self.json_
        if isinstance(schema, str):
            try:
                schema = pydantic_core.from_json(schema, allow_inf_nan=False)
            except ValueError as error:
                param = "structured_outputs.json"
                raise bad_request(f"{param} is a string that is not valid JSON: {error}", param=param) from None
        return StructuredOutputs(
            json=schema,
            json_object=bool(self.json_object),
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
        )


def chosen(format: TextFormat | JsonObjectFormat | NamedSchema | None) -> StructuredOutputs | None:
    """What a format asks for."""
    if isinstance(format, JsonObjectFormat):
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json=format.schema_) if isinstance(format, NamedSchema) else None


def one_of(wanted: StructuredOutputs | None, fields: StructuredFields | None, name: str) -> StructuredOutputs | None:
    """``wanted``, which the field ``name`` asked for, or what ``structured_outputs`` asks for; both are refused."""
    if wanted is not None and fields is not None:
        raise bad_request(f"{name} and structured_outputs exclude each other", param="structured_outputs")
    return wanted if fields is None else fields.language()
