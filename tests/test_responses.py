"""``/v1/responses``: items in and out, typed events, by the official client and by hand, on a fake engine."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from jaxserve.request import TokenLogprob
from serve.answer import Step
from serve.errors import ApiError
from serve.protocol.responses import ResponsesRequest
from serve.response_input import conversation
from serve.response_output import Response
from serve.turn import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin
from tests.fake_llm import FakeLLM
from tests.serving import Server, complete, serving

TEXT = "Hello, wörld! 😀"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found


@pytest.fixture(scope="module")
def document(server) -> dict[str, Any]:
    return server.send("/openapi.json")[1]


def ask(server: Server, **fields):
    return server.send("/v1/responses", {"model": "tiny", "input": "Hi"} | fields)


def prompt(server: Server) -> str:
    return bytes(server.llm.submitted[-1].prompt).decode()


def read(text: str) -> list[dict[str, Any]]:
    """The events of a stream: each with its name on a line of its own, numbered from 0, and no [DONE] at the end."""
    assert text.endswith("\n\n")
    found = []
    for block in text[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


# The official client.


def test_create_by_the_official_client(server, client):
    answer = client.responses.create(
        model="tiny", input="Hi", instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, max_output_tokens=100
    )
    assert answer.output_text == TEXT
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.metadata == {"a": "b"}
    assert answer.usage.output_tokens == len(TEXT.encode())
    assert answer.usage.input_tokens == len(server.llm.submitted[-1].prompt)
    assert prompt(server) == "<system>Be brief.<user>Hi<assistant>"
    params = server.llm.submitted[-1].params
    assert (params.temperature, params.max_tokens, params.n) == (0.5, 100, 1)


def test_events_by_the_official_client(client):
    kinds = [event.type for event in client.responses.create(model="tiny", input="Hi", stream=True)]
    text = "response.output_text."
    assert kinds[:5] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        text + "delta",
    ]
    assert kinds[-4:] == [
        text + "done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[5:-4]) == {text + "delta"}


def test_stream_by_the_official_client(client):
    with client.responses.stream(model="tiny", input="Hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT


class Answer(pydantic.BaseModel):
    name: str
    age: int


def test_parse_by_the_official_client():
    with serving(FakeLLM(answer='{"name": "Ada", "age": 36}')) as server, server.client() as client:
        answer = client.responses.parse(model="tiny", input="Who?", text_format=Answer)
        assert answer.output_parsed == Answer(name="Ada", age=36)
        wanted = server.llm.submitted[-1].params.structured_outputs
        assert wanted.json["required"] == ["name", "age"]
        with client.responses.stream(model="tiny", input="Who?", text_format=Answer) as stream:
            assert stream.get_final_response().output_parsed == Answer(name="Ada", age=36)


def test_an_answer_may_go_back_in(server, client):
    first = client.responses.create(model="tiny", input="Hi")
    items = [{"role": "user", "content": "Hi"}, *first.output, {"role": "user", "content": "And?"}]
    client.responses.create(model="tiny", input=items)
    assert prompt(server) == f"<user>Hi<assistant>{TEXT}<user>And?<assistant>"


# Items in.


def test_items_become_messages():
    items = [
        {"role": "developer", "content": "D"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": ""},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "one"}]},
        {"role": "assistant", "content": "d"},
    ]

    def call(id: str, name: str, **arguments: Any) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    found = conversation(ResponsesRequest.model_validate({"input": items, "instructions": "I"}))
    assert found.messages == [
        {"role": "system", "content": "I"},
        {"role": "system", "content": "D"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "c",
            "tool_calls": [call("1", "f", x=1), call("2", "g")],
        },
        {"role": "tool", "tool_call_id": "2", "name": "g", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "name": "f", "content": "one"},
        {"role": "assistant", "content": "d"},
    ]


def test_options_reach_the_conversation():
    tool = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    body = {
        "input": "x",
        "tools": [tool],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        "chat_template_kwargs": {"a": 1},
    }
    found = conversation(ResponsesRequest.model_validate(body))
    function = {name: value for name, value in tool.items() if name != "type"}
    assert list(found.tools) == [{"type": "function", "function": function}]
    assert (found.tool_choice, found.parallel_tool_calls, found.reasoning_effort) == ("f", False, "low")
    assert found.structured_outputs.json == {"type": "object"}
    assert found.structured_field == "text.format.schema"
    assert found.template_options["a"] == 1


# Items out.


def grow(parts: list[list[Part]], *, reason: str = "stop", **fields: Any) -> tuple[list[dict[str, Any]], dict]:
    """Events and response for an answer of these parts, one token a step."""
    llm = FakeLLM()
    with serving(llm) as server:
        body = ResponsesRequest.model_validate({"input": "x"} | fields)
        response = Response(server.state, body, 3)
        events = response.begin()
        for number, some in enumerate(parts):
            token = (TokenLogprob(65 + number, -0.5, 1),)
            thought = int(any(isinstance(part, Reasoning) for part in some))
            end = reason if number == len(parts) - 1 else None
            step = Step(0, some, (65 + number,), token, reasoning_tokens=thought, finish_reason=end)
            events += response.add(step)
    return events, response.value


EVERYTHING: list[list[Part]] = [
    [Reasoning("I ")],
    [Reasoning("think")],
    [],
    [Text("So"), Text(" it")],
    [Text(" is."), ToolCallBegin(0, "call_1", "f"), ToolCallArguments(0, "{")],
    [ToolCallArguments(0, '"x": 1}')],
    [ToolCallBegin(1, "call_2", "g"), ToolCallArguments(1, "{}")],
    [],
]


def test_everything_an_answer_may_hold(document):
    events, response = grow(EVERYTHING, reason="tool_calls")
    content = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]
    schema = content["text/event-stream"]["schema"]["properties"]["data"]["contentSchema"]
    check = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    for event in events:
        check.validate(event)
    items = response["output"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "I think"}]
    assert items[1]["content"][0]["text"] == "So it is."
    assert [(i["call_id"], i["name"], i["arguments"]) for i in items[2:]] == [
        ("call_1", "f", '{"x": 1}'),
        ("call_2", "g", "{}"),
    ]
    assert {item["status"] for item in items} == {response["status"]} == {"completed"}
    assert response["usage"]["output_tokens"] == len(EVERYTHING)
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert events[-1]["response"] == response
    assert events[0]["response"]["output"] == []


def test_events_add_up_to_the_items():
    """Whoever only listens ends up with the same items; each item's events come together, and it is closed once."""
    events, response = grow(EVERYTHING)
    built: list[dict[str, Any]] = []
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(built)
            assert all(item["status"] == "completed" for item in built)
            built.append(event["item"])
        elif kind == "output_item.done":
            assert event["item"] == built[-1] | {"status": "completed"}
            built[-1] = event["item"]
        else:
            assert (event["output_index"], event["item_id"]) == (len(built) - 1, built[-1]["id"])
            if kind == "content_part.added":
                built[-1]["content"].append(event["part"])
            elif kind == "content_part.done":
                assert built[-1]["content"][-1] == event["part"]
            elif kind == "function_call_arguments.delta":
                built[-1]["arguments"] += event["delta"]
            elif kind.endswith(".delta"):
                built[-1]["content"][0]["text"] += event["delta"]
                built[-1]["content"][0].get("logprobs", []).extend(event.get("logprobs", ()))
            elif kind == "function_call_arguments.done":
                assert built[-1]["arguments"] == event["arguments"]
            else:
                assert built[-1]["content"][0]["text"] == event["text"]
    assert built == response["output"]


