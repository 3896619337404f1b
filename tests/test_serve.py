"""The server, over real sockets and by the official client, on a fake engine."""

import asyncio
import contextlib
import io
import json
import threading
import time
from collections.abc import Iterator

import aiohttp
import openai
import pytest

import jaxserve
from tests.fake_llm import FakeLLM
from tests.serving import Server, events, serving

TEXT = "Hello, wörld! 😀"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found


def complete(server: Server, **fields):
    return server.send("/v1/completions", {"model": "tiny", "prompt": "Hi", "max_tokens": 100} | fields)


def chat(server: Server, **fields):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return server.send("/v1/chat/completions", body)


# The official client.


def test_completion_by_the_official_client(client):
    answer = client.completions.create(model="tiny", prompt="Hi", max_tokens=100)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, len(TEXT.encode()))
    assert answer.id.startswith("cmpl-")


def test_completion_defaults_to_sixteen_tokens(client):
    answer = client.completions.create(model="tiny", prompt="Hi", extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_chat_by_the_official_client(server, client):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}]
    answer = client.chat.completions.create(model="tiny", messages=messages)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == TEXT
    assert answer.usage.completion_tokens == len(TEXT.encode())
    job = server.llm.submitted[-1]
    assert bytes(job.prompt).decode() == "<system>S<user>U<assistant>"
    assert job.params.max_tokens is None


@pytest.mark.parametrize("n", [1, 3])
def test_chat_stream_by_the_official_client(client, n):
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        n=n,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == n * len(TEXT.encode())
    assert all(c.usage is None for c in chunks[:-1])
    for index in range(n):
        mine = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert [c.delta.role for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]
        assert "".join(c.delta.content or "" for c in mine) == TEXT


def test_completion_stream_by_the_official_client(client):
    chunks = list(client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=100, stream=True))
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert "".join(c.text for c in mine) == TEXT
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + ["stop"]


