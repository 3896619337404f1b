"""The server, over real sockets and by the official client, on a fake engine."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import jaxserve
from tests.fake_llm import FakeLLM
from tests.serving import Server, chat, complete, events, serving

TEXT = "Hello, wörld! 😀"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def client(server) -> Iterator[openai.OpenAI]:
    with server.client() as found:
        yield found


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
    "fields",
    [
        {},
        {"echo": True},
        {"logprobs": 2},
        {"echo": True, "logprobs": 2},
        {"echo": True, "logprobs": 2, "n": 3},
        {"max_tokens": 3},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 3, "prompt_logprobs": 1, "n": 2, "prompt": ["ab", "cde"]},
        {"n": 2, "best_of": 2},
    ],
)
def test_a_stream_says_what_the_whole_answer_says(server, fields):
    fields = {"return_token_ids": True} | fields
    whole = complete(server, **fields)[1]
    chunks = events(complete(server, stream=True, stream_options={"include_usage": True}, **fields)[1])
    assert chunks.pop()["usage"] == whole["usage"]
    assert len(whole["choices"]) == len({c["choices"][0]["index"] for c in chunks})
    for expected in whole["choices"]:
        pieces = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == expected["index"]]
        assert "".join(p["text"] for p in pieces) == expected["text"]
        assert [t for p in pieces for t in p["token_ids"]] == expected["token_ids"]
        assert pieces[-1]["finish_reason"] == expected["finish_reason"]
        assert pieces[0].get("prompt_logprobs") == expected.get("prompt_logprobs")
        if expected["logprobs"] is None:
            assert all(p["logprobs"] is None for p in pieces)
        else:
            for key, values in expected["logprobs"].items():
                assert [v for p in pieces if p["logprobs"] for v in p["logprobs"][key]] == values


def test_usage_so_far_stands_in_every_chunk_where_asked_for(server):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(complete(server, stream=True, stream_options=options)[1])
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == len(TEXT.encode())
    assert chunks[0]["usage"]["total_tokens"] == chunks[0]["usage"]["prompt_tokens"] + counts[0]
    del options["include_usage"]
    chunks = events(complete(server, stream=True, stream_options=options)[1])
    assert all(chunk["usage"] and chunk["choices"] for chunk in chunks)


def test_best_of_picks_the_likeliest_and_counts_them_all():
    """The fake gives completion i a log-probability of -0.25 - i % 3 a token: 0 and 3 are the best of five."""
    with serving() as server:
        server.llm.worse = True
        answer = complete(server, n=2, best_of=5, logprobs=0, return_token_ids=True)[1]
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert [set(c["logprobs"]["token_logprobs"]) for c in answer["choices"]] == [{-0.25}, {-0.25}]
        assert answer["usage"]["completion_tokens"] == 5 * len(TEXT.encode())
        answer = complete(server, n=4, best_of=5)[1]
        assert all(c["logprobs"] is None for c in answer["choices"])
        assert server.llm.submitted[-1].params.n == 5


class Uneven(FakeLLM):
    """The second completion of every request ends after two tokens."""

    def submit(self, prompt, params, *, on_delta, priority=0, cache_salt=""):
        tokens = 0

        def uneven(delta):
            nonlocal tokens
            if delta.index == 1:
                tokens += 1
                if tokens > 2:
                    delta = dataclasses.replace(delta, token_ids=(), text="", logprobs=(), finish_reason=None)
            on_delta(delta)

        return super().submit(prompt, params, on_delta=uneven, priority=priority, cache_salt=cache_salt)


def test_best_of_picks_by_the_mean_and_not_by_the_sum():
    """Two tokens of -1.25 each are less likely than an answer of -0.25 each, though their sum is higher."""
    with serving(Uneven(worse=True)) as server:
        both = complete(server, n=2, logprobs=0)[1]["choices"]
        long, short = (choice["logprobs"]["token_logprobs"] for choice in both)
        assert (set(long), short) == ({-0.25}, [-1.25, -1.25])
        assert sum(short) > sum(long)
        assert complete(server, n=1, best_of=2)[1]["choices"][0]["text"] == TEXT


def test_truncation_keeps_the_end_and_says_so(server):
    def ask(keep, **fields):
        fields = {"prompt": "abcdef", "echo": True, "truncate_prompt_tokens": keep} | fields
        status, answer, _ = complete(server, **fields)
        assert status == 200, answer
        return answer["choices"][0]["text"].removesuffix(TEXT), answer["truncated_prompt_tokens"]

    assert ask(2) == ("ef", 4)
    assert ask(6) == ("abcdef", 0)
    assert ask(-1) == ("abcdef", 0)
    assert ask(-1, prompt="x" * 510 + "yz", max_tokens=100) == ("x" * 410 + "yz", 100)
    assert ask(1, prompt=["ab", "cde"]) == ("b", 3)
    assert "truncated_prompt_tokens" not in complete(server)[1]
    chunks = events(complete(server, prompt="abc", truncate_prompt_tokens=2, stream=True)[1])
    assert {chunk["truncated_prompt_tokens"] for chunk in chunks} == {1}
    answer = chat(server, truncate_prompt_tokens=12)[1]
    assert bytes(server.llm.submitted[-1].prompt).decode() == "i<assistant>"
    assert answer["truncated_prompt_tokens"] == len("<user>H")
    assert answer["usage"]["prompt_tokens"] == 12


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
    assert [answer["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")] == [3, 0, 3]
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
        "watermarking": False,
    }
    assert complete(server, priority=5, user="me", **fields)[0] == 200
    job = server.llm.submitted[-1]
    assert job.priority == 5
    names = set(type(job.params).__dataclass_fields__) - {"echo", "structured_outputs", "keep_special_ids"}
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
    assert server.send("/tokenize", {"prompt": "a", "messages": None})[1]["token_strs"] is None
    assert server.send("/detokenize", {"tokens": [97, 195, 169]})[1] == {"prompt": "aé"}
    status, answer, _ = server.send("/tokenize", {"messages": [{"role": "user", "content": "x"}]})
    assert bytes(answer["tokens"]).decode() == "<user>x<assistant>"
    assert server.send("/detokenize", {"tokens": [999]})[0] == 400
    assert server.send("/tokenize", {"prompt": "a", "messages": []})[0] == 400


@pytest.mark.parametrize("piece", [1, 7, 400])
def test_many_tokens_are_written_in_pieces(server, monkeypatch, piece):
    monkeypatch.setattr("serve.tokens.PIECE", piece)
    text = 'é"\\' * 100
    answer = server.send("/tokenize", {"prompt": text, "return_token_strs": True})[1]
    assert answer["tokens"] == list(text.encode())
    assert answer["count"] == len(answer["token_strs"]) == 400
    assert answer["token_strs"][2:4] == ['"', "\\"]


def test_small_routes(server):
    assert server.send("/health")[1]["status"] == "ok"
    assert server.send("/ready")[:2] == (200, {"status": "ready"})
    assert server.send("/ping")[0] == 200
    assert server.send("/ping", raw=b"")[0] == 200
    assert server.send("/version")[1] == {"version": jaxserve.__version__}
    report = {"model": "tiny", "tool_parser": "json", "reasoning_parser": "none"}
    assert server.send("/v1/engine/report")[1] == report
    assert "jaxserve:num_requests_running" in server.send("/metrics")[1]
    status, answer, _ = server.send("/v1/nothing")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    status, answer, headers = server.send("/v1/completions")
    assert (status, answer["error"]["code"], headers["Allow"]) == (405, "method_not_allowed", "POST")


def test_load_counts_the_requests_under_way_and_not_their_prompts():
    def load() -> tuple[int, int]:
        answer = server.send("/load")[1]
        return answer["server_load"], answer["running"]

    def reached(wanted: tuple[int, int]) -> None:
        end = time.monotonic() + 10
        while (found := load()) != wanted:
            assert time.monotonic() < end, found
            time.sleep(0.01)

    with serving(FakeLLM(step_seconds=0.01)) as server, ThreadPoolExecutor(3) as pool:
        assert load() == (0, 0)
        fields = {"max_tokens": 200, "ignore_eos": True}
        asked = [pool.submit(complete, server, prompt=["a", "b"], **fields)]
        reached((1, 2))
        asked += [pool.submit(complete, server, stream=True, **fields), pool.submit(chat, server, **fields)]
        reached((3, 4))
        assert not any(one.done() for one in asked)
        assert [one.result()[0] for one in asked] == [200] * 3
        reached((0, 0))
