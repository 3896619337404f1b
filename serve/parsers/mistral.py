"""Mistral: ``[TOOL_CALLS]`` and an array of calls, or, in newer models, ``[TOOL_CALLS]name[ARGS]{...}`` for each."""

import hashlib
import re
import secrets
import string
from collections.abc import Sequence
from typing import Any

from serve.parsers.family import Calls, Family, Messages, Tool, as_object, is_tool_name, json_call
from serve.parsers.lark import Lark, choose
from serve.parsers.source import Source, Wait

OPEN, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LETTERS = string.ascii_letters + string.digits


def read(source: Source, calls: Calls) -> Wait[None]:
    while (yield from source.text_until(OPEN)):
        yield from source.spaces()
        one = _array if (yield from source.peek()) == "[" else _named
        if not (yield from one(source, calls)):
            source.give_up()


def _array(source: Source, calls: Calls) -> Wait[bool]:
    yield from source.expect("[")
    while True:
        yield from source.spaces()
        if (yield from source.expect("]")):
            break
        if not (yield from json_call(source, calls)):
            return False
        yield from source.spaces()
        if not (yield from source.expect(",")):
            if (yield from source.expect("]")):
                break
            return False
    source.commit()
    return True


def _named(source: Source, calls: Calls) -> Wait[bool]:
    name, sign = yield from source.until(ARGS, ID, "{", most=256)
    if sign == ID:
        _, sign = yield from source.until(ARGS, most=256)
    name = name.strip()
    if not sign or not is_tool_name(name):
        return False
    if sign == "{":
        source.back(1)
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        calls.begin(name)
        yield from source.value(calls.write)
        source.commit()
        return True
    arguments = as_object((yield from source.value()))
    if arguments is None:
        return False
    calls.begin(name)
    calls.write(arguments)
    return True


def _array_grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    bodies = [
        f"{lark.text(f'{{"name": "{tool.name}", "arguments": ')} {lark.schema(tool.parameters)}" for tool in tools
    ]
    call = lark.rule("call", f"{choose(bodies)} {lark.text('}')}")
    return f'(" ")? "[" {call} {f'(", " {call})*' if many else ""} "]"'


def _named_grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    bodies = [f"{lark.text(tool.name + ARGS)} {lark.schema(tool.parameters)}" for tool in tools]
    call = lark.rule("call", choose(bodies))
    return f"{call} ({lark.text(OPEN)} {call})*" if many else call


def new_id() -> str:
    """Nine letters and digits, which the templates insist on."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


def messages(given: Messages) -> Messages:
    """Ids that came from elsewhere are replaced by nine letters and digits, the same wherever they stand."""

    def short(id: Any) -> str:
        text = str(id or "")
        return text if re.fullmatch(r"[A-Za-z0-9]{9}", text) else hashlib.sha256(text.encode()).hexdigest()[:9]

    found = []
    for message in given:
        if message.get("tool_calls"):
            calls = [call | {"id": short(call.get("id"))} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        if message.get("tool_call_id"):
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        found.append(message)
    return found


_MARKERS = (OPEN, ARGS, ID)
MISTRAL = Family("mistral", read, OPEN, _named_grammar, markers=_MARKERS, new_id=new_id, messages=messages)
MISTRAL_ARRAY = Family("mistral_array", read, OPEN, _array_grammar, markers=_MARKERS, new_id=new_id, messages=messages)