def test_models_by_the_official_client(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").max_model_len == 512
    with pytest.raises(openai.NotFoundError, match="nope"):
        client.models.retrieve("nope")


def test_errors_by_the_official_client(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="other/model", prompt="Hi")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "other/model" in caught.value.message
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"
    assert "600" in caught.value.message
    assert "512" in caught.value.message


# Shapes of the answer.


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["ab", "c"], [[97, 98], [99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_every_form_of_prompt(server, prompt, ids):
    before = len(server.llm.submitted)
    status, answer, _ = complete(server, prompt=prompt, n=2, echo=True, return_token_ids=True)
    assert status == 200
    assert [job.prompt for job in server.llm.submitted[before:]] == ids
    assert [c["index"] for c in answer["choices"]] == list(range(2 * len(ids)))
    assert [c["prompt_token_ids"] for c in answer["choices"]] == [p for p in ids for _ in range(2)]
    assert all(c["text"] == bytes(c["prompt_token_ids"]).decode() + TEXT for c in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in answer["choices"])


@pytest.mark.parametrize(
    "fields", [{}, {"echo": True}, {"logprobs": 2}, {"echo": True, "logprobs": 2}, {"max_tokens": 3}]
)
def test_a_stream_says_what_the_whole_answer_says(server, fields):
    fields = {"return_token_ids": True} | fields
    whole = complete(server, **fields)[1]
    chunks = events(complete(server, stream=True, stream_options={"include_usage": True}, **fields)[1])
    assert chunks.pop()["usage"] == whole["usage"]
    pieces = [c["choices"][0] for c in chunks]
    expected = whole["choices"][0]
    assert "".join(p["text"] for p in pieces) == expected["text"]
    assert [t for p in pieces for t in p["token_ids"]] == expected["token_ids"]
    assert pieces[-1]["finish_reason"] == expected["finish_reason"]
    if expected["logprobs"] is None:
        assert all(p["logprobs"] is None for p in pieces)
    else:
        for key, values in expected["logprobs"].items():
            assert [v for p in pieces if p["logprobs"] for v in p["logprobs"][key]] == values


def test_completion_logprobs(server):
    choice = complete(server, prompt="ab", echo=True, logprobs=1, max_tokens=10)[1]["choices"][0]
    found = choice["logprobs"]
    assert found["tokens"][:4] == ["a", "b", "H", "e"]
    assert found["tokens"][-2:] == ["bytes:\\xc3", "bytes:\\xb6"] or "bytes:\\xc3" in found["tokens"]
    assert found["token_logprobs"][:3] == [None, -0.25, -0.25]
    assert found["top_logprobs"][:3] == [None, {"b": -0.25}, {"H": -0.25}]
    assert found["text_offset"][:4] == [0, 1, 2, 3]
    assert {len(v) for v in found.values()} == {12}


def test_chat_logprobs(server):
    choice = chat(server, logprobs=True, top_logprobs=2, max_tokens=10)[1]["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 10
    assert content[0] == {
        "token": "H",
        "logprob": -0.25,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.25, "bytes": [72]},
            {"token": "I", "logprob": -1.25, "bytes": [73]},
        ],
    }
    assert chat(server, logprobs=True)[1]["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []
    assert chat(server)[1]["choices"][0]["logprobs"] is None


def test_scoring_a_prompt_without_generating(server):
    status, answer, _ = complete(server, prompt="abc", echo=True, logprobs=0, max_tokens=0)
    choice = answer["choices"][0]
    assert status == 200
    assert choice["text"] == "abc"
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.25]
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3}
    choice = complete(server, prompt="abc", prompt_logprobs=1)[1]["choices"][0]
    entry = {"98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}
    assert choice["prompt_logprobs"][:2] == [None, entry]
    assert complete(server, prompt="abc", echo=True, max_tokens=0)[1]["choices"][0]["text"] == "abc"


def test_every_sampling_field_reaches_the_engine(server):
    fields = {
        "n": 2,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1.5},
        "allowed_token_ids": [1, 2],
        "bad_words": ["x"],
        "min_tokens": 2,
        "max_tokens": 9,
        "ignore_eos": True,
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 3,
        "prompt_logprobs": 4,
    }
    assert complete(server, priority=5, user="me", **fields)[0] == 200
    job = server.llm.submitted[-1]
    assert job.priority == 5
    names = set(type(job.params).__dataclass_fields__) - {"echo"}
    assert names == set(fields)
    expected = fields | {"logit_bias": {5: 1.5}}
    for name in ("allowed_token_ids", "bad_words", "stop", "stop_token_ids"):
        expected[name] = tuple(fields[name])
    assert {name: getattr(job.params, name) for name in names} == expected
    del fields["logprobs"]
    assert chat(server, logprobs=True, top_logprobs=3, max_completion_tokens=9, **fields)[0] == 200
    assert {name: getattr(server.llm.submitted[-1].params, name) for name in names} == expected


def test_chat_template_options(server):
    def prompt(**fields) -> str:
        assert chat(server, **fields)[0] == 200
        return bytes(server.llm.submitted[-1].prompt).decode()

    assert prompt(add_generation_prompt=False) == "<user>Hi"
    assert prompt(continue_final_message=True) == "<user>Hi"
    assert prompt(chat_template_kwargs={"thinking": False}) == "<user>Hi[thinking]<assistant>"
    assert prompt(messages=[{"role": "developer", "content": "D", "name": None}]) == "<system>D<assistant>"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt(messages=[{"role": "user", "content": parts}]) == "<user>a\nb<assistant>"


def test_null_means_absent_but_for_max_tokens(server):
    assert complete(server, temperature=None, stop=None, logprobs=None, suffix=None, unheard_of=None)[0] == 200
    assert complete(server, max_tokens=None)[0] == 200
    assert server.llm.submitted[-1].params.max_tokens is None


def test_tokenize_and_detokenize(server):
    status, answer, _ = server.send("/tokenize", {"model": "tiny", "prompt": "aé", "return_token_strs": True})
    assert status == 200
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [97, 195, 169],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    assert server.send("/detokenize", {"tokens": [97, 195, 169]})[1] == {"prompt": "aé"}
    status, answer, _ = server.send("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert bytes(answer["tokens"]).decode() == "<user>x<assistant>"
    assert server.send("/detokenize", {"tokens": [999]})[0] == 400
    assert server.send("/tokenize", {"prompt": "a", "messages": []})[0] == 400


def test_small_routes(server):
    assert server.send("/health")[1]["status"] == "ok"
    assert server.send("/ready")[:2] == (200, {"status": "ready"})
    assert server.send("/ping")[0] == 200
    assert server.send("/ping", raw=b"")[0] == 200
    assert server.send("/version")[1] == {"version": jaxserve.__version__}
    assert server.send("/v1/engine/report")[1] == {"model": "tiny"}
    assert "jaxserve:num_requests_running" in server.send("/metrics")[1]
    status, answer, _ = server.send("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer, headers = server.send("/v1/completions")
    assert (status, answer["error"]["code"], headers["Allow"]) == (405, "method_not_allowed", "POST")


# Bad requests: the right status, a small error object that names the field, and the next request works.

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
    ({"prompt": {"a": 1}}, "prompt"),
    ({"suffix": "tail"}, "suffix"),
    ({"n": 1, "best_of": 2}, "best_of"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
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
    ({"messages": [{"role": "tool", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "Hi", "mood": "odd"}]}, "messages[0].mood"),
    ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "raise"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "prompt"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, "response_format.type"),
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
    ],
    ids=lambda raw: raw[:24],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
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


def test_unknown_fields_may_be_ignored():
    with serving(ignore_unknown_fields=True) as server:
        assert complete(server, unheard_of=1, stream_options={"odd": 1}, stream=True)[0] == 200
        assert chat(server, messages=[{"role": "user", "content": "Hi", "mood": 1}])[0] == 200
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
        posts = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
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


# Trouble.


def test_an_engine_error_is_a_500():
    with serving(FakeLLM(explode_at=0)) as server:
        status, answer, _ = complete(server)
        assert status == 500
        assert answer["error"] == {"message": "boom", "type": "server_error", "param": None, "code": "engine_error"}


@pytest.mark.parametrize("ask", [complete, chat])
def test_an_engine_error_amid_a_stream_is_an_event(ask):
    with serving(FakeLLM(explode_at=3)) as server:
        status, text, _ = ask(server, stream=True)
        found = events(text)
        assert status == 200
        assert found[-1]["error"]["message"] == "boom"
        assert all("error" not in event for event in found[:-1])
        assert len(found) >= 4
        with server.client() as client, pytest.raises(openai.APIError, match="boom"):
            list(client.completions.create(model="tiny", prompt="Hi", stream=True))


def test_a_full_queue_is_a_503_and_leaves_nothing_behind():
    with serving(FakeLLM(most=2)) as server:
        status, answer, headers = complete(server, prompt=["a", "b", "c"])
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "queue_full", "1")
        server.llm.wait_idle()
        assert complete(server, prompt=["a", "b"])[0] == 200


def test_no_text_without_a_tokenizer_but_token_ids_work():
    llm = FakeLLM()
    llm.tokenizer = None
    with serving(llm) as server:
        assert complete(server)[1]["error"]["code"] == "no_tokenizer"
        assert chat(server)[1]["error"]["code"] == "no_tokenizer"
        status, answer, _ = complete(server, prompt=[72], echo=True, logprobs=1, return_token_ids=True)
        assert status == 200
        assert bytes(answer["choices"][0]["token_ids"]).decode() == TEXT


def test_health_tells_stalled_from_idle_and_dead():
    llm = FakeLLM(step_seconds=0.05)
    with serving(llm, stall_seconds=10.0) as server:
        llm.state.seconds_since_progress = 1000.0
        assert server.send("/health")[:2][1]["status"] == "ok"

        async def stall():
            async with aiohttp.ClientSession() as session:
                body = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True, "stream": True}
                async with session.post(server.url + "/v1/completions", json=body) as reply:
                    await reply.content.readline()
                    async with session.get(server.url + "/health") as health:
                        return health.status, (await health.json())["status"]

        assert asyncio.run(stall()) == (503, "stalled")


