"""Qwen3-Coder: ``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""

from collections.abc import Sequence

from serve.parsers.family import Calls, Family, Tool, is_tool_name
from serve.parsers.lark import Lark, choose
from serve.parsers.source import Source, Wait
from serve.parsers.typed import Arguments, arguments_rule

OPEN, CLOSE, FUNCTION, END_FUNCTION = "<tool_call>", "</tool_call>", "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


def read(source: Source, calls: Calls) -> Wait[None]:
    while marker := (yield from source.text_until(OPEN, FUNCTION)):
        if marker == OPEN:
            yield from source.spaces()
            if not (yield from source.expect(FUNCTION)):
                source.give_up()
                continue
        name, end = yield from source.until(">", most=256)
        if not end or not is_tool_name(name):
            source.give_up()
            continue
        calls.begin(name)
        yield from _arguments(source, Arguments(calls, name, padded=True))
        yield from source.spaces()
        if (yield from source.expect(CLOSE)):
            source.commit()


def _arguments(source: Source, arguments: Arguments) -> Wait[None]:
    while True:
        yield from source.spaces()
        if not (yield from source.expect(PARAMETER)):
            break
        key, end = yield from source.until(">")
        if not end or not (yield from arguments.read(source, key, END_PARAMETER)):
            break
    if source.ended:  # cut off: what there is stays open
        return
    arguments.close()
    if (yield from source.expect(END_FUNCTION)):
        source.commit()


def grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    bodies = [
        lark.text(f"\n{FUNCTION}{tool.name}>\n")
        + " "
        + arguments_rule(lark, number, tool, PARAMETER + "{}>\n", f"\n{END_PARAMETER}\n")
        for number, tool in enumerate(tools)
    ]
    call = lark.rule("call", f"{choose(bodies)} {lark.text(f'{END_FUNCTION}{chr(10)}{CLOSE}')}")
    return f"{call} ({lark.text(chr(10) + OPEN)} {call})*" if many else call


QWEN3_CODER = Family("qwen3_coder", read, OPEN, grammar, markers=(OPEN, CLOSE))
