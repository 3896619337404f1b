"""Tool calls over the chat API, on a fake engine: what goes in, and what comes out, by the official client too."""

import json
import socket
import threading
import time
from collections.abc import Iterator

import openai
import pytest
from pydantic import BaseModel

from serve.parsers.choose import FAMILIES, choose_formats
from tests.fake_llm import ByteTokenizer, FakeLLM
from tests.serving import Server, chat, events, serving

HERMES = "{{ tools }} <tool_call>"
"""All that is looked at of a template: that it knows tools, and whose."""
ANSWER = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris {é"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How the weather is",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, NOW]
USER = {"role": "user", "content": "How is Paris?"}


def fake(answer: str = ANSWER, template: str = HERMES) -> FakeLLM:
    llm = FakeLLM(answer=answer, max_model_len=4096)
    llm.tokenizer.chat_template = template
    return llm


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(fake()) as found:
        yield found


def prompt(server: Server) -> str:
    return bytes(server.llm.submitted[-1].prompt).decode()


def test_calls_whole_and_streamed_are_the_same(server):
    status, answer, _ = chat(server, tools=TOOLS, logprobs=True, top_logprobs=1, return_token_ids=True)
    assert status == 200
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me look."
    calls = choice["message"]["tool_calls"]
    assert [(call["type"], call["function"]) for call in calls] == [
        ("function", {"name": "weather", "arguments": '{"city": "Paris {é"}'}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    assert len({call["id"] for call in calls}) == 2
    size = len(ANSWER.encode())
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == size
    chunks = events(chat(server, tools=TOOLS, stream=True, logprobs=True, return_token_ids=True)[1])
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    assert [one["delta"].get("role") for one in choices] == ["assistant"] + [None] * (len(choices) - 1)
    assert "".join(one["delta"].get("content") or "" for one in choices) == "Let me look."
    pieces = [piece for one in choices for piece in one["delta"].get("tool_calls", ())]
    for index, call in enumerate(calls):
        first, *rest = [piece for piece in pieces if piece["index"] == index]
        assert (first["type"], first["function"]["name"]) == ("function", call["function"]["name"])
        assert first["id"].startswith("call_")
        assert all(piece.keys() == {"index", "function"} for piece in rest)
        said = "".join(piece["function"]["arguments"] for piece in (first, *rest))
        assert said == call["function"]["arguments"]
    assert sum(len(one["logprobs"]["content"]) for one in choices if one["logprobs"]) == size
    assert sum(len(one.get("token_ids", ())) for one in choices) == size


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "tool_calls"),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, "tool_calls"),
        ({"tool_choice": "required"}, "tool_calls"),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "stop"),
        ({"max_tokens": 80}, "length"),
    ],
)
def test_how_a_call_ends(server, fields, reason):
    choice = chat(server, tools=TOOLS, **fields)[1]["choices"][0]
    assert choice["finish_reason"] == reason
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert server.llm.submitted[-1].params.structured_outputs.grammar


def test_what_the_grammar_may_hold(server):
    def grammar(**fields) -> str:
        assert chat(server, tools=TOOLS, **fields)[0] == 200
        return server.llm.submitted[-1].params.structured_outputs.grammar

    named = grammar(tool_choice={"type": "function", "function": {"name": "now"}})
    assert "weather" not in named
    assert ")*" not in named
    assert ")*" in grammar(tool_choice="required")
    assert ")*" not in grammar(tool_choice="required", parallel_tool_calls=False)
    assert "TEXT" in grammar()
    assert "TEXT" not in grammar(tool_choice="required")
    # A response format is for answers: it is an alternative to calls, and moot where a call is forced.
    assert "json_object" not in grammar(response_format={"type": "json_object"})
    assert "TEXT" not in grammar(response_format={"type": "json_object"})
    assert grammar(tool_choice="required", response_format={"type": "json_object"}) == grammar(tool_choice="required")


def test_none_leaves_the_tools_alone(server):
    answer = chat(server, tools=TOOLS, tool_choice="none")[1]
    assert answer["choices"][0]["message"]["content"] == ANSWER
    assert "tool_calls" not in answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert server.llm.submitted[-1].params.structured_outputs is None
    assert chat(server, tools=[], tool_choice="auto")[1]["choices"][0]["message"]["content"] == ANSWER


def test_stop_strings_leave_calls_alone(server):
    choice = chat(server, tools=TOOLS, stop=["é", "}"])[1]["choices"][0]
    assert [json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]] == [
        {"city": "Paris {é"},
        {},
    ]
    choice = chat(server, tools=TOOLS, stop=["look"])[1]["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me ", "stop")
    assert "tool_calls" not in choice["message"]
    server.llm.wait_idle()


