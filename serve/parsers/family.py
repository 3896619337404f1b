"""What a family of tool formats is, and what all of them share."""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from serve.parsers.lark import Lark
from serve.parsers.parts import ToolCallArguments, ToolCallBegin, TurnParser
from serve.parsers.source import Reader, Source, Wait

type Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of an object."""

    def properties(self) -> dict[str, Any]:
        found = self.parameters.get("properties")
        return dict(found) if isinstance(found, Mapping) else {}

    def required(self) -> frozenset[str]:
        found = self.parameters.get("required")
        return frozenset(name for name in found if isinstance(name, str)) if isinstance(found, list) else frozenset()


def new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class Calls:
    """Writes the calls that a reader finds."""

    def __init__(self, source: Source, tools: Sequence[Tool], make_id: Callable[[], str]):
        self.tools = {tool.name: tool for tool in tools}
        self._source, self._make_id, self._count = source, make_id, 0

    def begin(self, name: str) -> None:
        """A call starts; what was read up to here belongs to it."""
        self._source.commit()
        self._source.ends_in_space = True
        self._source.emit(ToolCallBegin(self._count, self._make_id(), name))
        self._count += 1

    def write(self, text: str) -> None:
        """More arguments of the call begun last."""
        if text:
            self._source.emit(ToolCallArguments(self._count - 1, text))


@dataclass(frozen=True)
class Family:
    """One way to write tool calls into text."""

    name: str
    read: Callable[[Source, Calls], Wait[None]]
    """Reads a whole completion."""
    opening: str
    """What a completion's calls begin with."""
    calls: Callable[[Sequence[Tool], bool, Lark], str]
    """(tools, whether several calls may be made, grammar to add rules to) to what follows ``opening``, in Lark."""
    markers: tuple[str, ...] = ()
    """What may be special tokens, and must then stay in the text."""
    anchored: bool = False
    """``opening`` counts at the beginning of the answer only; behind the first of ``markers`` too, where that came."""
    parallel: bool = True
    """Several calls can be written."""
    new_id: Callable[[], str] = new_id
    messages: Callable[[Messages], Messages] = lambda messages: messages
    """The conversation as the family's templates want it."""
    teach: Callable[[Messages, Sequence[Mapping[str, Any]]], Messages] | None = None
    """Writes the tools into the conversation, where the template does not know them."""

    def parser(self, tools: Sequence[Tool]) -> TurnParser:
        source = Source()
        return Reader(source, self.read(source, Calls(source, tools, self.new_id)))


def json_call(source: Source, calls: Calls, *, known: bool = False) -> Wait[bool]:
    """Read a call that is a JSON object of name and arguments (or parameters), in any order.

    False where it is none, up to where that shows; ``known`` wants the name of a tool there is.
    """
    name = held = None
    begun = False
    if not (yield from source.expect("{")):
        return False
    while True:
        yield from source.spaces()
        if (yield from source.expect("}")):
            break
        key = yield from source.string()
        yield from source.spaces()
        if key is None or not (yield from source.expect(":")):
            return begun
        yield from source.spaces()
        if key == "name" and name is None:
            name = yield from source.string()
            if not name or (known and name not in calls.tools):
                return False
        elif key in ("arguments", "parameters") and held is None and not begun:
            if name is not None and (yield from source.peek()) == "{":
                calls.begin(name)
                begun = True
                if (yield from source.value(calls.write)) is None:
                    return True
            else:
                held = as_object((yield from source.value()))
                if held is None:
                    return False
        elif key not in ("id", "type") or (yield from source.value()) is None:
            return begun
        yield from source.spaces()
        if not (yield from source.expect(",")):
            if not (yield from source.expect("}")):
                return begun
            break
    if not begun:
        if name is None:
            return False
        calls.begin(name)
        calls.write(held or "{}")
    source.commit()
    return True


def as_object(raw: str | None) -> str | None:
    """JSON of an object, be it given as such or in a string; None counts as empty. None for anything else."""
    for _ in range(2):
        try:
            value = json.loads(raw) if raw is not None else raw
        except (ValueError, RecursionError):
            return None
        if isinstance(value, dict):
            return raw
        if not isinstance(value, str):
            return "{}" if value is None and raw is not None else None
        raw = value
    return None


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,128}")


def is_tool_name(name: str) -> bool:
    """True for what every family can write."""
    return _PLAIN_NAME.fullmatch(name) is not None
