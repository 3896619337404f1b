"""Bodies as such: JSON in, a validated object or a 400 that names the first fields at fault out."""

from typing import Any

import pydantic_core
from pydantic import BaseModel, ConfigDict, ValidationError

from serve.errors import ApiError, bad_request


class Body(BaseModel):
    """Any JSON object sent to the server."""

    model_config = ConfigDict(strict=True, extra="forbid")


def refuse(body: BaseModel, harmless: dict[str, tuple[Any, ...]]) -> None:
    """Refuse fields the server knows and cannot honour, unless their value asks for nothing."""
    for name, values in harmless.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            param, shown = name, ""
            if isinstance(value, dict) and isinstance(value.get("type"), str):
                param, shown = f"{name}.type", f" ({value['type'][:40]!r})"
            raise bad_request(
                f"{name}{shown} is not supported by this server", param=param, code="unsupported_parameter"
            )


def load_json(raw: bytes) -> dict[str, Any]:
    """The JSON object in ``raw`` without its null fields (but ``max_tokens``). NaN and lone surrogates are no JSON."""
    try:
        value = pydantic_core.from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise bad_request(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the request body must be a JSON object", code="invalid_json")
    if isinstance(messages := value.get("messages"), list):
        value["messages"] = [_without_nulls(m) if isinstance(m, dict) else m for m in messages]
    return _without_nulls(value)


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if item is not None or key == "max_tokens"}


def validate[B: Body](kind: type[B], value: dict[str, Any], *, ignore_unknown: bool) -> B:
    """``value`` as a ``kind``. Raises ApiError that names the first few fields at fault."""
    try:
        return kind.model_validate(value, extra="ignore" if ignore_unknown else "forbid")
    except ValidationError as error:
        raise _explain(error) from None


def _explain(error: ValidationError) -> ApiError:
    """One line for the first three faults; ``param`` and ``code`` tell of the first."""
    faults = error.errors(include_url=False, include_input=False)
    lines = []
    for fault in faults[:3]:
        name = _path(fault["loc"])
        if fault["type"] == "extra_forbidden":
            lines.append(f"unknown field {name!r}")
        elif fault["type"] == "missing":
            lines.append(f"{name} is required")
        elif fault["type"] == "value_error":
            lines.append(f"{name} {fault['ctx']['error']}")
        else:
            text = fault["msg"].removeprefix("Input should be ")
            lines.append(f"{name} must be {text}" if text != fault["msg"] else f"{name}: {text}")
    if len(faults) > 3:
        lines.append(f"and {len(faults) - 3} more")
    code = {"extra_forbidden": "unknown_parameter", "missing": "missing_required_parameter"}.get(faults[0]["type"])
    return bad_request("; ".join(lines), param=_path(faults[0]["loc"]), code=code or "invalid_type")


def _path(loc: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:60]}" for part in loc)
    return text.removeprefix(".") or "body"
