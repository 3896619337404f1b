"""Tool call parsers: samples of every family, and that neither chunking nor malice changes what comes out."""

import json
import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.parsers.choose import FAMILIES
from serve.parsers.family import Tool, as_object
from serve.parsers.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin

TOOLS = [
    Tool(
        "weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "where": {"type": "object"},
                "any": {},
            },
            "required": ["city"],
        },
    ),
    Tool("now", {"type": "object", "properties": {}}),
    Tool("run", {"type": "object", "properties": {"command": {"type": "string"}}}),
]


@dataclass
class Whole:
    """All parts of a completion, put together; parts of one kind that follow each other are one."""

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, part: Part) -> None:
        match part:
            case Text(text):
                assert text
                self.text += text
                self._came("text")
            case Reasoning(text):
                assert text
                self.reasoning += text
                self._came("reasoning")
            case ToolCallBegin(index, id, name):
                assert index == len(self.calls)
                self.calls.append([name, ""])
                self.ids.append(id)
                self.order.append(f"call {index}")
            case ToolCallArguments(index, json):
                assert index == len(self.calls) - 1, "arguments of a call that is not the last"
                assert json
                self.calls[index][1] += json

    def _came(self, kind: str) -> None:
        if not self.order or self.order[-1] != kind:
            self.order.append(kind)


def read(parser, pieces) -> Whole:
    whole = Whole()
    for piece in pieces:
        for part in parser.push(piece):
            whole.add(part)
    for part in parser.finish():
        whole.add(part)
    return whole


def parse(family: str, *pieces: str) -> Whole:
    return read(FAMILIES[family].parser(TOOLS), pieces)


DS = {
    "begin": "<｜tool▁calls▁begin｜>",
    "call": "<｜tool▁call▁begin｜>",
    "sep": "<｜tool▁sep｜>",
    "end": "<｜tool▁call▁end｜>",
    "ends": "<｜tool▁calls▁end｜>",
}
PARIS = {"city": "Paris"}

