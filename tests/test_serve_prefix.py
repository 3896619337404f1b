"""Prefix reuse over HTTP: what usage says of it, and who may find whose prompts."""

import pytest

from tests.serving import events, serving

PROMPT = "{} opens what nobody else says, at some length so that it fills a few pages, this one and that one. "


def ask(server, text: str, *, key: str | None = None, **more):
    body = {"prompt": text, "max_tokens": 1, "temperature": 0} | more
    headers = {"Authorization": f"Bearer {key}"} if key else None
    status, answer, _ = server.send("/v1/completions", body, headers=headers)
    assert status == 200, answer
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def server(llm):
    with serving(llm, close_llm=False) as made:
        yield made


def test_usage_says_what_was_cached(server):
    text = PROMPT.format("one")
    assert [ask(server, text), ask(server, text)] == [0, len(text) - 1]
    several = {"prompt": [text, text], "n": 2, "max_tokens": 1}
    _, answer, _ = server.send("/v1/completions", several)
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * (len(text) - 1)}


def test_usage_of_streams_chats_and_responses_says_it_too(server):
    chat = {"messages": [{"role": "user", "content": PROMPT.format("two")}], "max_tokens": 2}
    found = []
    for _ in range(2):
        _, answer, _ = server.send("/v1/chat/completions", chat)
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert found[0] < found[1] == answer["usage"]["prompt_tokens"] - 1
    _, text, _ = server.send("/v1/chat/completions", chat | {"stream": True, "stream_options": {"include_usage": True}})
    assert events(text)[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == found[1]
    _, answer, _ = server.send("/v1/responses", {"input": chat["messages"], "max_output_tokens": 16})
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == found[1]


def test_salts_share_nothing(server):
    text = PROMPT.format("three")
    asked = [ask(server, text, cache_salt=salt) for salt in ("a", "b", "a")]
    assert asked == [0, 0, len(text) - 1]
    assert ask(server, text) == 0


def test_keys_share_nothing_where_the_operator_says_so(llm):
    text = PROMPT.format("four")
    with serving(llm, close_llm=False, api_key=("k1", "k2"), cache_salt_from="api-key") as server:
        assert [ask(server, text, key=key) for key in ("k1", "k2", "k2")] == [0, 0, len(text) - 1]
        assert ask(server, text, key="k1", cache_salt="x") == 0
    text = PROMPT.format("five")
    with serving(llm, close_llm=False, api_key=("k1", "k2")) as server:
        assert [ask(server, text, key=key) for key in ("k1", "k2")] == [0, len(text) - 1]


def test_isolation_by_key_needs_keys():
    with pytest.raises(ValueError, match="cache_salt_from api-key needs API keys"), serving(cache_salt_from="api-key"):
        pass