REFUSALS = [
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "auto"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "x" * 129}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [NOW, {"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]},
        "tools[1].function.parameters",
    ),
    ({"tools": [NOW] * 129}, "tools"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "auto"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"store": True}, "store"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"messages": [USER, {"role": "tool", "tool_call_id": "x"}]}, "messages[1].content"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
    ({"messages": [{**USER, "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{}"}}]}]}, ...),
    ({"messages": [{**USER, "tool_call_id": "x"}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "["}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
]


@pytest.mark.parametrize(("fields", "param"), REFUSALS, ids=lambda v: json.dumps(v, default=str)[:50])
def test_refusals(server, fields, param):
    status, answer, _ = chat(server, **fields)
    assert status == 400, answer
    assert param is ... or answer["error"]["param"] == param, answer
    assert len(json.dumps(answer)) < 2048
    assert chat(server)[0] == 200
    server.llm.wait_idle()


def test_a_schema_that_cannot_be_enforced_is_loosened_where_nobody_asked_for_strictness(server):
    parameters = {"type": "object", "properties": {"a": {"not": {}}, "b": {"type": "integer"}}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert chat(server, tools=tools)[0] == 200
    grammar = server.llm.submitted[-1].params.structured_outputs.grammar
    assert '"not"' not in grammar
    assert '"b": {"type": "integer"}' in grammar
    assert '"required": ["a"]' in grammar


def test_what_schemas_tell_people_is_for_the_prompt_alone(server):
    """A hundred talkative tools make no large grammar; names of properties are not taken for remarks."""
    about = {"type": "string", "description": "words " * 500, "title": "T", "enum": ["a"]}
    properties = {"description": about, "title": {"type": "array", "items": about, "default": [1]}}
    function = {"parameters": {"type": "object", "properties": properties, "title": "x", "required": ["title"]}}
    tools = [{"type": "function", "function": function | {"name": f"f{i}"}} for i in range(100)]
    llm = FakeLLM(answer=ANSWER, max_model_len=10**6)
    llm.tokenizer.chat_template = HERMES
    with serving(llm) as roomy:
        assert chat(roomy, tools=tools)[0] == 200
    grammar = llm.submitted[-1].params.structured_outputs.grammar
    assert "words" not in grammar
    assert len(grammar) < 64 * 1024
    bare = {"type": "string", "enum": ["a"]}
    expected = {"description": bare, "title": {"type": "array", "items": bare}}
    assert json.dumps(expected) in grammar


def test_without_a_parser_tools_are_refused():
    with serving(fake(), tool_parser="none") as server:
        status, answer, _ = chat(server, tools=TOOLS)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert chat(server, tools=TOOLS, tool_choice="none")[0] == 200


def test_a_history_of_calls_reaches_the_template(server):
    history = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "noon"}], "name": "now"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Why?"},
    ]
    seen = {}
    server.llm.tokenizer.apply_chat_template = lambda messages, **options: seen.update(m=messages, o=options) or "x"
    try:
        assert chat(server, messages=history, tools=TOOLS)[0] == 200
        server.send("/tokenize", {"messages": history, "tools": TOOLS})
    finally:
        del server.llm.tokenizer.apply_chat_template
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": {}}}
    assert seen["m"] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "noon", "tool_call_id": "c1", "name": "now"},
        {"role": "assistant", "content": "No."},
        {"role": "user", "content": "Why?"},
    ]
    assert seen["o"]["tools"] == TOOLS


