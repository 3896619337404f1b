"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` for each call."""

from collections.abc import Sequence

from serve.parsers.family import Calls, Family, Tool, json_call
from serve.parsers.lark import Lark, choose
from serve.parsers.source import Source, Wait

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def read(source: Source, calls: Calls) -> Wait[None]:
    while (yield from source.text_until(OPEN)):
        yield from source.spaces()
        if not (yield from json_call(source, calls)):
            source.give_up()
            continue
        yield from source.spaces()
        if (yield from source.expect(CLOSE)):
            source.commit()


def grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    bodies = [
        f"{lark.text(f'{{"name": "{tool.name}", "arguments": ')} {lark.schema(tool.parameters)}" for tool in tools
    ]
    call = lark.rule("call", f"{lark.text(chr(10))} {choose(bodies)} {lark.text('}' + chr(10) + CLOSE)}")
    return f"{call} ({lark.text(chr(10) + OPEN)} {call})*" if many else call


HERMES = Family("hermes", read, OPEN, grammar, markers=(OPEN, CLOSE))
