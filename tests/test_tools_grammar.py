"""Grammars of whole turns: they hold what the families' models write, and whatever they hold can be read as calls."""

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
import tokenizers

from jaxserve.detokenizer import IncrementalDetokenizer
from jaxserve.grammar import Grammars
from jaxserve.request import StructuredOutputs
from jaxserve.tokenizer import Tokenizer
from serve.parsers.choose import FAMILIES, THINKING
from serve.parsers.family import Family, Tool
from serve.parsers.grammar import turn_grammar
from serve.parsers.lark import Lark
from serve.parsers.reasoning import Thinking, ThinkingParser
from tests.test_tools_parsers import DS, read, write
from tests.tiny import write_byte_tokenizer

EOS = "<|end|>"
MARKERS = [*DS.values(), "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "[THINK]", "[/THINK]"]
TOOLS = [
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    ),
    Tool("now", {"type": "object", "properties": {}, "additionalProperties": False}),
]
CALLS = [("weather", {"city": "Paris {", "unit": "C"}), ("now", {})]


@pytest.fixture(scope="module", params=["text", "special"])
def speaker(request, tmp_path_factory) -> tuple[Tokenizer, Grammars]:
    """A tokenizer of bytes, whose markers are text or special tokens, and grammars over it."""
    path: Path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    write_byte_tokenizer(path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_special_tokens([EOS, *(MARKERS if request.param == "special" else [])])
    tokenizer = Tokenizer(backend, config={"eos_token": EOS})
    return tokenizer, Grammars(tokenizer, tokenizer.vocab_size, frozenset(tokenizer.eos_token_ids))


def special(tokenizer: Tokenizer) -> Callable[[str], int | None]:
    def find(text: str) -> int | None:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and ids[0] in tokenizer.special_ids else None

    return find


def language(tokenizer: Tokenizer, family: Family | None, thinking: Thinking | None, **options) -> StructuredOutputs:
    markers = (() if family is None else family.markers) + (
        () if thinking is None else (thinking.opening, thinking.closing)
    )
    source = turn_grammar(
        Lark(special(tokenizer), markers),
        family=family,
        tools=TOOLS,
        thinking=thinking,
        **({"opened": False} | options),
    )
    return StructuredOutputs(grammar=source)


def holds(speaker, wish: StructuredOutputs, text: str) -> bool:
    """Whether ``text`` is a whole text of the language."""
    tokenizer, grammars = speaker
    matcher = grammars.compile(wish)._matcher.deep_copy()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_what_the_families_write_belongs_to_the_language(speaker, name):
    family = FAMILIES[name]
    tokenizer = speaker[0]
    for forced, parallel in itertools.product((False, True), repeat=2):
        for thinking, opened in ((None, False), (THINKING["think"], False), (THINKING["mistral"], True)):
            wish = language(tokenizer, family, thinking, opened=opened, forced=forced, parallel=parallel)
            before = "" if thinking is None else f"hm {thinking.closing}\n\n"
            before = before if opened or thinking is None else thinking.opening + before
            said = "" if forced or family.anchored else "Let me see."
            assert holds(speaker, wish, before + said + write(name, CALLS[:1]))
            assert holds(speaker, wish, before + said + write(name, CALLS)) == (parallel and family.parallel)
            assert holds(speaker, wish, before + "Plain < text") == (not forced)
            assert not holds(speaker, wish, before + said + write(name, [("nobody", {})]))
            assert not holds(speaker, wish, before + said + write(name, [("weather", {"unit": "K"})]))
            assert not holds(speaker, wish, before + said + write(name, CALLS[:1])[:-2])


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_whatever_is_said_can_be_read(speaker, name):
    """Random walks through the language: all calls name a tool, with arguments that its schema allows."""
    tokenizer, grammars = speaker
    family = FAMILIES[name]
    made = ended = 0
    for seed, forced, thinking in itertools.product(range(3), (False, True), (None, THINKING["think"])):
        grammar = grammars.compile(language(tokenizer, family, thinking, forced=forced))
        text, whole = walk(grammar, tokenizer, random.Random(seed), family.opening)
        inner = family.parser(TOOLS)
        got = read(inner if thinking is None else ThinkingParser(thinking, opened=False, then=inner), [text])
        ended += whole
        for index, (called, arguments) in enumerate(got.calls):
            tool = next(tool for tool in TOOLS if tool.name == called)
            if whole or index < len(got.calls) - 1:
                jsonschema.validate(json.loads(arguments), tool.parameters)
                made += 1
        if whole and forced:
            assert got.calls, text
            assert not got.text.strip(), text
    assert made >= 3, "the walks came to no calls"
    assert ended >= 6, "the walks came to no end"


def walk(grammar, tokenizer: Tokenizer, dice: random.Random, opening: str, most: int = 600) -> tuple[str, bool]:
    """A random text of the language, and whether it came to its end; it tends to open calls and to close brackets."""
    place = grammar.start()
    mask, ids = place.mask, []
    planned: list[int] = []
    hurry = set(tokenizer.encode('"}]', add_special_tokens=False))
    plans = (opening, "\n</parameter>\n", "</arg_value>\n", "</think>")
    wanted = [tokenizer.encode(text, add_special_tokens=False) for text in plans]
    while len(ids) < most:
        if mask.complete:
            return tokenizer.decode(ids, skip_special_tokens=False), True
        assert mask.error is None, mask.error
        allowed = [i for i in range(tokenizer.vocab_size) if mask.words[i // 32] >> (i % 32) & 1]
        token = dice.choice(allowed)
        if not planned and dice.random() < 0.1:
            planned = list(dice.choice(wanted))
        if planned and planned[0] in allowed:
            token = planned.pop(0)
        elif dice.random() < 0.3:
            token = next((i for i in allowed if i in hurry), token)
        elif dice.random() < 0.5 and tokenizer.eos_token_ids[0] in allowed:
            token = tokenizer.eos_token_ids[0]
        else:
            planned = []
        if token in tokenizer.eos_token_ids:
            return tokenizer.decode(ids, skip_special_tokens=False), True
        ids.append(token)
        mask = place.matcher.advance(token)
    return tokenizer.decode(ids, skip_special_tokens=False), False


def test_a_wanted_answer_comes_after_the_reasoning_or_instead_of_calls(speaker):
    tokenizer = speaker[0]
    family, think = FAMILIES["hermes"], THINKING["think"]
    wishes = [
        (StructuredOutputs(json_object=True), '{"a": 1}', "[1]"),
        (StructuredOutputs(json={"type": "integer"}), "12", '"x"'),
        (StructuredOutputs(regex="a/b+"), "a/bb", "a"),
        (StructuredOutputs(regex="a\\/\\\\[/]\nb"), "a/\\/\nb", "a//\nb"),
        (StructuredOutputs(choice=['x"', "y\n"]), 'x"', "x"),
        (StructuredOutputs(grammar='start: "x" | B\nB: /y\\/+/'), "y//", "z"),
    ]
    for wish, good, bad in wishes:
        alone = language(tokenizer, None, think, wanted=wish)
        for before in ("", "<think>hm</think>", "<think>\nhm</think>\n\n"):
            assert holds(speaker, alone, before + good), (wish, before)
            assert not holds(speaker, alone, before + bad)
        both = language(tokenizer, family, None, wanted=wish)
        assert holds(speaker, both, good)
        assert holds(speaker, both, write("hermes", CALLS))
        assert not holds(speaker, both, bad)


def test_arguments_that_a_family_cannot_write_are_refused():
    tool = Tool("f", {"type": "object", "properties": {"a>b": {"type": "string"}}})
    with pytest.raises(ValueError, match="a>b"):
        FAMILIES["glm"].calls([tool], True, Lark(lambda text: None))


def test_mistrals_calls_may_have_ids(speaker):
    wish = language(speaker[0], FAMILIES["mistral"], None, forced=True)
    assert holds(speaker, wish, "[TOOL_CALLS]now[CALL_ID]abc123DEF[ARGS]{}")
    assert not holds(speaker, wish, "[TOOL_CALLS]now[CALL_ID]abc[ARGS]{}")


def test_markers_that_are_special_tokens_stay_in_the_text_and_no_others(speaker):
    tokenizer = speaker[0]
    keep = [token for text in MARKERS if (token := special(tokenizer)(text)) is not None]
    text = f"a[TOOL_CALLS]now[ARGS]{{}}{EOS}é"
    detokenizer = IncrementalDetokenizer(tokenizer, (), True, keep)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush() == text.replace(EOS, "")
