"""GLM 4.5 and later: ``<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>``."""

from collections.abc import Sequence

from serve.parsers.family import Calls, Family, Tool, is_tool_name
from serve.parsers.lark import Lark, choose
from serve.parsers.source import Source, Wait
from serve.parsers.typed import Arguments, arguments_rule

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def read(source: Source, calls: Calls) -> Wait[None]:
    while (yield from source.text_until(OPEN)):
        name, end = yield from source.until("\n", KEY, CLOSE, most=256)
        if not name.strip():  # a line break before the name
            name, end = yield from source.until("\n", KEY, CLOSE, most=256)
        name = name.strip()
        if not end or not is_tool_name(name):
            source.give_up()
            continue
        calls.begin(name)
        if end == "\n":
            yield from source.spaces()
            end = yield from source.expect(KEY, CLOSE)
        arguments = Arguments(calls, name, padded=False)
        while end == KEY:
            key, end = yield from source.until(END_KEY)
            yield from source.spaces()
            if not end or not (yield from source.expect(VALUE)):
                break
            if not (yield from arguments.read(source, key.strip(), END_VALUE)):
                break
            yield from source.spaces()
            end = yield from source.expect(KEY, CLOSE)
        if not source.ended:
            arguments.close()
        if end == CLOSE:
            source.commit()


def grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    head, tail = f"{KEY}{{}}{END_KEY}\n{VALUE}", f"{END_VALUE}\n"
    bodies = [
        f"{lark.text(tool.name + chr(10))} {arguments_rule(lark, number, tool, head, tail)}"
        for number, tool in enumerate(tools)
    ]
    call = lark.rule("call", f"{choose(bodies)} {lark.text(CLOSE)}")
    return f"{call} ({lark.text(chr(10) + OPEN)} {call})*" if many else call


GLM = Family("glm", read, OPEN, grammar, markers=(OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE))