# (family, what the model wrote, the text, the calls)
SAMPLES = [
    ("hermes", "Just text.", "Just text.", []),
    (
        "hermes",
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        "",
        [("weather", PARIS)],
    ),
    (
        "hermes",
        'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "Let me look.",
        [("weather", PARIS | {"days": 2}), ("now", {})],
    ),
    ("hermes", '<tool_call>{"name":"now"}</tool_call>', "", [("now", {})]),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", [("weather", PARIS)]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
        "",
        [("weather", PARIS)],
    ),
    (
        "hermes",
        '<tool_call>\n{"name": "run", "arguments": {"command": "mkdir {a,b \\" </tool_call> ]"}}\n</tool_call>',
        "",
        [("run", {"command": 'mkdir {a,b " </tool_call> ]'})],
    ),
    ("hermes", "<tool_call>no json</tool_call> a", "<tool_call>no json</tool_call> a", []),
    ("hermes", '<tool_call>{"name": 5}', '<tool_call>{"name": 5}', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    (
        "hermes",
        'x <tool_call>? <tool_call>{"name": "now", "arguments": {}}</tool_call> y',
        "x <tool_call>? y",
        [("now", {})],
    ),
    ("json", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", {})]),
    (
        "qwen3_coder",
        "Sure.\n\n<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "Sure.",
        [("weather", PARIS | {"days": 2})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", [("now", {})]),
    (
        "qwen3_coder",
        "<function=run>\n<parameter=command>\nline 1\n\n\"quoted\" </param {\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=weather>\n<parameter=where>\n{\"a\": [1]}\n</parameter>\n</function>\n</tool_call>",
        "",
        [("run", {"command": 'line 1\n\n"quoted" </param {'}), ("weather", {"where": {"a": [1]}})],
    ),
    ("qwen3_coder", "<tool_call> <function=", "<tool_call> <function=", []),
    (
        "glm",
        "Ok\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>any</arg_key>\n"
        "<arg_value>[1, \"x\"]</arg_value>\n</tool_call>",
        "Ok",
        [("weather", PARIS | {"any": [1, "x"]})],
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris\n</arg_value><arg_key>any</arg_key>"
        "<arg_value>not json</arg_value></tool_call><tool_call>now</tool_call>",
        "",
        [("weather", {"city": "Paris\n", "any": "not json"}), ("now", {})],
    ),
    ("glm", "<tool_call>now\n</tool_call>", "", [("now", {})]),
    ("llama3", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [("weather", PARIS)]),
    ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", {})]),
    ("llama3", '{"type": "function", "name": "now", "parameters": {}}', "", [("now", {})]),
    (
        "llama3",
        '{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Paris"}}',
        "",
        [("now", {}), ("weather", PARIS)],
    ),
    ("llama3", '{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ("llama3", 'Well: {"name": "now", "parameters": {}}', 'Well: {"name": "now", "parameters": {}}', []),
    ("llama3", '  {"answer": 42}', '  {"answer": 42}', []),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Paris"}', "", [("weather", PARIS)]),
    (
        "mistral",
        "Hm.[TOOL_CALLS]now[CALL_ID]abc123DEF[ARGS]{}[TOOL_CALLS]now[ARGS]{}",
        "Hm.",
        [("now", {}), ("now", {})],
    ),
    ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}', "", [("weather", PARIS)]),
    (
        "mistral_array",
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        "",
        [("weather", PARIS), ("now", {})],
    ),
    ("mistral_array", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abc123DEF"}]', "", [("now", {})]),
    ("mistral", "a [TOOL_CALLS] b", "a [TOOL_CALLS] b", []),
    (
        "deepseek_v3",
        '{begin}{call}function{sep}weather\n```json\n{{"city": "Paris"}}\n```{end}\n'
        "{call}function{sep}now\n```json\n{{}}\n```{end}{ends}".format(**DS),
        "",
        [("weather", PARIS), ("now", {})],
    ),
    (
        "deepseek_v31",
        'I look.{begin}{call}weather{sep}{{"city": "Paris"}}{end}{call}now{sep}{{}}{end}{ends}'.format(**DS),
        "I look.",
        [("weather", PARIS), ("now", {})],
    ),
    ("deepseek_v31", "{begin} {call} x".format(**DS), "{begin} {call} x".format(**DS), []),
]  # fmt: skip


@pytest.mark.parametrize(("family", "said", "text", "calls"), SAMPLES)
def test_samples(family, said, text, calls):
    whole = parse(family, said)
    assert whole.text == text
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == calls
    assert len(set(whole.ids)) == len(whole.ids)
    by_character = parse(family, *said)
    assert (by_character.text, by_character.calls, by_character.order) == (whole.text, whole.calls, whole.order)


def test_ids_are_as_the_families_templates_want_them():
    for family, said, _, calls in SAMPLES:
        pattern = r"[A-Za-z0-9]{9}" if family.startswith("mistral") else r"call_[0-9a-f]{24}"
        ids = parse(family, said).ids
        assert len(ids) == len(calls)
        assert all(re.fullmatch(pattern, id) for id in ids)


@st.composite
def pieces_of(draw, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_call", "</", "<", "\n", " ", "{", "}", "}}", '"', ",", ":", "[", "]"),
    *("\\", '\\"'),
    *('{"name": "now"', '{"name": "weather", "arguments": ', '"parameters": ', '{"city": "Paris"}', "{}", "null", "12"),
    *("<function=now>", "<parameter=city>", "</parameter>", "</function>", "<parameter=", "now", "weather\n"),
    *("<arg_key>city</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>", "; "),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_", *DS.values(), "function", "\n```json\n", "\n```", "<｜tool"),
    *("text", "é😀", "<think>", "</think>"),
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(sorted(FAMILIES)))
def test_chunks_do_not_matter_whatever_is_said(data, family):
    samples = st.sampled_from([said for _, said, *_ in SAMPLES])
    text = "".join(data.draw(st.lists(st.one_of(st.sampled_from(FRAGMENTS), samples), max_size=12)))
    whole = parse(family, text)
    pieces = parse(family, *data.draw(pieces_of(text)))
    assert (pieces.text, pieces.calls, pieces.order) == (whole.text, whole.calls, whole.order)
    assert parse(family, *text).calls == whole.calls
    if not whole.calls:
        assert whole.text == text  # nothing is lost that was no call


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(
        st.sampled_from(["now", "weather"]).flatmap(
            lambda name: st.tuples(
                st.just(name),
                st.dictionaries(
                    st.text("abcdefgh_", min_size=1, max_size=5),
                    st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4),
                    max_size=3,
                )
                if name == "weather"
                else st.just({}),
            )
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["", "Let me see."]),
    st.data(),
)
def test_calls_come_through(family, calls, before, data):
    """Any arguments that the format can carry arrive as they were meant."""
    if family in ("qwen3_coder", "glm"):
        calls = calls[-1:]
        properties = {key: {"type": "string"} if isinstance(v, str) else {} for key, v in calls[0][1].items()}
        tools = [Tool(calls[0][0], {"type": "object", "properties": properties})]
    else:
        tools = TOOLS
    if family == "llama3":
        before = ""
    text = before + write(family, calls)
    parser = FAMILIES[family].parser(tools)
    whole = read(parser, data.draw(pieces_of(text)))
    assert [(name, json.loads(arguments)) for name, arguments in whole.calls] == calls
    assert whole.text == before


def write(family: str, calls) -> str:
    """The calls as a model of the family writes them."""
    objects = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    match family:
        case "hermes" | "json":
            return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)
        case "llama3":
            return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)
        case "mistral":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)
        case "mistral_array":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "deepseek_v3":
            body = "\n".join(
                f"{DS['call']}function{DS['sep']}{name}\n```json\n{json.dumps(arguments)}\n```{DS['end']}"
                for name, arguments in calls
            )
            return DS["begin"] + body + DS["ends"]
        case "deepseek_v31":
            body = "".join(
                f"{DS['call']}{name}{DS['sep']}{json.dumps(arguments)}{DS['end']}" for name, arguments in calls
            )
            return DS["begin"] + body + DS["ends"]
    texts = [
        (name, [(k, v if isinstance(v, str) else json.dumps(v)) for k, v in arguments.items()])
        for name, arguments in calls
    ]
    if family == "qwen3_coder":
        return "\n".join(
            f"<tool_call>\n<function={name}>\n"
            + "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in pairs)
            + "</function>\n</tool_call>"
            for name, pairs in texts
        )
    return "\n".join(
        f"<tool_call>{name}\n"
        + "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in pairs)
        + "</tool_call>"
        for name, pairs in texts
    )