def test_log_probabilities_go_with_the_text_and_none_is_lost():
    parts: list[list[Part]] = [[Reasoning("r")], [], [Text("a")], [], [Text("é")], []]
    _, response = grow(parts, include=["message.output_text.logprobs"])
    found = response["output"][1]["content"][0]["logprobs"]
    assert [entry["token"] for entry in found] == ["B", "C", "D", "E", "F"]
    assert grow(parts)[1]["output"][1]["content"][0]["logprobs"] == []


def test_an_answer_without_text_is_an_empty_message():
    events, response = grow([[]])
    assert response["output"][0]["content"][0]["text"] == ""
    assert [event["type"] for event in events].count("response.output_item.done") == 1


def test_an_answer_cut_short_says_so():
    _, response = grow([[Text("a")]], reason="length")
    assert (response["status"], response["output"][0]["status"]) == ("incomplete", "incomplete")
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


def test_whole_and_streamed_answers_are_the_same(server):
    extra = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 12}
    whole = ask(server, **extra)[1]
    events = read(ask(server, stream=True, **extra)[1])
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.incomplete"
    for item in (whole["output"][0], last["output"][0]):
        item.pop("id")
    volatile = ("id", "created_at", "completed_at")
    assert {k: v for k, v in whole.items() if k not in volatile} == {k: v for k, v in last.items() if k not in volatile}
    assert len(whole["output"][0]["content"][0]["logprobs"]) == 12


