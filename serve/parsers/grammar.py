"""The language of a whole turn: reasoning, then text, calls or what the client wants to have, as one Lark grammar."""

import json
from collections.abc import Sequence

from jaxserve.request import StructuredOutputs
from serve.parsers.family import Family, Tool
from serve.parsers.lark import Lark, choose, regex
from serve.parsers.reasoning import Thinking


def turn_grammar(
    lark: Lark,
    *,
    thinking: Thinking | None,
    opened: bool,
    family: Family | None = None,
    tools: Sequence[Tool] = (),
    forced: bool = False,
    parallel: bool = True,
    wanted: StructuredOutputs | None = None,
) -> str:
    """``thinking`` None where no reasoning may come; ``opened`` where the prompt has begun it.

    With ``tools`` calls are possible, and with ``forced`` nothing else is. Without calls, the answer belongs to
    ``wanted``, or is free text.
    """
    if family is None:
        answer = _wanted(lark, wanted)
    elif forced:
        answer = _calls(lark, family, tools, parallel)
    elif wanted is not None:
        answer = choose([_wanted(lark, wanted), _calls(lark, family, tools, parallel)])
    else:
        answer = _free(lark, family, tools, parallel, None if opened else thinking)
    if thinking is None:
        return lark.grammar(answer)
    thought = lark.ending("thought", thinking.closing)
    gap = "" if family is not None and not forced and wanted is None else f" {lark.rule('gap', '/\\n{1,2}/')}?"
    if opened:
        return lark.grammar(f"{thought}{gap} {lark.rule('answer', answer)}")
    return lark.grammar(f"({lark.text(thinking.opening)} {thought}{gap})? {lark.rule('answer', answer)}")


def _calls(lark: Lark, family: Family, tools: Sequence[Tool], parallel: bool) -> str:
    return f"{lark.text(family.opening)} {family.calls(tools, parallel and family.parallel, lark)}"


def _free(lark: Lark, family: Family, tools: Sequence[Tool], parallel: bool, thinking: Thinking | None) -> str:
    """Any text until calls open."""
    calls = family.calls(tools, parallel and family.parallel, lark)
    no_thought = "" if thinking is None else f" & ~/(?s:\\s*{regex(thinking.opening)}.*)/"
    opening = regex(family.opening)
    if family.anchored:
        text = lark.rule("TEXT", f"/(?s:.+)/ & ~/(?s:\\s*{opening}.*)/{no_thought}")
        tag = f"({lark.text(family.markers[0])})?" if family.markers else ""
        return f"{text}? | {tag} {lark.text(family.opening)} {calls}"
    text = lark.rule("TEXT", f"/(?s:.+)/ & ~/(?s:.*{opening}.*)/{no_thought}")
    if lark.special(family.opening) is not None:
        return f"{text}? | {text}? {lark.text(family.opening)} {calls}"
    head = lark.rule("head[lazy]", lark.rule("HEAD", f"/(?s:.*){opening}/{no_thought}"))
    return f"{text}? | {head} {calls}"


def _wanted(lark: Lark, wanted: StructuredOutputs | None) -> str:
    assert wanted is not None, "an answer without calls needs a language"
    if wanted.json is not None:
        return lark.schema(wanted.json)
    if wanted.json_object:
        return lark.schema({"type": "object"})
    if wanted.regex is not None:
        return lark.rule("WANTED", "/" + wanted.regex.replace("/", "\\/") + "/")
    if wanted.choice is not None:
        return choose([json.dumps(item, ensure_ascii=False) for item in wanted.choice])
    return lark.rule("wanted", f"%lark {{\n{wanted.grammar}\n}}")