@pytest.mark.parametrize(
    ("family", "said"), [(family, said) for family, said, _, calls in SAMPLES if calls], ids=lambda v: v[:30]
)
def test_a_call_that_is_cut_off_stays_a_prefix(family, said):
    """However early the text ends: names are whole, arguments a beginning of what they would have been."""
    whole = parse(family, said)
    for end in range(len(said)):
        cut = parse(family, said[:end])
        assert len(cut.calls) <= len(whole.calls)
        for (name, arguments), (full_name, full) in zip(cut.calls, whole.calls, strict=False):
            assert name == full_name
            assert full.startswith(arguments)
        assert len(cut.text) <= end


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_text_streams_without_delay(family):
    """What cannot be the beginning of a call goes out at once."""
    parser = FAMILIES[family].parser(TOOLS)
    for word in ("Hello", ",", "world", "!"):
        assert parser.push(word) == [Text(word)]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("family", "opening", "close"),
    [
        ("hermes", '<tool_call>{"name": "run", "arguments": {"command": "', '"}}</tool_call>'),
        ("llama3", '{"name": "run", "parameters": {"command": "', '"}}'),
        ("mistral", '[TOOL_CALLS]run[ARGS]{"command": "', '"}'),
        ("deepseek_v31", f"{DS['begin']}{DS['call']}run{DS['sep']}" + '{"command": "', '"}'),
        ("qwen3_coder", "<tool_call>\n<function=run>\n<parameter=command>\n", "\n</parameter>\n</function>"),
        ("glm", "<tool_call>run\n<arg_key>command</arg_key>\n<arg_value>", "</arg_value>\n</tool_call>"),
    ],
)
def test_arguments_stream_without_delay(family, opening, close):
    parser = FAMILIES[family].parser(TOOLS)
    parts = parser.push(opening)
    assert isinstance(parts[0], ToolCallBegin)
    for word in ("mkdir", " -p", " a/b"):
        assert parser.push(word) == [ToolCallArguments(0, word)]
    parser.push(close)
    parser.finish()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_malice_costs_little(family):
    """Long and deep inputs are read in linear time and without recursion."""
    opening = FAMILIES[family].opening
    for text in (
        opening * 5000,
        opening + '{"name": "now", "arguments": ' + '{"a":' * 50_000,
        opening + '{"name": "' + "x" * 100_000,
        opening + '"arguments": ' + "[" * 50_000,
        "\n" * 20_000,
        "<" * 20_000,
        opening + "\\" * 20_000,
    ):
        whole = parse(family, *(text[i : i + 997] for i in range(0, len(text), 997)))
        if not whole.calls:
            assert whole.text == text


def test_arguments_in_other_clothes():
    assert as_object('{"a": 1}') == '{"a": 1}'
    assert as_object("null") == "{}"
    assert as_object('"{}"') == "{}"
    assert as_object("[1]") is as_object('"x"') is as_object("{") is as_object(None) is None
    assert as_object("[" * 100_000) is None
