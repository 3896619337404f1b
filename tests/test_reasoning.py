"""Reasoning between think tags: the split itself, and what the chat API makes of it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.parsers.choose import THINKING
from serve.parsers.hermes import HERMES
from serve.parsers.parts import Reasoning, Text
from serve.parsers.reasoning import THINK, ThinkingParser
from tests.fake_llm import FakeLLM
from tests.serving import chat, events, serving
from tests.test_tools_parsers import TOOLS, pieces_of, read

TEMPLATE = "{% if enable_thinking %}<think></think>"
"""All that is looked at of a template: that its model thinks, and what turns it off."""


def parse(*pieces: str, opened: bool = False, name: str = "think", then=None):
    return read(ThinkingParser(THINKING[name], opened=opened, then=then), pieces)


@pytest.mark.parametrize(
    ("said", "opened", "reasoning", "text"),
    [
        ("<think>\nhm\n</think>\n\nYes.", False, "hm", "Yes."),
        ("\n<think>hm</think>Yes.", False, "hm", "Yes."),
        ("hm\n</think>\n\nYes.", True, "hm", "Yes."),
        ("Yes.", False, "", "Yes."),
        ("Yes <think>no</think>", False, "", "Yes <think>no</think>"),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>hm", False, "hm", ""),
        ("<think>a < b </thin", False, "a < b </thin", ""),
        ("<thinner>", False, "", "<thinner>"),
        ("hm</think>a</think>b", True, "hm", "a</think>b"),
        ("", True, "", ""),
    ],
)
def test_samples(said, opened, reasoning, text):
    for pieces in ([said], list(said)):
        whole = parse(*pieces, opened=opened)
        assert (whole.reasoning, whole.text) == (reasoning, text)


def test_other_tags():
    whole = parse("[THINK]hm[/THINK]Yes.", name="mistral")
    assert (whole.reasoning, whole.text) == ("hm", "Yes.")


FRAGMENTS = [
    "<think>",
    "</think>",
    "<thi",
    "</",
    "\n",
    " ",
    "a",
    "<tool_call>",
    '{"name": "now", "arguments": {}}',
    "é",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=10), st.booleans(), st.data())
def test_chunks_do_not_matter(fragments, opened, data):
    text = "".join(fragments)
    whole = parse(text, opened=opened, then=HERMES.parser(TOOLS))
    pieces = parse(*data.draw(pieces_of(text)), opened=opened, then=HERMES.parser(TOOLS))
    assert (pieces.text, pieces.reasoning, pieces.calls) == (whole.text, whole.reasoning, whole.calls)
    if not whole.calls:  # nothing is lost but tags and white space around them
        kept = "".join((whole.reasoning + whole.text).split())
        tags = text.replace("<think>", "", 1) if not opened and text.lstrip().startswith("<think>") else text
        assert kept in {"".join(tags.split()), "".join(tags.replace("</think>", "", 1).split())}


def test_reasoning_streams_without_delay():
    parser = ThinkingParser(THINK, opened=True)
    assert [parser.push(word) for word in ("Let", " me", " see")] == [
        [Reasoning("Let")],
        [Reasoning(" me")],
        [Reasoning(" see")],
    ]
    assert parser.thinking
    assert parser.push("</think>\n\nYes") == [Text("Yes")]
    assert not parser.thinking


# The chat API.


@pytest.fixture
def thinker():
    llm = FakeLLM(answer="<think>\nA stop.\n</think>\n\nYes. And a stop. More.")
    llm.tokenizer.chat_template = TEMPLATE
    return llm


def test_reasoning_in_chat(thinker):
    with serving(thinker) as server:
        status, answer, _ = chat(server, logprobs=True)
        assert status == 200
        message, usage = answer["choices"][0]["message"], answer["usage"]
        assert message["reasoning_content"] == "A stop."
        assert message["content"] == "Yes. And a stop. More."
        assert len(answer["choices"][0]["logprobs"]["content"]) == usage["completion_tokens"] == len(thinker.answer)
        inside = len("\nA stop.\n</think>")
        assert usage["completion_tokens_details"]["reasoning_tokens"] == inside
        chunks = events(chat(server, stream=True, stream_options={"include_usage": True}, logprobs=True)[1])
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "A stop."
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
        assert chunks[-1]["usage"] == usage
        logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
        assert sum(len(item["content"]) for item in logprobs if item) == usage["completion_tokens"]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_apply_to_what_is_said(thinker, include):
    """Neither in the reasoning, nor across its end."""
    with serving(thinker) as server:
        fields = {"stop": ["stop", "s. A"], "include_stop_str_in_output": include}
        status, answer, _ = chat(server, **fields)
        assert status == 200
        choice = answer["choices"][0]
        assert choice["message"]["reasoning_content"] == "A stop."
        assert choice["message"]["content"] == ("Yes. A" if include else "Ye")
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "s. A")
        chunks = events(chat(server, stream=True, **fields)[1])
        said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert said == choice["message"]["content"]
        assert chunks[-1]["choices"][0]["stop_reason"] == "s. A"
        assert thinker.submitted[-1].params.stop == ()
        thinker.wait_idle()
        n = chat(server, n=3, stop="stop")[1]["choices"]
        assert [one["message"]["content"] for one in n] == ["Yes. And a "] * 3
        thinker.wait_idle()


def test_the_prompt_may_open_or_settle_the_reasoning(thinker):
    prompts = {"opened": "<assistant><think>\n", "settled": "<assistant><think>\n\n</think>\n\n"}
    for kind, prompt in prompts.items():
        llm = FakeLLM(answer="hm</think>Yes.")
        llm.tokenizer.chat_template = TEMPLATE
        llm.tokenizer.apply_chat_template = lambda messages, prompt=prompt, **_: prompt
        with serving(llm) as server:
            message = chat(server)[1]["choices"][0]["message"]
        expected = ("hm", "Yes.") if kind == "opened" else (None, "hm</think>Yes.")
        assert (message.get("reasoning_content"), message["content"]) == expected
    thinker.close()


def test_effort_reaches_the_template(thinker):
    def prompt(server, **fields) -> str:
        assert chat(server, **fields)[0] == 200
        return bytes(thinker.submitted[-1].prompt).decode()

    with serving(thinker) as server:
        assert "enable_thinking" not in prompt(server)
        assert "[enable_thinking]" in prompt(server, reasoning_effort="none")
        assert "[enable_thinking]" in prompt(server, chat_template_kwargs={"enable_thinking": False})
    with serving() as plain:
        status, answer, _ = chat(plain, reasoning_effort="high")
        assert (status, answer["error"]["param"]) == (400, "reasoning_effort")


def test_a_grammar_waits_for_the_answer(thinker):
    with serving(thinker) as server:
        assert chat(server, response_format={"type": "json_object"})[0] == 200
        grammar = thinker.submitted[-1].params.structured_outputs.grammar
        assert "thought" in grammar
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
        status, answer, _ = chat(server, response_format=bad)
        assert (status, answer["error"]["param"]) == (400, "response_format.json_schema.schema")


def test_no_parser_where_none_is_wanted(thinker):
    with serving(thinker, reasoning_parser="none") as server:
        answer = chat(server)[1]
        assert answer["choices"][0]["message"]["content"] == thinker.answer
        assert "completion_tokens_details" not in answer["usage"]
