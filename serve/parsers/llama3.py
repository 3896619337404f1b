"""Llama 3: the whole answer is ``{"name": ..., "parameters": {...}}``, possibly behind ``<|python_tag|>``."""

from collections.abc import Sequence

from serve.parsers.family import Calls, Family, Tool, json_call
from serve.parsers.lark import Lark, choose
from serve.parsers.source import Source, Wait

TAG = "<|python_tag|>"
OPENING = '{"name": "'


def read(source: Source, calls: Calls) -> Wait[None]:
    """Calls separated by semicolons. JSON that names no tool is an answer like any other."""
    yield from source.spaces()
    tagged = yield from source.expect(TAG)
    yield from source.spaces()
    while (yield from json_call(source, calls, known=not tagged)):
        yield from source.spaces()
        if not (yield from source.expect(";")):
            break
        yield from source.spaces()
    source.give_up()
    yield from source.text_until()


def grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    bodies = [f"{lark.text(f'{tool.name}", "parameters": ')} {lark.schema(tool.parameters)}" for tool in tools]
    call = lark.rule("call", f"{choose(bodies)} {lark.text('}')}")
    return f"{call} ({lark.text('; ' + OPENING)} {call})*" if many else call


LLAMA3 = Family("llama3", read, OPENING, grammar, markers=(TAG,), anchored=True)
