"""Bodies as such: JSON in, a validated object or a 400 that names the first fields at fault out."""

import difflib
from typing import Any, ClassVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Discriminator, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue

from serve.errors import ApiError, bad_request

MAX_SIGNS = {b",": 2_000_000, b":": 250_000}
"""Most values and most names in a body, counted by their signs: reading many takes long, and others wait meanwhile.
Signs in texts count as well; a text with so many is far longer than any context."""
MAX_FIELDS = 256
"""Most fields of an object that has no more than a few dozen; each unknown one would be an error of its own."""


class Body(BaseModel):
    """Any JSON object sent to the server, at any depth. A field that is null counts as absent."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)
    keeps_null: ClassVar[frozenset[str]] = frozenset({"max_tokens"})
    """Fields in which null says something."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields; at most {MAX_FIELDS} are allowed")
        return {key: item for key, item in value.items() if item is not None or key in cls.keeps_null}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """What pydantic derives, and that null counts as absent."""
        found = handler(core_schema)
        schema = handler.resolve_ref_schema(found)
        required = schema.get("required", ())
        for name, item in schema.get("properties", {}).items():
            if name not in required:
                schema["properties"][name] = _or_null(item)
        if schema.get("additionalProperties") is False:
            schema["additionalProperties"] = {"type": "null"}
        return found


def _or_null(schema: JsonSchemaValue) -> JsonSchemaValue:
    """``schema``, or null; what is said about the value stays outside."""
    options = schema.get("anyOf")
    if options is not None:
        return schema if {"type": "null"} in options else schema | {"anyOf": [*options, {"type": "null"}]}
    outside = {key: schema[key] for key in ("default", "description") if key in schema}
    inside = {key: item for key, item in schema.items() if key not in outside}
    return outside | {"anyOf": [inside, {"type": "null"}]}


def _tag(value: Any) -> str | None:
    """What tells the members of a union apart: ``<string>``, ``<list>``, or for an object its type, ``<function>``."""
    if isinstance(value, str | list):
        return "<string>" if isinstance(value, str) else "<list>"
    name = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{name}>" if isinstance(name, str) else None


BY_TYPE = Discriminator(_tag)
"""For unions whose members are marked ``Tag("<string>")``, ``Tag("<list>")`` or ``Tag("<the object's type>")``."""


def refuse(body: BaseModel, harmless: dict[str, tuple[Any, ...]]) -> None:
    """Refuse fields the server knows and cannot honour, unless their value asks for nothing."""
    for name, values in harmless.items():
        value = getattr(body, name)
        if value is not None and not any(type(value) is type(fine) and value == fine for fine in values):
            param, shown = name, ""
            if isinstance(value, dict) and isinstance(value.get("type"), str):
                param, shown = f"{name}.type", f" ({value['type'][:40]!r})"
            raise bad_request(
                f"{name}{shown} is not supported by this server", param=param, code="unsupported_parameter"
            )


def load_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw``. NaN and lone surrogates are no JSON."""
    for sign, most in MAX_SIGNS.items():
        if raw.count(sign) > most:
            raise bad_request(f"the request body holds more than {most} of {sign.decode()!r}", code="too_many_values")
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad_request(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the request body must be a JSON object", code="invalid_json")
    return value


def validate[B: Body](kind: type[B], value: dict[str, Any], *, ignore_unknown: bool) -> B:
    """``value`` as a ``kind``. Raises ApiError that names the first few fields at fault."""
    try:
        return kind.model_validate(value, extra="ignore" if ignore_unknown else "forbid")
    except ValidationError as error:
        raise _explain(error, kind) from None


FAULTS = {
    "string_type": "must be a string",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_pattern_mismatch": "must match {pattern}",
    "too_short": "must hold at least {min_length} items",
    "too_long": "holds more than {max_length} items",
    "union_tag_invalid": "has the wrong type",
    "union_tag_not_found": "has the wrong type, or is an object without a type",
    "value_error": "{error}",
}
"""What is said of each kind of fault that pydantic finds; its own words are about Python."""


def _explain(error: ValidationError, kind: type[Body]) -> ApiError:
    """One line for the first three faults; ``param`` and ``code`` tell of the first."""
    faults = error.errors(include_url=False, include_input=False)
    told = [_tell(fault["type"], fault["loc"], fault.get("ctx", {}), kind) for fault in faults[:3]]
    lines = [line for _, line in told]
    if len(faults) > 3:
        lines.append(f"and {len(faults) - 3} more")
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}.get(faults[0]["type"])
    return bad_request("; ".join(lines), param=told[0][0], code=code or "invalid_type")


def _tell(fault: str, loc: tuple[int | str, ...], context: dict[str, Any], kind: type[Body]) -> tuple[str, str]:
    """Name of the field at fault, and a sentence about it."""
    if fault == "extra_forbidden":
        name = ".".join(filter(None, (_path(loc[:-1]), str(loc[-1])[:60])))
        meant = _meant(name, kind) if len(loc) == 1 else None
        return name, f"unknown field {name!r}" + (f" (did you mean {meant!r}?)" if meant else "")
    name = _path(loc) or "body"
    if fault == "missing":
        return name, f"{name} is required"
    if fault == "union_tag_invalid" and context["tag"] not in ("<string>", "<list>"):
        known = context["expected_tags"].replace("<", "").replace(">", "")
        return f"{name}.type", f"{name}.type must be one of {known}"
    return name, f"{name} {FAULTS.get(fault, 'is not valid').format(**context)}"


ELSEWHERE = {
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), "structured_outputs"),
    "response_format": "text",
    "messages": "input",
}
"""What fields of other endpoints and servers are called here, where they are called so."""


def _meant(name: str, kind: type[Body]) -> str | None:
    """The field that an unknown one may have been meant to be."""
    if (here := ELSEWHERE.get(name)) in kind.model_fields:
        return here
    return next(iter(difflib.get_close_matches(name, kind.model_fields, 1, 0.8)), None)


def _path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``. Parts in angle brackets are tags of unions, and no names."""
    named = (part for part in loc if isinstance(part, int) or not (part.startswith("<") and part.endswith(">")))
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in named).removeprefix(".")