def test_a_template_without_tools_gets_them_in_words():
    with serving(fake(template="plain")) as server:
        call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
        history = [
            {"role": "system", "content": "Be kind."},
            USER,
            {"role": "assistant", "content": None, "tool_calls": [call, call | {"id": "c2"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "noon"},
            {"role": "tool", "tool_call_id": "c2", "content": "one"},
        ]
        choice = chat(server, messages=history, tools=TOOLS)[1]["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        text = prompt(server)
        assert text.startswith("<system>Be kind.\n\n")
        assert json.dumps(WEATHER["function"]) in text
        assert text.count('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>') == 2
        answers = "<tool_response>\nnoon\n</tool_response>\n<tool_response>\none\n</tool_response>"
        assert text.endswith(f"<user>{answers}<assistant>")
        assert chat(server, messages=[USER], tools=TOOLS)[0] == 200
        assert prompt(server).startswith("<system>You can call functions")
        assert chat(server, messages=[USER])[0] == 200
        assert prompt(server) == "<user>How is Paris?<assistant>"
        assert server.state.formats.report() == {"tool_parser": "json", "reasoning_parser": "none"}


@pytest.mark.parametrize(
    ("template", "tools", "thinking"),
    [
        ("hi", "json", "none"),
        ("{{ tools }}", "json", "none"),
        ("{{ tools }} <tool_call> <think></think>", "hermes", "think"),
        ("{{ tools }} <tool_call><function=x><parameter=y>", "qwen3_coder", "none"),
        ("{{ tools }} <tool_call><arg_key></think>", "glm", "think"),
        ("{{ tools }} [TOOL_CALLS]", "mistral_array", "none"),
        ("{{ tools }} [TOOL_CALLS][ARGS][THINK][/THINK]", "mistral", "mistral"),
        ("{{ tools }} <｜tool▁calls▁begin｜>```json </think>", "deepseek_v3", "think"),
        ("{{ tools }} <｜tool▁calls▁begin｜>", "deepseek_v31", "none"),
        ("{{ tools }} <|start_header_id|>{'name': ..., \"parameters\": ...}", "llama3", "none"),
    ],
)
def test_families_are_told_by_their_templates(template, tools, thinking):
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    report = choose_formats(tokenizer, "auto", "auto").report()
    assert report == {"tool_parser": tools, "reasoning_parser": thinking}
    for name in FAMILIES:
        assert choose_formats(tokenizer, name, "none").report()["tool_parser"] == name
    with pytest.raises(ValueError, match="tool_parser"):
        choose_formats(tokenizer, "klingon", "auto")


def test_without_a_tokenizer_there_are_no_formats():
    assert choose_formats(None, "auto", "auto").report() == {"tool_parser": "none", "reasoning_parser": "none"}


class SlowToCompile(FakeLLM):
    """Submitting a grammar takes a while, as compiling does."""

    def submit(self, prompt, params, **more) -> str:
        if params.structured_outputs is not None:
            self.submitting.set()
            assert self.go_on.wait(10)
        return super().submit(prompt, params, **more)


def test_compiling_holds_nobody_up_and_whoever_leaves_meanwhile_leaves_nothing():
    llm = SlowToCompile(answer="x" * 3000, max_model_len=4096, step_seconds=0.001)
    llm.submitting, llm.go_on = threading.Event(), threading.Event()
    with serving(llm) as server:
        body = json.dumps({"messages": [USER], "tools": TOOLS}).encode()
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            connection.sendall(head.encode() + body)
            assert llm.submitting.wait(10)
            begun = time.monotonic()
            assert server.send("/health")[0] == 200
            assert chat(server, max_tokens=3)[0] == 200
            assert time.monotonic() - begun < 5
        end = time.monotonic() + 10
        while server.state.channels and time.monotonic() < end:
            time.sleep(0.01)
        assert not server.state.channels, "the client has gone, and its request is still there"
        llm.go_on.set()
        while not llm.aborted and time.monotonic() < end:
            time.sleep(0.01)
        assert llm.aborted == [llm.submitted[-1].id]
        llm.wait_idle(10)
        assert not llm.submitted[-1].params.stop


# The official client.


class weather(BaseModel):
    """How the weather is."""

    city: str


def test_the_official_client_reads_calls(server):
    with server.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)
        calls = answer.choices[0].message.tool_calls
        assert [call.function.name for call in calls] == ["weather", "now"]
        again = [
            USER,
            answer.choices[0].message,
            *({"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in calls),
        ]
        assert client.chat.completions.create(model="tiny", messages=again, tools=TOOLS).choices


def test_the_official_client_parses_and_streams(server):
    tools = [openai.pydantic_function_tool(weather), NOW | {"function": {"name": "now", "strict": True}}]
    tools[1]["function"]["parameters"] = {"type": "object", "properties": {}, "additionalProperties": False}
    with server.client() as client:
        parsed = client.chat.completions.parse(model="tiny", messages=[USER], tools=tools)
        assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == weather(city="Paris {é")
        again = [USER, parsed.choices[0].message, {"role": "tool", "tool_call_id": "x", "content": "fine"}]
        assert client.chat.completions.create(model="tiny", messages=again, tools=tools).choices
        done = []
        with client.chat.completions.stream(
            model="tiny", messages=[USER], tools=tools, stream_options={"include_usage": True}
        ) as stream:
            done += [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            final = stream.get_final_completion()
        assert [event.name for event in done] == ["weather", "now"]
        assert done[0].parsed_arguments == weather(city="Paris {é")
        assert final.choices[0].message.content == "Let me look."
        assert final.usage.completion_tokens == len(ANSWER.encode())


class Answer(BaseModel):
    n: int


def test_the_official_client_parses_content():
    with serving(fake('{"n": 5}')) as server, server.client() as client:
        parsed = client.chat.completions.parse(model="tiny", messages=[USER], response_format=Answer)
        assert parsed.choices[0].message.parsed == Answer(n=5)
        assert server.llm.submitted[-1].params.structured_outputs.json
        with client.chat.completions.stream(model="tiny", messages=[USER], response_format=Answer) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == Answer(n=5)


def test_harmless_fields_pass(server):
    fields = {
        "store": False,
        "metadata": {"run": "5"},
        "service_tier": "auto",
        "safety_identifier": "me",
        "prompt_cache_key": "k",
        "modalities": ["text"],
        "verbosity": "medium",
        "functions": [],
        "function_call": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
    }
    assert chat(server, **fields)[0] == 200
