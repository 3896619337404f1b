"""Operators' cases (``test_operator_cases``) about what comes out: text, stop strings, scores, draws, calls.

Texts are put into a random model's mouth by ``structured_outputs.choice``.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.completion import Completion

import jaxserve
from tests.fake_llm import FakeLLM
from tests.operator_oracle import at_rest, well
from tests.serving import Server, events, serving

CONTEXT = 256


@pytest.fixture(scope="module")
def server(llm: jaxserve.LLM) -> Iterator[Server]:
    with serving(llm, close_llm=False) as found:
        yield found
        at_rest(found)


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """The first choice of a completion."""
    status, answer, _ = server.send("/v1/completions", {"prompt": "Hi", "temperature": 0} | fields)
    assert status == 200, answer
    return answer["choices"][0] | {"usage": answer["usage"]}


def pieces(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of a stream, each with its ``text``."""
    status, answer, _ = server.send(path, body | {"stream": True})
    assert status == 200, answer
    found = [choice for event in events(answer) for choice in event["choices"]]
    return [one | {"text": one["text"] if "text" in one else one["delta"].get("content") or ""} for one in found]


def saying(text: str, chat: bool, **fields: Any) -> tuple[str, dict[str, Any]]:
    """A request whose answer is ``text`` before stop strings."""
    body = {"structured_outputs": {"choice": [text]}, "max_tokens": len(text.encode()) + 1} | fields
    if chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": "Hi"}]}
    return "/v1/completions", body | {"prompt": "Hi"}


@pytest.mark.parametrize("chat", [False, True])
def test_no_half_characters(server: Server, chat: bool) -> None:
    """Case 2: a token is a byte here, and a character up to four of them."""
    text = "😀ď漢 👩‍👩‍👧 é́ 🇫🇷 ﷽"
    found = [one["text"] for one in pieces(server, *saying(text, chat))]
    assert "".join(found) == text
    assert len([piece for piece in found if piece]) > 5
    assert not any("\ufffd" in piece for piece in found)


@pytest.mark.parametrize("chat", [False, True])
def test_chunks_are_as_the_official_client_types_them(server: Server, chat: bool) -> None:
    """Case 8: one id and time for all; the role once; no finish reason before the last, and never an empty one."""
    path, body = saying("abc", chat, n=2, stream=True, stream_options={"include_usage": True})
    found = events(server.send(path, body)[1])
    kind: Any = ChatCompletionChunk if chat else Completion
    if chat:
        for event in found:
            kind.model_validate(event, strict=True)
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in found}) == 1
    assert found[-1]["choices"] == []
    assert all(event["usage"] is None for event in found[:-1])
    for index in range(2):
        mine = [one for event in found for one in event["choices"] if one["index"] == index]
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["stop"]
        if chat:
            assert [one["delta"].get("role") for one in mine] == ["assistant"] + [None] * (len(mine) - 1)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("said", "stop", "sent"),
    [
        ("xx DEFGHI yy", ["DEFGHIJ"], "xx DEFGHI yy"),
        ("xx DEFGHIJ yy", ["DEFGHIJ"], "xx "),
        ("DEFDEFGHIJ", ["DEFGHIJ"], "DEF"),
        ("abc DEFG", ["DEFGHIJ"], "abc DEFG"),
        ("é😀 stop😀 x", ["stop😀"], "é😀 "),
    ],
)
def test_nothing_of_a_stop_string_is_sent(server: Server, chat: bool, said: str, stop: list[str], sent: str) -> None:
    """Case 10: not even its beginning; what only looked like one comes in the end."""
    path, body = saying(said, chat, stop=stop)
    found = pieces(server, path, body)
    assert "".join(one["text"] for one in found) == sent
    assert found[-1]["finish_reason"] == "stop"
    assert found[-1]["stop_reason"] == (stop[0] if sent != said else None)


