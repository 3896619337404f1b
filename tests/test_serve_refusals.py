"""What the server refuses: the right status, a small error object that names the field, and the next request works."""

import asyncio
import json
from collections.abc import Iterator

import aiohttp
import openai
import pytest

from tests.fake_llm import FakeLLM
from tests.serving import Server, chat, complete, serving

TEXT = "Hello, wörld! 😀"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


BAD_COMPLETIONS = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1e12}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"seed": 2**70}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"1000": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"1": 10**400}}, None),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"stop_token_ids": [10**9], "min_tokens": 1}, "stop_token_ids"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 100}, "stop"),
    ({"min_tokens": 200}, "min_tokens"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [[1], "a"]}, "prompt"),
    ({"prompt": [[1.0]]}, "prompt"),
    ({"prompt": [999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"prompt": "x" * 512}, "prompt"),
    ({"prompt": ["a"] * 50, "n": 100}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"suffix": "tail"}, "suffix"),
    ({"n": 1, "best_of": 2, "stream": True}, "best_of"),
    ({"n": 1, "best_of": 0}, "best_of"),
    ({"best_of": 129}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": "all"}, "truncate_prompt_tokens"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "odd": 1}}},
        "response_format.json_schema.odd",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"max_token": 5}, "max_token"),
    ({"guided_json": {}}, "guided_json"),
    ({"model": 5}, "model"),
    ({"priority": 2**40}, "priority"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda v: json.dumps(v)[:40])
def test_bad_completion_requests(server, fields, param):
    check_refusal(server, complete(server, **fields), param)


BAD_CHATS = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [5]}, "messages[0]"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].tool_call_id"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"text": "Hi"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}] * 1025}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "Hi", "mood": "odd"}]}, "messages[0].mood"),
    (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({"messages": [{"role": "user", "content": "raise"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "unknown"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"functions": [{}]}, "functions"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_completion_tokens": 3, "max_tokens": 4}, "max_completion_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"prompt": "Hi"}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda v: json.dumps(v)[:40])
def test_bad_chat_requests(server, fields, param):
    check_refusal(server, chat(server, **fields), param)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b'{"prompt": NaN}',
        b'{"model": "tiny", "prompt": "Hi", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "Hi", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "Hi", "x": ' + b"1" * 10_000 + b"}",
        b'{"prompt": "Hi", "' + b"x" * 1_000_000 + b'": 1}',
        b'{"prompt": [' + b"-1," * 300_000 + b"1]}",
        b'{"prompt": "Hi", "stop": [' + b'"a",' * 300_000 + b'"b"]}',
        b'{"prompt": "Hi", "stop": {"' + b"x" * 1_000_000 + b'": 1}}',
        b"{" + b",".join(b'"f%d": 1' % i for i in range(10_000)) + b"}",
        b'{"prompt": "Hi", "x": [' + b"1," * 2_000_001 + b"1]}",
        b'{"prompt": "Hi", "x": {' + b",".join(b'"f%d":1' % i for i in range(250_001)) + b"}}",
        b'{"prompt": "Hi", "stream": true, "stream_options": {' + b",".join(b'"f%d":1' % i for i in range(300)) + b"}}",
    ],
    ids=lambda raw: raw[:24],
)
@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]
)
def test_malformed_bodies(server, path, raw):
    check_refusal(server, server.send(path, raw=raw), ...)


def check_refusal(server: Server, reply, param) -> None:
    """400, a small error object that names ``param`` (... for any), and an unharmed server."""
    status, answer, _ = reply
    assert status == 400, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert len(json.dumps(answer)) < 2048
    if param is not ...:
        assert param is None or answer["error"]["param"] == param, answer
    assert complete(server)[1]["choices"][0]["text"] == TEXT
    server.llm.wait_idle()


