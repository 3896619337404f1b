"""DeepSeek V3 and R1 (``function<sep>name`` and fenced JSON) and V3.1 (``name<sep>{...}``), between their own tags."""

import json
from collections.abc import Sequence

from serve.parsers.family import Calls, Family, Messages, Tool, as_object, is_tool_name
from serve.parsers.lark import Lark, choose
from serve.parsers.source import Source, Wait

CALLS, END_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEP, END_CALL = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, END_FENCE = "\n```json\n", "\n```"


def read(source: Source, calls: Calls) -> Wait[None]:
    while marker := (yield from source.text_until(CALLS, CALL)):
        if marker == CALLS:
            yield from source.spaces()
            if not (yield from source.expect(CALL)):
                source.give_up()
                continue
        if not (yield from _call(source, calls)):
            source.give_up()
            continue
        yield from source.spaces()
        if (yield from source.expect(END_CALLS)):
            source.commit()


def _call(source: Source, calls: Calls) -> Wait[bool]:
    name, sep = yield from source.until(SEP, most=256)
    fenced = False
    if name == "function" and (yield from source.peek()) != "{":
        name, sep = yield from source.until(FENCE, most=256)
        fenced = True
    name = name.strip()
    if not sep or not is_tool_name(name):
        return False
    yield from source.spaces()
    if (yield from source.peek()) == "{":
        calls.begin(name)
        if (yield from source.value(calls.write)) is None:
            return True
    else:
        arguments = as_object((yield from source.value()))
        if arguments is None:
            return False
        calls.begin(name)
        calls.write(arguments)
    source.commit()
    if fenced:
        yield from source.spaces()
        yield from source.expect("```")
    yield from source.spaces()
    if (yield from source.expect(END_CALL)):
        source.commit()
    return True


def _grammar(tools: Sequence[Tool], many: bool, lark: Lark, *, fenced: bool) -> str:
    def call(tool: Tool) -> str:
        head = f"{CALL}function{SEP}{tool.name}{FENCE}" if fenced else f"{CALL}{tool.name}{SEP}"
        return f"{lark.text(head)} {lark.schema(tool.parameters)}"

    tail = lark.text((END_FENCE if fenced else "") + END_CALL)
    one = lark.rule("call", f"{choose([call(tool) for tool in tools])} {tail}")
    between = f"{lark.text(chr(10))} " if fenced else ""
    more = f"({between}{one})*" if many else ""
    return f"{one} {more} {lark.text(END_CALLS)}"


def _fenced(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    return _grammar(tools, many, lark, fenced=True)


def _bare(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    return _grammar(tools, many, lark, fenced=False)


def messages(given: Messages) -> Messages:
    """The templates want arguments as text, and no content beside calls."""
    found = []
    for message in given:
        if message.get("tool_calls"):
            calls = [
                call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
            message = {**message, "tool_calls": calls, "content": message.get("content") or None}
        found.append(message)
    return found


_MARKERS = (CALLS, END_CALLS, CALL, SEP, END_CALL)
DEEPSEEK_V3 = Family("deepseek_v3", read, CALLS, _fenced, markers=_MARKERS, messages=messages)
DEEPSEEK_V31 = Family("deepseek_v31", read, CALLS, _bare, markers=_MARKERS, messages=messages)
