"""Grammars: what a wish allows token by token, and what is refused, by path and keyword. No engine here."""

import json
import time
from typing import Any

import numpy as np
import pytest
import tokenizers
from tiny import write_byte_tokenizer
from tokenizers import decoders, models, normalizers

from jaxserve import grammar
from jaxserve.grammar import MAX_BYTES, Grammar, Grammars
from jaxserve.request import RequestError, StructuredOutputs
from jaxserve.schema_reader import MAX_DEPTH
from jaxserve.tokenizer import Tokenizer

EOS = (2, 5)
TOOL, PLAIN, BRACKETS = 256, 257, 258


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Bytes, and three added tokens: one called special, two not."""
    path = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    write_byte_tokenizer(path)
    backend = tokenizers.Tokenizer.from_file(str(path))
    backend.add_special_tokens(["<|tool|>"])
    backend.add_tokens(["<call>", "[CALLS]"])
    return Tokenizer(backend, eos_token_ids=EOS)


@pytest.fixture(scope="module")
def grammars(words: Tokenizer) -> Grammars:
    return Grammars(words, words.vocab_size, frozenset(EOS))


def bits(mask: grammar.Mask) -> set[int]:
    found = np.unpackbits(mask.words.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(found).tolist())


def accepts(made: Grammar, text: str | list[int]) -> bool:
    """Whether the masks lead through ``text`` and let it end there."""
    place = made.start()
    for token in text.encode() if isinstance(text, str) else text:
        if place.mask is None or place.mask.complete or token not in bits(place.mask):
            return False
        place.mask = place.matcher.advance(token)
        if place.mask.error is not None:
            return False
    return place.mask is not None and (place.mask.complete or bits(place.mask) >= set(EOS))


def schema(asked: Any) -> StructuredOutputs:
    return StructuredOutputs(json=asked)


OBJECT = {"type": "object"}


@pytest.mark.parametrize(
    ("wish", "good", "bad"),
    [
        (StructuredOutputs(choice=["yes", "no", 'é😀\n"']), ["yes", "no", 'é😀\n"'], ["y", "yesno", "", "Yes"]),
        (
            StructuredOutputs(choice=["a.b", "[/\\]", " \t_", "(?i)x", "a|b"]),
            ["a.b", "[/\\]", " \t_", "a|b"],
            ["axb", "a", "X"],
        ),
        (
            StructuredOutputs(choice=[f"value {i}" for i in range(5000)]),
            ["value 0", "value 4999"],
            ["value", "value 5000"],
        ),
        (StructuredOutputs(regex="[0-9]{2}|é+"), ["12", "éé"], ["1", "123", "x12"]),
        (StructuredOutputs(regex=".*"), ["", "a😀"], ["a\nb"]),
        (StructuredOutputs(grammar='start: "a"+ /[0-9]/'), ["a1", "aaa9"], ["a", "1"]),
        (StructuredOutputs(grammar='start: "x" %json {"type": "boolean"} // %json {'), ["xtrue"], ["x1"]),
        (StructuredOutputs(json_object=True), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "", '{"a"}']),
        (schema(True), ["1", '"a"', "[]", "null"], ["a", ""]),
        (schema({"type": "string", "maxLength": 2}), ['"a😀"', '"\\n\\""'], ['"abc"', '"\\u0061"', '"\n"']),
        (schema({"type": "string", "pattern": "a|^b|c$"}), ['"xax"', '"bx"', '"xc"'], ['"xb"', '"cx"']),
        (
            schema({"type": "string", "format": "date"}),
            ['"2024-02-29"'],
            ['"2023-02-29"', '"0000-01-01"', '"2023-04-31"'],
        ),
        (schema({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}), ["0.5", "0.01"], ["0", "0.51", "-0"]),
        (schema({"type": "integer", "exclusiveMinimum": 0, "maximum": 5}), ["1", "5"], ["0", "6"]),
        (schema({"enum": [1, "a", {"b": [None]}]}), ["1", '"a"', '{"b":[null]}'], ["2", '"b"']),
        (schema({"items": [{"type": "null"}], "additionalItems": False}), ["[null]", "[]", "1"], ["[1]", "[null,1]"]),
        (schema({"type": "array", "uniqueItems": True, "maxItems": 1}), ["[]", "[1]"], ["[1,1]"]),
        (schema({"$defs": {"n": {"type": "null"}}, "items": {"$ref": "#/$defs/n"}}), ["[null]"], ["[1]"]),
        (schema({"type": "array", "items": {"$ref": "#"}, "maxItems": 1}), ["[]", "[[[]]]"], ["[1]", "[[],[]]"]),
        (schema(OBJECT | {"properties": {"a~/b": {"type": "null"}}, "required": ["a~/b"]}), ['{"a~/b":null}'], ["{}"]),
        (
            schema(OBJECT | {"properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}}),
            ['{"a":null,"b":1}', '{"b":1}'],
            ['{"a":1}', '{"\\u0061":1}', '{"b":null}'],
        ),
    ],
)
def test_a_wish_allows_its_language_and_nothing_else(
    grammars: Grammars, wish: StructuredOutputs, good: list[str], bad: list[str]
) -> None:
    made = grammars.compile(wish)
    assert [text for text in good if not accepts(made, text)] == []
    assert [text for text in bad if accepts(made, text)] == []


def test_alternatives_by_reference_are_told_apart(grammars: Grammars) -> None:
    """What pydantic writes for a union with a discriminator."""
    options = {
        tag: OBJECT | {"properties": {"kind": {"const": tag, "type": "string"}}, "required": ["kind"], "title": tag}
        for tag in ("cat", "dog")
    }
    union = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}], "discriminator": {"propertyName": "kind"}}
    made = grammars.compile(schema({"$defs": options} | union))
    assert accepts(made, '{"kind":"dog"}')
    assert not accepts(made, '{"kind":"cow"}')


def test_whitespace_is_bounded(grammars: Grammars) -> None:
    made = grammars.compile(schema(OBJECT | {"properties": {"a": {"const": 1}}, "additionalProperties": False}))
    for text in ('{"a":1}', '{ "a" : 1 }', '{\n  "a": 1\n}', "{}", "{ }", '{\n\t"a":1}'):
        assert accepts(made, text), text
    for text in (' {"a":1}', '{"a":1} ', '{  "a":1}', '{\n\n"a":1}', "{" + "\n" + " " * 33 + '"a":1}', '{"a":1}\n'):
        assert not accepts(made, text), text


def test_every_end_of_sequence_token_ends_it_and_none_does_before(grammars: Grammars) -> None:
    place = grammars.compile(StructuredOutputs(regex="a+")).start()
    assert bits(place.mask) == {ord("a")}
    mask = place.matcher.advance(ord("a"))
    assert bits(mask) == {ord("a"), *EOS}
    assert not mask.complete


def test_a_whole_text_is_complete_at_once(grammars: Grammars) -> None:
    place = grammars.compile(StructuredOutputs(choice=["ab", "ac"])).start()
    assert not place.matcher.advance(ord("a")).complete
    assert place.matcher.advance(ord("b")).complete


def test_a_model_without_an_end_token(words: Tokenizer) -> None:
    """The language still ends where nothing can follow; bits past the vocabulary are never set."""
    made = Grammars(words, 257, frozenset()).compile(StructuredOutputs(regex="a{1,2}"))
    place = made.start()
    assert bits(place.mask) == {ord("a")}
    assert bits(place.matcher.advance(ord("a"))) == {ord("a")}
    assert place.matcher.advance(ord("a")).complete


def test_starts_do_not_touch_each_other(grammars: Grammars) -> None:
    made = grammars.compile(StructuredOutputs(choice=["ab", "cd"]))
    one, two = made.start(), made.start()
    assert bits(one.matcher.advance(ord("a"))) == {ord("b")}
    assert bits(two.matcher.advance(ord("c"))) == {ord("d")}
    assert bits(made.start().mask) == {ord("a"), ord("c")}


@pytest.mark.parametrize(("name", "token"), [("<|tool|>", TOOL), ("<call>", PLAIN), ("<[CALLS]>", BRACKETS)])
def test_tokens_by_name_in_lark_however_the_tokenizer_flags_them(grammars: Grammars, name: str, token: int) -> None:
    made = grammars.compile(StructuredOutputs(grammar=f'start: {name} "x" ("</s>" | <[{token}]>) // {name}'))
    assert accepts(made, [token, ord("x"), token])
    assert accepts(made, [token, *b"x</s>"])
    assert not accepts(made, [*name.encode(), ord("x"), token]), "the token, not its spelling"


def test_the_spelling_of_a_special_token_is_text(grammars: Grammars) -> None:
    """Also where the text is forced, which llguidance wants in the tokenizer's own tokens."""
    for wish in (StructuredOutputs(choice=["<|tool|>x"]), StructuredOutputs(grammar='start: "<|tool|>x"')):
        made = grammars.compile(wish)
        assert accepts(made, list(b"<|tool|>x"))
        assert not accepts(made, [TOOL, ord("x")])
    made = grammars.compile(StructuredOutputs(choice=["<call>x"]))
    assert accepts(made, [PLAIN, ord("x")]), "a token that is not special is as good as its bytes"