@pytest.mark.parametrize("chat", [False, True])
def test_nothing_is_sent_twice(server: Server, chat: bool) -> None:
    """Case 12: several stop strings that partly match."""
    for said, stop, sent in (
        (" Alice!", ["\n", "Alice:"], " Alice!"),
        (" Alice: hi", ["\n", "Alice:"], " "),
        ("aab aac\n", ["aaa", "aab ab", "\n\n"], "aab aac\n"),
        ("<<<|<|e|>", ["<|end|>", "<|e|x"], "<<<|<|e|>"),
    ):
        found = pieces(server, *saying(said, chat, stop=stop))
        assert "".join(one["text"] for one in found) == sent


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("by", ["string", "token"])
def test_what_stopped_it_is_the_same_by_every_path(server: Server, by: str, include: bool) -> None:
    """Case 14: text and reason, streamed or whole, as completion or chat."""
    wish: dict[str, Any] = {"stop": ["q", "##"]} if by == "string" else {"stop_token_ids": [ord("#")]}
    for chat in (False, True):
        path, body = saying("abc##def", chat, include_stop_str_in_output=include, return_token_ids=True, **wish)
        whole = server.send(path, body)[1]["choices"][0]
        text = whole["message"]["content"] if chat else whole["text"]
        streamed = pieces(server, path, body)
        shown = ("##" if by == "string" else "#") if include else ""
        assert text == "".join(one["text"] for one in streamed) == "abc" + shown
        assert whole["finish_reason"] == streamed[-1]["finish_reason"] == "stop"
        assert whole["stop_reason"] == streamed[-1]["stop_reason"] == ("##" if by == "string" else ord("#"))
        ids = [token for one in streamed for token in one.get("token_ids", ())]
        assert ids == whole["token_ids"] == list(b"abc##" if by == "string" else b"abc#")


def score(server: Server, prompt: str) -> list[float]:
    found = complete(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1)["logprobs"]
    return found["token_logprobs"][1:]