def test_a_failure_after_the_beginning_is_an_event():
    with serving(FakeLLM(explode_at=3)) as server:
        events = read(ask(server, stream=True)[1])
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"] == {"code": "engine_error", "message": "boom"}
        status, answer, _ = ask(server)
        assert (status, answer["error"]["code"]) == (500, "engine_error")


# Refusals.

CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
BAD = [
    ({"input": None}, "input"),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": {}}, "input"),
    ({"input": "x" * 600}, "input"),
    ({"input": [5]}, "input[0]"),
    ({"input": ["x"]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user"}]}, "input[0].content"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
    ({"input": [CALL | {"arguments": "{"}]}, "input[0].arguments"),
    ({"input": [CALL | {"arguments": "[]"}]}, "input[0].arguments"),
    ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    ({"input": "raise"}, "input"),
    ({"messages": []}, "messages"),
    ({"n": 2}, "n"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": "5"}, "max_output_tokens"),
    ({"temperature": 101}, "temperature"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
    ({"include": ["file_search_call.results"]}, "include[0]"),
    ({"store": True}, "store"),
    ({"store": "no"}, "store"),
    ({"background": 0}, "background"),
    ({"background": True}, "background"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "x"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": {}}, "tools"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"reasoning": "low"}, "reasoning"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=lambda value: json.dumps(value)[:40])
def test_refusals_name_the_field(server, fields, param):
    status, answer, _ = ask(server, **fields)
    assert status == 400, answer
    assert answer["error"]["param"] == param, answer
    assert len(json.dumps(answer)) < 2048
    assert complete(server)[0] == 200
    server.llm.wait_idle()


def test_what_asks_for_nothing_is_taken(server):
    fields = {
        "store": False,
        "background": False,
        "truncation": "disabled",
        "service_tier": "auto",
        "previous_response_id": None,
        "include": ["reasoning.encrypted_content"],
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "user": "me",
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "tools": [],
        "tool_choice": "auto",
    }
    status, answer, _ = ask(server, **fields)
    assert status == 200, answer
    assert answer["store"] is False


def test_errors_of_other_kinds_keep_their_status(server):
    status, answer, _ = ask(server, model="other")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


def test_an_error_in_the_middle_has_an_error_of_its_own():
    llm = FakeLLM()
    with serving(llm) as server:
        response = Response(server.state, ResponsesRequest(input="x"), 1)
        response.begin()
        response.add(Step(0, [Text("a")]))
        (event,) = response.fail(ApiError(504, "too late", code="deadline_exceeded"))
    assert event["response"]["error"] == {"code": "deadline_exceeded", "message": "too late"}
    assert event["response"]["output"][0]["content"][0]["text"] == "a"
