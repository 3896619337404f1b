"""Arguments that are written as text between tags, one by one, and become JSON by the tool's schema."""

import json
from collections.abc import Mapping
from typing import Any

from serve.parsers.family import Calls, Tool
from serve.parsers.lark import Lark, choose
from serve.parsers.source import Source, Wait


class Arguments:
    """Writes the arguments of the call begun last as a JSON object. ``padded``: each value has lines of its own."""

    def __init__(self, calls: Calls, name: str, *, padded: bool):
        tool = calls.tools.get(name)
        self._calls, self._properties = calls, {} if tool is None else tool.properties()
        self._trim = "\n" if padded else ""
        self._written: set[str] = set()

    def read(self, source: Source, key: str, close: str) -> Wait[bool]:
        """Read the value of ``key`` up to ``close``, a string piece by piece; False where the text ends before."""
        head = "" if key in self._written else ("{" if not self._written else ", ") + json.dumps(key) + ": "
        again = not head
        self._written.add(key)
        if self._trim:
            yield from source.expect(self._trim)
        source.commit()
        if is_text(self._properties.get(key)) and not again:
            self._calls.write(head + '"')
            end = yield from source.text_until(close, write=self._write_text, trim=self._trim, most=1, cut_short=True)
            source.commit()
            if end:
                self._calls.write('"')
            return bool(end)
        pieces: list[str] = []
        end = yield from source.text_until(close, write=pieces.append, trim=self._trim, most=1, cut_short=True)
        source.commit()
        if end and not again:
            self._calls.write(head + _as_json("".join(pieces)))
        return bool(end)

    def _write_text(self, text: str) -> None:
        self._calls.write(json.dumps(text, ensure_ascii=False)[1:-1])

    def close(self) -> None:
        """No more follow."""
        self._calls.write("}" if self._written else "{}")


def is_text(schema: Any) -> bool:
    """True where a value of the schema is text as it stands, in no quotes."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _as_json(text: str) -> str:
    """``text`` where it is JSON, otherwise as a string."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def arguments_rule(lark: Lark, number: int, tool: Tool, head: str, tail: str) -> str:
    """A rule for the arguments of tool ``number`` in the order of its schema; ``head`` holds {} for the key.

    Strings are free text up to ``tail`` unless the schema lists them: such text has no quotes that could be checked.
    """
    pieces = []
    for index, (key, schema) in enumerate(tool.properties().items()):
        if not key or key.strip() != key or any(sign in key for sign in "<>\n"):
            raise ValueError(f"the model cannot write an argument named {key!r:.80}")
        if is_text(schema):
            listed = schema.get("enum") or ([schema["const"]] if "const" in schema else None)
            if listed:
                value = choose([lark.text(str(item) + tail) for item in listed])
            else:
                value = lark.ending(f"text_{number}_{index}", tail)
        else:
            own = schema if isinstance(schema, bool) else {**_definitions(tool), **schema}
            value = f"{lark.schema(own)} {lark.text(tail)}"
        piece = f"{lark.text(head.format(key))} {value}"
        pieces.append(piece if key in tool.required() else f"({piece})?")
    return lark.rule(f"arguments_{number}", " ".join(pieces) or '""')


def _definitions(tool: Tool) -> dict[str, Any]:
    return {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