def test_the_death_of_the_engine_ends_requests_and_health():
    llm = FakeLLM(step_seconds=0.05)
    with serving(llm) as server:
        timer = threading.Timer(0.3, lambda: setattr(llm.state, "alive", False))
        timer.start()
        status, answer, _ = complete(server, max_tokens=400, ignore_eos=True)
        timer.join()
        assert (status, answer["error"]["code"]) == (500, "engine_dead")
        assert server.send("/health")[0] == 503
        assert server.send("/ready")[0] == 503
        assert complete(server)[0] == 500


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_aborted(stream):
    llm = FakeLLM(step_seconds=0.01)
    with serving(llm) as server:

        async def leave():
            async with aiohttp.ClientSession() as session:
                body = {"prompt": ["a", "b"], "max_tokens": 400, "ignore_eos": True, "stream": stream}
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.3), session.post(server.url + "/v1/completions", json=body) as reply:
                        async for _ in reply.content:
                            pass

        asyncio.run(leave())
        llm.wait_idle(1.0)
        assert len(llm.aborted) == 2
        assert all(job.position < 200 for job in llm.submitted)
        assert complete(server, max_tokens=2)[0] == 200
        assert not server.state.channels
        assert server.state.idle.is_set()


def test_nothing_is_aborted_after_a_normal_end(server):
    before = len(server.llm.aborted)
    complete(server)
    complete(server, stream=True)
    chat(server, stream=True, n=2)
    assert len(server.llm.aborted) == before


