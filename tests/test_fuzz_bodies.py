"""Bodies broken in every way that comes to mind: always an answer below 500, a small error object, a well server.

Each body is one that is fine and holds most fields, with a few things in it replaced, added, doubled or torn.
"""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fake_llm import FakeLLM
from tests.fuzz import check_well
from tests.serving import Server, serving

SAMPLING: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
    "min_tokens": 1,
    "ignore_eos": True,
    "stop": ["a", "b"],
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "priority": 1,
    "cache_salt": "s",
    "user": "u",
}
BOTH = SAMPLING | {
    "n": 2,
    "max_tokens": 4,
    "prompt_logprobs": 1,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "return_token_ids": True,
    "truncate_prompt_tokens": 5,
}
GRAMMAR = {key: value for key, value in BOTH.items() if key not in ("allowed_token_ids", "bad_words", "logit_bias")}
"""What goes with structured outputs."""
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
MESSAGES = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": [{"type": "text", "text": "U"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "5"},
]
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "U"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "1", "output": "5"},
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", BOTH | {"prompt": ["ab", "c"], "logprobs": 1, "echo": True, "best_of": 2}),
    ("/v1/completions", GRAMMAR | {"prompt": [[1, 2], [3]], "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "response_format": {"type": "json_object"}}),
    (
        "/v1/chat/completions",
        GRAMMAR
        | {
            "messages": MESSAGES,
            "logprobs": True,
            "top_logprobs": 2,
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            "chat_template_kwargs": {"a": [1]},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "parallel_tool_calls": False,
        },
    ),
    (
        "/v1/responses",
        {key: value for key, value in SAMPLING.items() if key in GRAMMAR}
        | {
            "input": ITEMS,
            "instructions": "I",
            "max_output_tokens": 4,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
            "metadata": {"a": "b"},
            "stream": True,
        },
    ),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA, "strict": True}],
            "tool_choice": "auto",
            "reasoning": {"effort": "low"},
        },
    ),
    ("/tokenize", {"model": "tiny", "prompt": "ab", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": True, "return_token_strs": True}),
    ("/detokenize", {"model": "tiny", "tokens": [97, 98], "skip_special_tokens": True}),
]


class Raw(str):
    """JSON as it stands, right or wrong."""


def deep(opening: str, closing: str, levels: int) -> Raw:
    return Raw(opening * levels + "1" + closing * levels)


EVIL = [
    *(None, True, False, 0, -1, 1.5, 2**31, 2**63, -(2**63) - 1, 2**64, 1e308, 5e-324, "", "x", "5", "\u0000", "😀"),
    *("x" * 100_000, "漢" * 5000, [], {}, [None], [[]], [{}], ["", 5], list(range(3000)), [0.5], [-1], [10**9]),
    *({"type": "x"}, {"type": 5}, {"type": "text"}, {"": ""}, {"type": "json_schema"}, {"json": {}}, {"regex": "("}),
    *(Raw("1e-400"), Raw("9" * 4000), deep("[", "]", 100), deep('{"a":', "}", 100)),
    {"anyOf": [{"type": "string"}, {"$ref": "#"}]},
]
NO_JSON = [
    *(Raw("1e400"), Raw("-1e400"), Raw("NaN"), Raw("Infinity"), Raw("01"), Raw("+1"), Raw("[1,]"), Raw("9" * 5000)),
    *(Raw('"\\ud800"'), Raw('"\\udc00\\ud800"'), Raw('"\\u00"'), Raw('"\\x"'), Raw('"\n"'), Raw("'x'"), Raw("nul")),
    *(deep("[", "]", 5000), deep('{"a":', "}", 5000)),
]
NAMES = ["", "__class__", "a.b", "<x>", "x" * 10_000, "\ud83d", "model ", "Prompt", "self", "漢", "0", "\u0000", "n"]


def dump(value: Any) -> str:
    """JSON, with ``Raw`` as it stands and objects that may be lists of pairs, in which a name may come twice."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path in a body."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(value: Any, path: tuple[Any, ...], how: str, name: str, evil: Any) -> Any:
    """The body with what lies at ``path`` replaced, removed, doubled, or with a field added to it."""
    if not path:
        if how == "add" and isinstance(value, dict):
            return value | {name: evil}
        return evil
    first, rest = path[0], path[1:]
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    out = []
    for key, item in items:
        if key != first:
            out.append((key, item))
        elif rest:
            out.append((key, changed(item, rest, how, name, evil)))
        elif how == "double":
            out += [(key, item), (key, evil)]
        elif how == "add" and isinstance(item, dict):
            out.append((key, item | {name: evil}))
        elif how != "remove":
            out.append((key, evil))
    if isinstance(value, list):
        return [item for _, item in out]
    keys = [key for key, _ in out]
    return dict(out) if len(set(keys)) == len(keys) else tuple(out)


@st.composite
def broken(draw: st.DrawFn) -> tuple[str, bytes]:
    path, body = draw(st.sampled_from(BODIES))
    value: Any = body
    evil = st.sampled_from(draw(st.sampled_from([EVIL, EVIL, EVIL, EVIL + NO_JSON])))
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(value, dict):
            break
        place = draw(st.sampled_from(list(places(value))))
        how = draw(st.sampled_from(["replace", "replace", "remove", "double", "add"]))
        value = changed(value, place, how, draw(st.sampled_from(NAMES)), draw(evil))
    raw = dump(value).encode("utf-8", "surrogatepass")
    tear = draw(st.sampled_from(["no"] * 20 + ["cut", "byte", "zeros"]))
    at = draw(st.integers(0, max(0, len(raw) - 1)))
    if tear == "cut":
        raw = raw[:at]
    elif tear == "byte":
        raw = raw[:at] + draw(st.sampled_from([b"\xff", b"\x00", b"\xc3", b"\xed\xa0\x80", b"}", b'"'])) + raw[at:]
    elif tear == "zeros":
        raw += b"\x00" * 1000
    return path, raw


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(FakeLLM(most=200_000)) as found:
        yield found
        check_well(found)


@pytest.fixture(scope="module")
def connection(server: Server) -> Iterator[http.client.HTTPConnection]:
    found = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    yield found
    found.close()


def post(connection: http.client.HTTPConnection, path: str, raw: bytes) -> tuple[int, bytes]:
    connection.request("POST", path, raw, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, reply.read()


@settings(
    max_examples=1000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(sent=broken())
def test_broken_bodies_are_answered_and_harm_nothing(connection, sent):
    path, raw = sent
    status, answer = post(connection, path, raw)
    assert status < 500, answer[:2000]
    if status != 200:
        assert len(answer) < 8192
        error = json.loads(answer)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        for foreign in ("pydantic", "BaseModel", "Traceback", "Input should", "instance of", "dict["):
            assert foreign not in error["message"]
    status, answer = post(connection, "/v1/completions", b'{"prompt": "Hi", "max_tokens": 1}')
    assert status == 200, answer[:2000]


def test_the_bodies_are_fine_as_they_are(connection):
    for path, body in BODIES:
        if "tools" not in body:  # the fake has no tokens for tools
            status, answer = post(connection, path, json.dumps(body).encode())
            assert status == 200, (path, answer[:500])