def test_a_misspelt_field_is_told_apart_from_an_unheard_of_one(server):
    message = complete(server, max_token=5)[1]["error"]["message"]
    assert message == "unknown field 'max_token' (did you mean 'max_tokens'?)"
    message = chat(server, guided_json={})[1]["error"]["message"]
    assert message == "unknown field 'guided_json' (did you mean 'structured_outputs'?)"
    message = server.send("/v1/responses", {"input": "Hi", "max_tokens": 5})[1]["error"]["message"]
    assert message == "unknown field 'max_tokens' (did you mean 'max_output_tokens'?)"
    message = chat(server, unheard_of=1)[1]["error"]["message"]
    assert message == "unknown field 'unheard_of'"
    message = complete(server, stream=True, stream_options={"q": 1})[1]["error"]["message"]
    assert message == "unknown field 'stream_options.q'", "a field is no misspelling of what it stands in"


def test_an_unknown_field_of_a_part_is_named(server):
    part = {"type": "text", "text": "a", "q": 1}
    items = [{"role": "user", "content": [part | {"q": None}, part]}]
    for path, body, param in (
        ("/v1/chat/completions", {"messages": items}, "messages[0].content[1].q"),
        ("/v1/responses", {"input": items}, "input[0].content[1].q"),
    ):
        reply = server.send(path, body)
        check_refusal(server, reply, param)
        assert reply[1]["error"]["code"] == "unknown_parameter"


def test_what_can_never_be_queued_is_no_matter_of_trying_again():
    with serving(FakeLLM(most=4)) as server:
        for send, fields, param in [
            (complete, {"prompt": ["a"] * 5}, "prompt"),
            (complete, {"n": 5}, "n"),
            (complete, {"best_of": 5}, "n"),
            (chat, {"n": 5}, "n"),
        ]:
            status, answer, _ = send(server, **fields)
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "too_many_completions")
        assert complete(server, n=4)[0] == 200


def test_unknown_fields_may_be_ignored():
    with serving(ignore_unknown_fields=True) as server:
        items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "odd": 1}], "odd": 1}]
        body = {"input": items, "text": {"odd": 1}, "odd": 1}
        assert server.send("/v1/responses", body)[0] == 200
        assert server.send("/v1/responses", body | {"store": True})[0] == 400
        assert complete(server, unheard_of=1, stream_options={"odd": 1}, stream=True)[0] == 200
        assert chat(server, messages=[{"role": "user", "content": "Hi", "mood": 1}])[0] == 200
        parts = [{"type": "text", "text": "Hi", "odd": 1}, {"type": "refusal", "refusal": "No.", "odd": 1}]
        assert chat(server, messages=[{"role": "user", "content": parts}])[0] == 200
        assert chat(server, messages=[{"role": "user", "content": [{"type": "image_url"}]}])[0] == 400
        assert complete(server, max_tokens="5")[0] == 400
        assert chat(server, tools=[{}])[0] == 400


def test_too_large_a_body():
    with serving(max_body_bytes=10_000) as server:
        status, answer, _ = complete(server, prompt="x" * 20_000)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")

        async def chunked():
            async def body():
                for _ in range(20):
                    yield b"x" * 1000

            async with (
                aiohttp.ClientSession() as session,
                session.post(server.url + "/v1/completions", data=body()) as reply,
            ):
                return reply.status, await reply.json()

        status, answer = asyncio.run(chunked())
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert complete(server)[0] == 200


def test_api_keys():
    with serving(api_key=("one", "two")) as server:
        for path in ("/health", "/ready", "/ping"):
            assert server.send(path)[0] == 200
        paths = ("/v1/models", "/v1/models/tiny", "/metrics", "/version", "/v1/engine/report", "/nothing")
        posts = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
        wrong = [{}, {"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": "Basic one"}]
        for headers in wrong:
            for path in paths:
                status, answer, got = server.send(path, headers=headers)
                assert (status, answer["error"]["type"]) == (401, "authentication_error")
                assert got["WWW-Authenticate"] == "Bearer"
            assert all(server.send(path, {}, headers=headers)[0] == 401 for path in posts)
        for key in ("one", "two"):
            with server.client(key) as client:
                assert client.completions.create(model="tiny", prompt="Hi", max_tokens=100).choices[0].text == TEXT
        with server.client("three") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()


def test_a_body_that_is_not_what_its_encoding_says(server):
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    status, answer, _ = server.send("/v1/completions", raw=b'{"prompt": "x"}', headers=headers)
    assert (status, answer["error"]["code"]) == (400, "unreadable_body")
    assert complete(server)[0] == 200
