"""Tool calls and reasoning on the real engine: whatever random weights say at temperature 1 can be read as calls."""

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
from tiny import idle, roomy, write_model

from tests.serving import Server, events, serving

TEMPLATE = "{# tools <tool_call> <think></think> #}{% for m in messages %}{{ m.content }}{% endfor %}"
PICK = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "green"]}, "far": {"type": "boolean"}},
    "required": ["color"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "pick", "parameters": PICK, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"pick": PICK, "now": {"type": "object", "maxProperties": 0}}
NAMED = {"type": "function", "function": {"name": "pick"}}
WORD = {"type": "json_schema", "json_schema": {"name": "word", "schema": {"enum": ["yes", "no"]}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, programs_dir: str) -> Iterator[Server]:
    folder = write_model(tmp_path_factory.mktemp("calling") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with (
        roomy(programs_dir, folder, served_name="tiny") as llm,
        serving(llm, close_llm=False, reasoning_parser="none") as found,
    ):
        yield found
        idle(llm)


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "parallel_tool_calls": False}
    status, answer, _ = server.send("/v1/chat/completions", body | fields)
    assert status == 200, answer
    if fields.get("stream"):
        return whole(events(answer))
    return answer["choices"][0]


def whole(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"content": None, "tool_calls": []}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                message["tool_calls"].append({"function": {"name": piece["function"]["name"], "arguments": ""}})
            call = message["tool_calls"][piece["index"]]["function"]
            call["arguments"] += piece["function"].get("arguments", "")
    return {"message": message, "finish_reason": chunks[-1]["choices"][0]["finish_reason"]}


def check_call(choice: dict[str, Any]) -> str:
    (call,) = choice["message"]["tool_calls"]
    name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, SCHEMAS[name])
    assert choice["message"]["content"] is None
    return name


def test_fifty_forced_calls(server):
    cases = [
        {"seed": seed, "tool_choice": choice, "stream": bool(seed % 3 == 0)}
        for seed in range(25)
        for choice in ("required", NAMED)
    ]
    with ThreadPoolExecutor(4) as pool:
        choices = list(pool.map(lambda fields: ask(server, **fields), cases))
    names = set()
    for fields, choice in zip(cases, choices, strict=True):
        name = check_call(choice)
        assert choice["finish_reason"] == ("tool_calls" if fields["tool_choice"] == "required" else "stop")
        assert name == "pick" or fields["tool_choice"] == "required"
        names.add(name)
    assert names == {"pick", "now"}


def test_auto_calls_or_answers(server):
    """A model of bytes never says the marker by chance; with a response format both ways are open from the start."""
    kinds = set()
    for seed in range(8):
        choice = ask(server, seed=seed, temperature=50, response_format=WORD)
        if choice["message"].get("tool_calls"):
            check_call(choice)
            assert choice["finish_reason"] == "tool_calls"
            kinds.add("call")
        else:
            assert json.loads(choice["message"]["content"]) in ("yes", "no")
            assert choice["finish_reason"] == "stop"
            kinds.add("answer")
    assert kinds == {"call", "answer"}
    free = ask(server, max_tokens=20, seed=1)
    assert free["message"]["content"]
    assert "tool_calls" not in free["message"]


def test_a_call_that_is_cut_off(server):
    seen = {}
    for most in range(1, 60, 6):
        choice = ask(server, tool_choice=NAMED, seed=3, max_tokens=most)
        calls = choice["message"].get("tool_calls") or []
        assert choice["message"]["content"] in ("", None)
        seen[most] = calls[0]["function"]["arguments"] if calls else None
        if choice["finish_reason"] == "stop":
            json.loads(seen[most])
    told = [text for text in seen.values() if text is not None]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(told))
    assert None in seen.values()


def test_a_schema_that_cannot_be_enforced(server):
    bad = {"type": "object", "properties": {"a": {"type": "string", "format": "klingon"}, "b": {"type": "null"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": bad | {"required": ["b"]}, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOLS[0], tool]}
    status, answer, _ = server.send("/v1/chat/completions", body)
    assert (status, answer["error"]["param"]) == (400, "tools[1].function.parameters")
    assert "klingon" in answer["error"]["message"]
    assert "/properties/a" in answer["error"]["message"]
    tool["function"]["strict"] = False
    body |= {"tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 200}
    assert server.send("/v1/chat/completions", body)[0] == 200
    for field, value in (
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": bad}}),
        ("structured_outputs", {"json": bad}),
    ):
        status, answer, _ = server.send("/v1/chat/completions", {"messages": body["messages"], field: value})
        name = "response_format.json_schema.schema" if field == "response_format" else "structured_outputs.json"
        assert (status, answer["error"]["param"]) == (400, name)
        assert answer["error"]["message"].startswith(name)


def test_reasoning_before_a_grammar(server):
    """With reasoning the grammar begins behind it: a prompt that opens it gets reasoning, then JSON."""
    from serve.parsers.choose import choose_formats

    formats = server.state.formats
    server.state.formats = choose_formats(server.llm.tokenizer, "auto", "think")
    try:
        answer = ask(server, tools=[], messages=[{"role": "user", "content": "<think>"}], max_tokens=20)
        assert answer["message"]["reasoning_content"]
        assert answer["message"]["content"] == ""
        fields = {"response_format": WORD, "stop": ["never said"]}
        choice = ask(server, tools=[], messages=[{"role": "user", "content": "Hi"}], seed=1, **fields)
        said = choice["message"]["content"] or choice["message"]["reasoning_content"]
        assert said
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in ("yes", "no")
    finally:
        server.state.formats = formats