def test_a_slow_reader_holds_up_nobody():
    llm = FakeLLM(step_seconds=0.0005, max_model_len=40_000)
    with serving(llm) as server:

        async def go():
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), limit=1024)
            body = json.dumps({"prompt": "Hi", "max_tokens": 30_000, "ignore_eos": True, "stream": True}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await reader.readline()
            start = time.monotonic()
            async with aiohttp.ClientSession() as session:
                for _ in range(5):
                    async with session.post(server.url + "/v1/completions", json={"prompt": "Hi"}) as reply:
                        assert (await reply.json())["usage"]["completion_tokens"] == 16
            writer.close()
            return time.monotonic() - start

        assert asyncio.run(go()) < 5
        llm.wait_idle()


def test_requests_side_by_side_keep_apart(server):
    async def go():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:

            async def one(i: int) -> tuple[str, int]:
                stream = await client.completions.create(
                    model="tiny", prompt=f"{i}", max_tokens=i, stream=True, echo=True
                )
                texts = [chunk.choices[0].text async for chunk in stream]
                return "".join(texts), i

            return await asyncio.gather(*(one(i) for i in range(1, 33)))

    for text, i in asyncio.run(go()):
        assert text == f"{i}" + TEXT.encode()[:i].decode(errors="replace")


def test_health_answers_while_a_huge_prompt_is_tokenized(server):
    async def go():
        async with aiohttp.ClientSession() as session:
            body = io.BytesIO(json.dumps({"prompt": "x" * 8_000_000}).encode())
            post = asyncio.create_task(session.post(server.url + "/v1/completions", data=body))
            worst = 0.0
            while not post.done():
                start = time.monotonic()
                async with session.get(server.url + "/health") as reply:
                    assert reply.status == 200
                worst = max(worst, time.monotonic() - start)
                await asyncio.sleep(0)
            reply = await post
            answer = await reply.json()
            return reply.status, answer["error"]["code"], worst

    status, code, worst = asyncio.run(go())
    assert (status, code) == (400, "context_length_exceeded")
    assert worst < 0.5  # 0.1 on a quiet machine