def test_scores_do_not_depend_on_their_order(server: Server) -> None:
    """Case 18: prompts that share beginnings, one after another in both orders, and at once."""
    prompts = ["The cat", "The cat sat on", "The cat sat on the mat " * 4, "The dog", "The cat sat on the mat " * 8]
    first = [score(server, prompt) for prompt in prompts]
    second = [score(server, prompt) for prompt in reversed(prompts)][::-1]
    with ThreadPoolExecutor(5) as pool:
        together = list(pool.map(lambda prompt: score(server, prompt), prompts))
    for one, other, third in zip(first, second, together, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
        assert one == pytest.approx(third, abs=1e-4)
    assert first[2] == pytest.approx(first[4][: len(first[2])], abs=1e-4)


def test_log_probabilities_are_the_models_own(server: Server) -> None:
    """Case 22: of the raw logits, whatever the temperature, penalties, biases and truncation; as a prompt's are."""
    plain = complete(server, max_tokens=1, logprobs=5)["logprobs"]
    for fields in (
        {"temperature": 0.5, "seed": 1},
        {"temperature": 1.7, "top_p": 0.3, "seed": 2},
        {"logit_bias": {"100": 100}},
        {"logit_bias": {"100": -100}, "presence_penalty": 2, "repetition_penalty": 5},
        {"top_k": 1, "temperature": 1},
    ):
        found = complete(server, max_tokens=1, logprobs=5, return_token_ids=True, **fields)
        top = found["logprobs"]["top_logprobs"][0]
        if "100" in fields.get("logit_bias", {}) and fields["logit_bias"]["100"] > 0:  # type: ignore[attr-defined]
            assert found["token_ids"] == [100]
        assert {k: top[k] for k in plain["top_logprobs"][0]} == pytest.approx(plain["top_logprobs"][0], abs=1e-4)
        (token,) = found["token_ids"]
        scored = complete(server, prompt=[*b"Hi", token], max_tokens=0, echo=True, logprobs=0)["logprobs"]
        assert scored["token_logprobs"][-1] == pytest.approx(found["logprobs"]["token_logprobs"][0], abs=1e-4)


def test_a_seed_gives_the_same_in_any_company(server: Server) -> None:
    """Case 24: a seeded row whose neighbours truncate, are greedy, or have penalties."""
    mine = {"temperature": 1, "seed": 7, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    alone = complete(server, **mine)["token_ids"]
    company = (
        {"top_p": 0.9, "temperature": 1},
        {"temperature": 0},
        {"top_k": 3, "temperature": 1, "repetition_penalty": 1.5},
    )
    for other in company:
        with ThreadPoolExecutor(4) as pool:
            others = [pool.submit(complete, server, max_tokens=60, ignore_eos=True, **other) for _ in range(3)]
            found = complete(server, **mine)["token_ids"]
            for one in others:
                one.result()
        assert found == alone


def test_no_top_k_is_not_one(server: Server) -> None:
    """Case 26: draws at a high temperature differ where nothing truncates them."""
    for fields in ({}, {"top_k": -1}, {"top_k": 0}):
        body = {"prompt": "Hi", "temperature": 1.5, "n": 32, "max_tokens": 1, "return_token_ids": True} | fields
        status, answer, _ = server.send("/v1/completions", body)
        assert status == 200, answer
        assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) > 8
    body |= {"top_k": 1}
    choices = server.send("/v1/completions", body)[1]["choices"]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 1


def test_a_penalty_has_an_effect(server: Server) -> None:
    """Case 28: more of a penalty, less repetition, by every path that chooses a token."""
    body = {"max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "prompt": "ab" * 20}

    def most(**fields: Any) -> int:
        return Counter(complete(server, **body, **fields)["token_ids"]).most_common(1)[0][1]

    for more in ({}, {"temperature": 1, "seed": 3, "top_k": 4}):
        assert most(repetition_penalty=30, **more) < most(**more)
        assert most(presence_penalty=2, frequency_penalty=2, **more) <= most(**more)


def test_as_many_as_the_best_of_may_be_streamed(server: Server) -> None:
    """Case 32."""
    found = pieces(server, "/v1/completions", {"prompt": "Hi", "n": 2, "best_of": 2, "max_tokens": 3})
    assert {one["index"] for one in found} == {0, 1}


def test_max_tokens_that_are_fine(server: Server) -> None:
    """Case 34: null goes to the context's end, absent means 16, 0 scores."""
    prompt = {"prompt": "x" * 200, "ignore_eos": True}
    assert complete(server, max_tokens=None, **prompt)["usage"]["total_tokens"] == CONTEXT
    assert complete(server, **prompt)["usage"]["completion_tokens"] == 16
    assert complete(server, max_tokens=0, echo=True, **prompt)["text"] == prompt["prompt"]
    body = {"messages": [{"role": "user", "content": "x" * 200}], "ignore_eos": True}
    for fields in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
        answer = server.send("/v1/chat/completions", body | fields)[1]
        assert answer["usage"]["total_tokens"] == CONTEXT


def test_more_tokens_than_fit_are_cut_and_it_says_so(server: Server) -> None:
    """Case 36: the policy is to cap, and to finish with "length"."""
    found = complete(server, prompt="x" * (CONTEXT - 10), max_tokens=100, ignore_eos=True)
    assert (found["usage"]["completion_tokens"], found["finish_reason"]) == (10, "length")
    body = {"messages": [{"role": "user", "content": "x" * 200}], "max_completion_tokens": 10**9, "ignore_eos": True}
    answer = server.send("/v1/chat/completions", body)[1]
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_message_may_hold_content_and_calls(server: Server) -> None:
    """Case 46: what templates elsewhere fell over."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for content in ("so", "", None, [{"type": "text", "text": "so"}]):
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ]
        status, answer, _ = server.send("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
        assert status == 200, answer
    well(server)


def test_a_description_changes_nothing(server: Server) -> None:
    """Case 64."""
    said = []
    for about in ("x", "y" * 500, "{}\n\\"):
        asked = {"type": "object", "properties": {"a": {"type": "integer", "description": about}}, "required": ["a"]}
        asked |= {"description": about, "additionalProperties": False}
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 40, "temperature": 0}
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": asked}}
        status, answer, _ = server.send("/v1/chat/completions", body)
        assert status == 200, answer
        said.append(answer["choices"][0]["message"]["content"])
    assert len(set(said)) == 1


@pytest.mark.parametrize("arguments", [{}, {"cmd": "mkdir {a,b"}, {"cmd": '"}]}\\"', "more": [{"x": "}"}]}], ids=str)
def test_calls_with_braces_and_without_arguments(arguments: dict[str, Any]) -> None:
    """Case 66: streamed or whole, with one id, the arguments are JSON and the same."""
    written = json.dumps({"name": "run", "arguments": arguments})
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools, "max_tokens": 400}
    with serving(FakeLLM(f"<tool_call>\n{written}\n</tool_call>"), tool_parser="hermes") as fake:
        whole = fake.send("/v1/chat/completions", body)[1]["choices"][0]
        (call,) = whole["message"]["tool_calls"]
        chunks = events(fake.send("/v1/chat/completions", body | {"stream": True})[1])
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [bool(part.get("id")) for part in parts] == [True] + [False] * (len(parts) - 1)
    streamed = "".join(part["function"].get("arguments", "") for part in parts)
    assert json.loads(streamed) == json.loads(call["function"]["arguments"]) == arguments
    assert streamed == call["function"]["arguments"]
    assert whole["finish_reason"] == chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