def test_a_lazy_call_in_free_text(grammars: Grammars) -> None:
    """Free text until a trigger, then a constrained call: the shape of tool calls."""
    text = (
        'start: (head call)* rest\nrest: /(.|\\n)*/\nhead[lazy]: /(.|\\n)*/ "<f>"\ncall: %json {"type": "null"} "</f>"'
    )
    made = grammars.compile(StructuredOutputs(grammar=text))
    assert accepts(made, "hello")
    assert accepts(made, "hello <f>null</f> and\n<f>null</f>")
    assert not accepts(made, "hello <f>1</f>")


def test_a_tokenizer_that_begins_every_text_with_a_space() -> None:
    """Forced text is spelled exactly all the same."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab", "\u2581a"]
    model = models.BPE({name: i for i, name in enumerate(names)}, [("a", "b"), ("\u2581", "a")], byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    words = Tokenizer(backend, config={"eos_token": "</s>"})
    assert words.kind == "pieces"
    assert words.token_bytes(words.encode("ab", add_special_tokens=False)[0]).startswith(b" ")
    made = Grammars(words, len(names), frozenset({2})).compile(StructuredOutputs(choice=["abc a", "b"]))
    place, text = made.start(), b""
    place.mask = place.matcher.advance(names.index("a"))
    text = b"a"
    while not place.mask.complete:
        assert place.mask.error is None
        token = min(bits(place.mask))
        text += words.token_bytes(token)
        place.mask = place.matcher.advance(token)
    assert text == b"abc a"


def test_special_tokens_are_no_text(grammars: Grammars) -> None:
    place = grammars.compile(StructuredOutputs(regex=".*")).start()
    assert TOOL not in bits(place.mask)
    assert ord("a") in bits(place.mask)


REFUSED: list[tuple[Any, str, str | None]] = [
    ({"not": {}}, "/", "not"),
    ({"properties": {"a": {"not": {}}}}, "/properties/a", "not"),
    ({"properties": {"a/b~c": {"if": {}}}}, "/properties/a~1b~0c", "if"),
    ({"items": {"anyOf": [{}, {"uniqueItems": True}]}}, "/items/anyOf/1", "uniqueItems"),
    ({"$defs": {"x": {"contains": {}}}, "$ref": "#/$defs/x"}, "/$defs/x", "contains"),
    ({"nullable": True}, "/", "nullable"),
    ({"x-guidance": {"lenient": True}}, "/", "x-guidance"),
    ({"properties": {"a": {"pattern": "(?=a)"}}}, "/properties/a", "pattern"),
    ({"properties": {"a": {"type": "string", "pattern": "a("}}}, "/properties/a", "pattern"),
    ({"pattern": "[[:alpha:]]"}, "/", "pattern"),
    ({"pattern": "\\bfoo"}, "/", "pattern"),
    ({"patternProperties": {"(?i)x": {}}}, "/", "patternProperties"),
    ({"format": "iri"}, "/", "format"),
    ({"type": "strin"}, "/", "type"),
    ({"type": []}, "/", "type"),
    ({"type": {"a": 1}}, "/", "type"),
    ({"minLength": -1}, "/", "minLength"),
    ({"maxItems": True}, "/", "maxItems"),
    ({"minimum": "1"}, "/", "minimum"),
    ({"minimum": float("nan")}, "/", "minimum"),
    ({"maximum": 2**60}, "/", "maximum"),
    ({"exclusiveMaximum": True}, "/", "exclusiveMaximum"),
    ({"multipleOf": 0}, "/", "multipleOf"),
    ({"enum": "ab"}, "/", "enum"),
    ({"enum": []}, "/", "enum"),
    ({"const": float("inf")}, "/", "const"),
    ({"const": 10**30}, "/", "const"),
    ({"const": "\ud800"}, "/", "const"),
    ({"const": object()}, "/", "const"),
    ({"required": ["a", "a"]}, "/", "required"),
    ({"required": [1]}, "/", "required"),
    ({"properties": []}, "/", "properties"),
    ({"properties": {"a": 1}}, "/properties/a", None),
    ({"anyOf": []}, "/", "anyOf"),
    ({"anyOf": {}}, "/", "anyOf"),
    ({"minProperties": 2}, "/", "minProperties"),
    ({"$ref": "#/nowhere"}, "/", "$ref"),
    ({"$ref": "other.json"}, "/", "$ref"),
    ({"$ref": 7}, "/", "$ref"),
    ({"properties": {"a": {"$id": "x"}}}, "/properties/a", "$id"),
    ({"$schema": "https://example.com"}, "/", "$schema"),
    ({"$ref": "#"}, "/", None),
    ({"type": "object", "required": ["a"], "properties": {"a": {"$ref": "#"}}}, "/", None),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "/", "oneOf"),
    ({"items": {"oneOf": [{"minLength": 1}, {"minLength": 2}]}}, "/items", "oneOf"),
    (
        {"type": "array", "items": {"type": "string", "minLength": 3, "maxLength": 2}, "minItems": 1},
        "/items",
        "minLength",
    ),
    ({"type": "object", "required": ["a"], "additionalProperties": False}, "/", "required"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "/", None),
    (False, "/", None),
    ({"a": {}}, "/", "a"),
]


@pytest.mark.parametrize(("asked", "pointer", "keyword"), REFUSED, ids=lambda value: repr(value)[:40])
def test_what_cannot_be_enforced_is_refused_by_path_and_keyword(
    grammars: Grammars, asked: Any, pointer: str, keyword: str | None
) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(schema(asked))
    message = str(caught.value)
    assert caught.value.param == "structured_outputs.json"
    assert message.startswith(f"structured_outputs.json: at {pointer}: ")
    assert keyword is None or f"keyword '{keyword}'" in message
    assert len(message) < 500


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        (StructuredOutputs(regex="("), "unclosed group"),
        (StructuredOutputs(regex="a(?=b)"), "look-around"),
        (StructuredOutputs(regex="[^\\s\\S]"), "structured_outputs.regex"),
        (StructuredOutputs(regex=""), "no text"),
        (StructuredOutputs(regex="\ud800"), "surrogate"),
        (StructuredOutputs(choice=["a", "\udfff"]), "surrogate"),
        (StructuredOutputs(choice=["a" * MAX_BYTES]), "longer than"),
        (StructuredOutputs(grammar="start: x"), "unknown name"),
        (StructuredOutputs(grammar='start: "a" <nothing>'), "unknown special token"),
        (StructuredOutputs(grammar="start: a\na: b\nb: a"), "no text"),
        (StructuredOutputs(grammar='start: x\nx[stop="b"]: /a/'), "'stop'"),
        (StructuredOutputs(grammar="start: x\nx[lazy, temperature=0.5]: /a/"), "'temperature'"),
        (StructuredOutputs(grammar='start: %json {"items": {"not": {}}}'), "at /items: keyword 'not'"),
        (StructuredOutputs(grammar='start: %json {"x-guidance": {"lenient": true}}'), "x-guidance"),
        (StructuredOutputs(grammar="start: %json {"), "valid JSON"),
        (StructuredOutputs(grammar="start: " + "(" * 5000), "structured_outputs.grammar"),
        (StructuredOutputs(grammar="start: %json " + "[" * 100_000), "valid JSON"),
        (StructuredOutputs(grammar=""), "structured_outputs.grammar"),
    ],
)
def test_other_wishes_are_refused_by_name(grammars: Grammars, wish: StructuredOutputs, says: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammars.compile(wish)
    assert caught.value.param == f"structured_outputs.{wish.kind}"
    assert says in str(caught.value)
    assert len(str(caught.value)) < 600


def test_deep_and_large_schemas_are_refused_quickly(grammars: Grammars) -> None:
    deep: Any = {}
    for _ in range(20_000):
        deep = {"items": deep}
    value: Any = []
    for _ in range(20_000):
        value = [value]
    for asked, says in (
        (deep, f"more than {MAX_DEPTH} levels"),
        ({"const": value}, f"more than {MAX_DEPTH} levels"),
        ({"enum": ["x" * 100] * (MAX_BYTES // 100)}, "longer than"),
        ({"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(20_000)}}, "parts"),
    ):
        with pytest.raises(RequestError, match=says):
            grammars.compile(schema(asked))


def test_long_chains_of_references_are_read_in_no_time(grammars: Grammars) -> None:
    """In any order of their definitions: how finite each is follows from the next."""
    size = 2000
    for order in (range(size), reversed(range(size))):
        chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in order} | {str(size): {"const": "x"}}
        parts = {"type": "object", "properties": {str(i): {"$ref": f"#/$defs/{i}"} for i in range(0, size, 50)}}
        begun = time.process_time()
        made = grammars.compile(schema(parts | {"$defs": chain}))
        assert time.process_time() - begun < 3  # a tenth on a quiet machine; once a minute
        assert accepts(made, '{"0":"x"}')


def test_many_patterns_at_once_are_refused_before_they_take_minutes(grammars: Grammars) -> None:
    patterns = [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(27)]
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, part]} for i, part in enumerate(patterns)}
    chained = {"$defs": chain | {"d27": {}}, "properties": {"x": {"$ref": "#/$defs/d0"}}}
    for asked in ({"allOf": patterns}, chained):
        with pytest.raises(RequestError, match="more than 8 patterns"):
            grammars.compile(schema(asked))
    lark = "start: A\nA: " + " & ".join(f"/a.{{{i}}}b/" for i in range(27))
    with pytest.raises(RequestError, match="more than 8 intersections"):
        grammars.compile(StructuredOutputs(grammar=lark))
    grammars.compile(schema({"anyOf": patterns}))


def test_objects_too_wide_and_chains_too_deep_do_no_harm(grammars: Grammars) -> None:
    """Rules as many as fit the limit of bytes, each leading to the next: on the usual stack that ended the process."""
    wide = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(500)}}
    with pytest.raises(RequestError, match="keyword 'properties' holds more than 200"):
        grammars.compile(schema(wide))
    made = grammars.compile(schema(wide | {"required": list(wide["properties"])[150:]}))
    assert made.first.error is None
    count = 12_000
    rules = "\n".join(f'r{i}: "a" r{i + 1}?' for i in range(count))
    made = grammars.compile(StructuredOutputs(grammar=f"start: r0\n{rules}\nr{count}: /b/"))
    assert accepts(made, "aaa")
    many = " | ".join(f'"{i}" /x/' for i in range(3000))
    with pytest.raises(RequestError, match="too complex"):
        grammars.compile(StructuredOutputs(grammar=f'start: "a" ({many})'))


def test_descriptions_do_not_matter_and_grammars_are_kept(grammars: Grammars) -> None:
    plain = grammars.compile(schema({"type": "object", "properties": {"a": {"type": "null"}}}))
    noted = grammars.compile(
        schema({"title": "T", "type": "object", "properties": {"a": {"description": "x", "type": "null"}}, "x-y": 1})
    )
    turned = grammars.compile(schema({"type": "object", "properties": {"b": {}, "a": {"type": "null"}}}))
    assert plain is noted
    assert plain is not turned


def test_only_so_many_grammars_are_kept(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "CACHED", 2)
    few = Grammars(words, words.vocab_size, frozenset(EOS))
    wishes = [StructuredOutputs(choice=[text]) for text in ("a", "b", "c")]
    first = few.compile(wishes[0])
    assert few.compile(wishes[0]) is first
    few.compile(wishes[1])
    few.compile(wishes[0])
    few.compile(wishes[2])
    assert few.compile(wishes[0]) is first, "the least recently used one goes"
    assert len(few._kept) == 2


def test_a_grammar_that_becomes_too_complex_says_so(grammars: Grammars) -> None:
    place = grammars.compile(StructuredOutputs(grammar='start: a\na: "x" | a a | a a a')).start()
    for _ in range(2000):
        mask = place.matcher.advance(ord("x"))
        if mask.error is not None:
            break
    assert mask.error is not None
    assert "too complex" in mask.error
    assert place.matcher.advance(ord("x")).error is not None, "it stays so"


def test_models_whose_words_are_unknown_are_refused(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="tokenizer") as caught:
        Grammars(None, 100, frozenset()).compile(StructuredOutputs(regex="a"))
    assert caught.value.param == "structured_outputs"
    monkeypatch.setattr(words, "kind", "other")
    with pytest.raises(RequestError, match="tokenizer"):
        Grammars(words, 100, frozenset()).compile(StructuredOutputs(regex="a"))


def test_json_is_what_it_says(grammars: Grammars) -> None:
    """The canonical form reads back as the schema it stands for."""
    asked = {"type": "object", "properties": {"ü": {"const": [1, None, "a"]}}, "required": ["ü"]}
    assert json.loads(grammar._source(schema(asked), "json")[0]) == asked
