"""Structured outputs in the engine: only text of the language, whoever else is there, and one's own delays alone."""

import json
import queue
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import idle, roomy

import jaxserve
from jaxserve.constraint import Constraint, Mask
from jaxserve.request import Delta, RequestError, SamplingParams, StructuredOutputs

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WISHES = {
    "choice": StructuredOutputs(choice=["yes", "no", "né😀"]),
    "regex": StructuredOutputs(regex="[0-9]{3}-[a-z]{2,9}"),
    "json": StructuredOutputs(json=PERSON),
    "json_object": StructuredOutputs(json_object=True),
    "grammar": StructuredOutputs(grammar='start: "<" item+ ">"\nitem: /[a-c]{2}/ %json {"type": "boolean"} ";"'),
}
CLOSING = {ord('"'): 6.0, ord("}"): 9.0, ord("]"): 6.0, 2: 9.0, ord("{"): -2.0, ord("["): -2.0}
"""Bias that lets random weights come to an end."""


def belongs(kind: str, text: str) -> bool:
    if kind == "choice":
        return text in ("yes", "no", "né😀")
    if kind == "regex":
        return re.fullmatch("[0-9]{3}-[a-z]{2,9}", text) is not None
    if kind == "grammar":
        return re.fullmatch("<([a-c]{2}(true|false);)+>", text) is not None
    value = json.loads(text)
    if kind == "json_object":
        return isinstance(value, dict)
    return set(value) == {"name", "age"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 130


def params(wish: StructuredOutputs, **fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 150, "structured_outputs": wish, "seed": 5, "logit_bias": CLOSING, **fields})


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")
        idle(engine)
        assert engine.compilations_after_ready == 0
        deadline = time.monotonic() + 5
        while engine._built.engine._awaited:
            assert time.monotonic() < deadline, "a mask never came"
            time.sleep(0.01)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.mark.parametrize("kind", WISHES)
def test_only_text_of_the_language(llm: jaxserve.LLM, kind: str) -> None:
    (output,) = llm.generate("Say:", params(WISHES[kind], n=8, temperature=2.0))
    ended = [one.text for one in output.outputs if one.finish_reason == "stop"]
    assert len(ended) >= 4
    assert all(belongs(kind, text) for text in ended)
    assert len(set(ended)) > 1
    assert {one.finish_reason for one in output.outputs} <= {"stop", "length"}


def everything() -> tuple[list[str], list[SamplingParams]]:
    """All kinds, greedy and drawn, among requests without a grammar."""
    each = []
    for wish in WISHES.values():
        each += [params(wish, seed=seed, max_tokens=60) for seed in (1, 2)]
        each += [params(wish, temperature=0.0), SamplingParams(max_tokens=30, seed=3)]
        each.append(SamplingParams(max_tokens=30, bad_words=["e", "ab"], seed=4))
    return [f"{i} " * (i + 1) for i in range(len(each))], each


@pytest.fixture(scope="module")
def alone(llm: jaxserve.LLM) -> list[list[int]]:
    prompts, each = everything()
    return [tokens(llm.generate(prompt, one))[0] for prompt, one in zip(prompts, each, strict=True)]


def test_the_same_tokens_in_company(llm: jaxserve.LLM, alone: list[list[int]]) -> None:
    assert tokens(llm.generate(*everything())) == alone


@pytest.mark.parametrize("options", [{"overlap": False}, {"max_num_batched_tokens": 32}], ids=str)
def test_the_same_tokens_from_any_engine(
    options: dict[str, Any], speaking: Path, programs_dir: str, alone: list[list[int]]
) -> None:
    with roomy(programs_dir, speaking, **options) as other:
        assert tokens(other.generate(*everything())) == alone
        idle(other)
        assert other.compilations_after_ready == 0


def test_the_same_tokens_after_preemptions(llm: jaxserve.LLM, speaking: Path, programs_dir: str) -> None:
    wish = StructuredOutputs(regex="([a-m]{2}[0-9]){36}")
    prompts = [[5 + i] * (20 + i) for i in range(8)]
    with roomy(programs_dir, speaking, kv_cache_memory_bytes=33 * 8 * 768) as tight:
        found = tight.generate(prompts, params(wish))
        assert tight._built.engine.scheduler.preemptions > 0
        idle(tight)
    assert tokens(found) == tokens(llm.generate(prompts, params(wish)))
    assert all(re.fullmatch("([a-m]{2}[0-9]){36}", output.outputs[0].text) for output in found)


# -- the end ----------------------------------------------------------------------------------------------------------


def test_a_complete_text_ends_at_once(llm: jaxserve.LLM) -> None:
    """Without an end token, and also where the last token allowed completes it or others hold the end back."""
    for fields in ({}, {"max_tokens": 3}, {"ignore_eos": True}, {"min_tokens": 50, "max_tokens": 60}):
        deltas = list(llm.stream("Say:", params(StructuredOutputs(choice=["yes"]), **fields)))
        assert "".join(delta.text for delta in deltas) == "yes"
        assert [token for delta in deltas for token in delta.token_ids] == list(b"yes")
        assert deltas[-1].finish_reason == "stop"
        assert deltas[-1].stop_reason is None
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)


def test_too_few_tokens_are_cut(llm: jaxserve.LLM) -> None:
    (output,) = llm.generate("Say:", params(StructuredOutputs(choice=["yes"]), max_tokens=2))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("ye", "length")


def test_the_end_token_ends_it_even_where_it_is_ignored(llm: jaxserve.LLM) -> None:
    wish = StructuredOutputs(regex="[ab]+")
    (output,) = llm.generate("Say:", params(wish, ignore_eos=True, logit_bias={2: 50.0}))
    assert len(output.outputs[0].token_ids) == 2
    assert output.outputs[0].finish_reason == "stop"


def test_min_tokens_hold_the_end_back_while_something_else_fits(llm: jaxserve.LLM) -> None:
    wish = StructuredOutputs(regex="[ab]+")
    (output,) = llm.generate("Say:", params(wish, min_tokens=7, logit_bias={2: 50.0}))
    assert len(output.outputs[0].text) == 7
    short = StructuredOutputs(regex="[ab]{1,3}")
    (output,) = llm.generate("Say:", params(short, min_tokens=7, logit_bias={2: 50.0}))
    assert len(output.outputs[0].text) == 3, "the grammar wins"


def test_stop_strings_and_stop_tokens_cut_it(llm: jaxserve.LLM) -> None:
    wish = StructuredOutputs(regex="abcdef")
    (output,) = llm.generate("Say:", params(wish, stop=["cd"]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("ab", "cd")
    (output,) = llm.generate("Say:", params(wish, stop_token_ids=[ord("e")]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("abcd", ord("e"))
    (output,) = llm.generate("Say:", params(wish, stop=["efg"]))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("abcdef", None), "held back, then given"


def test_logprobs_and_echo(llm: jaxserve.LLM) -> None:
    (output,) = llm.generate(
        "Say:", params(StructuredOutputs(choice=["yes"]), logprobs=2, echo=True, prompt_logprobs=0)
    )
    one = output.outputs[0]
    assert one.text == "Say:yes"
    assert [entry.token_id for entry in one.logprobs] == list(b"yes")
    assert len(output.prompt_logprobs) == 4


def test_penalties_and_bias_do_not_leave_the_language(llm: jaxserve.LLM) -> None:
    wild = {"temperature": 5.0, "presence_penalty": 2.0, "repetition_penalty": 3.0, "top_k": 2, "min_p": 0.9}
    (output,) = llm.generate("0-a", params(WISHES["regex"], n=4, logit_bias={ord("0"): -100, ord("Z"): 100}, **wild))
    assert all(belongs("regex", one.text) for one in output.outputs)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"allowed_token_ids": [97]}, {"bad_words": ["x"]}])
def test_other_bans_do_not_go_with_it(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        params(StructuredOutputs(regex="a"), **fields)
    assert caught.value.param == next(iter(fields))


def test_a_wish_must_be_one() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs={"regex": "a"})
    assert caught.value.param == "structured_outputs"


def test_refused_before_anything_runs(llm: jaxserve.LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.submit("x", params(StructuredOutputs(json={"not": {}})), on_delta=lambda delta: None)
    assert caught.value.param == "structured_outputs.json"


# -- delays and failures ----------------------------------------------------------------------------------------------


class Gate:
    """A matcher that allows the letters a to z, and waits for ``open`` before each mask."""

    def __init__(self, fails_at: int | None = None):
        self.open = threading.Event()
        self.entered = threading.Event()
        self.steps = 0
        self.fails_at = fails_at

    @property
    def mask(self) -> Mask:
        words = np.zeros(8, np.uint32)
        words[3] = 0x07FFFFFE
        return Mask(words)

    def advance(self, token: int) -> Mask:
        assert ord("a") <= token <= ord("z")
        self.steps += 1
        self.entered.set()
        assert self.open.wait(20)
        if self.steps == self.fails_at:
            raise ValueError("out of order")
        return self.mask

    def start(self) -> Constraint:
        return Constraint(self, self.mask)


class Collector:
    """Deltas of one request."""

    def __init__(self) -> None:
        self.deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self.seen: list[Delta] = []

    def rest(self) -> list[Delta]:
        while not self.seen or not self.seen[-1].request_done:
            self.seen.append(self.deltas.get(timeout=20))
        return self.seen


@pytest.fixture
def gate(llm: jaxserve.LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Every grammar of the engine is this gate."""
    made = Gate()
    monkeypatch.setattr(llm._grammars, "compile", lambda wish: made)
    yield made
    made.open.set()


def submit(llm: jaxserve.LLM, one: SamplingParams) -> tuple[str, Collector]:
    found = Collector()
    return llm.submit("hello", one, on_delta=found.deltas.put), found


GATED = StructuredOutputs(regex="[a-z]*")


def test_a_slow_mask_delays_only_its_own_sequence(llm: jaxserve.LLM, gate: Gate) -> None:
    _, slow = submit(llm, params(GATED, max_tokens=5))
    assert gate.entered.wait(20)
    (output,) = llm.generate("hi", SamplingParams(max_tokens=40, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 40
    assert gate.steps == 1, "not one step further in the meantime"
    gate.open.set()
    assert sum(len(delta.token_ids) for delta in slow.rest()) == 5
    assert slow.seen[-1].finish_reason == "length"


def test_an_engine_that_waits_for_masks_does_not_spin(
    llm: jaxserve.LLM, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, turns = llm._built.engine.scheduler, []
    schedule = scheduler.schedule
    monkeypatch.setattr(scheduler, "schedule", lambda: turns.append(time.monotonic()) or schedule())
    _, slow = submit(llm, params(GATED, max_tokens=3))
    assert gate.entered.wait(20)
    time.sleep(0.05)
    before = len(turns)
    time.sleep(0.2)
    assert len(turns) == before
    assert not llm.health().idle
    gate.open.set()
    assert slow.rest()[-1].finish_reason == "length"


def test_new_requests_wake_an_engine_that_waits_for_masks(llm: jaxserve.LLM, gate: Gate) -> None:
    _, slow = submit(llm, params(GATED, max_tokens=3))
    assert gate.entered.wait(20)
    time.sleep(0.05)
    (output,) = llm.generate("hi", SamplingParams(max_tokens=4))
    assert output.finished
    gate.open.set()
    slow.rest()


def test_abort_while_a_mask_is_computed(llm: jaxserve.LLM, gate: Gate) -> None:
    request_id, slow = submit(llm, params(GATED, n=2))
    assert gate.entered.wait(20)
    llm.abort(request_id)
    assert {delta.finish_reason for delta in slow.rest() if delta.finish_reason} == {"abort"}
    scheduler, deadline = llm._built.engine.scheduler, time.monotonic() + 5
    while scheduler.pool.free < scheduler.pool.usable:
        assert time.monotonic() < deadline, "given back before the mask is there"
        time.sleep(0.01)
    gate.open.set()


def test_a_matcher_that_fails_ends_its_request_alone(llm: jaxserve.LLM, gate: Gate) -> None:
    gate.fails_at = 3
    gate.open.set()
    other: list[Any] = []
    thread = threading.Thread(
        target=lambda: other.extend(llm.generate("hi", SamplingParams(max_tokens=60, ignore_eos=True)))
    )
    thread.start()
    _, broken = submit(llm, params(GATED))
    last = broken.rest()[-1]
    assert last.finish_reason == "error"
    assert "out of order" in last.error
    assert "".join(delta.text for delta in broken.seen).isalpha()
    thread.join()
    assert len(other[0].outputs[0].token_ids) == 60


def test_a_grammar_too_complex_ends_with_an_error(llm: jaxserve.LLM) -> None:
    wish = StructuredOutputs(grammar='start: a\na: "x" | a a | a a a')
    (output,) = llm.generate("hi", params(wish, max_tokens=None, logit_bias={2: -100.0}))
    assert output.outputs[0].finish_reason == "error"
    assert "too complex" in output.error
    assert set(output.outputs[0].text) == {"x"}


def test_closing_while_a_mask_is_computed(speaking: Path, programs_dir: str) -> None:
    with roomy(programs_dir, speaking) as own:
        made = Gate()
        own._grammars.compile = lambda wish: made
        _, slow = submit(own, params(GATED))
        assert made.entered.wait(20)
    assert slow.rest()[-1].finish_reason == "abort"
    made.open.set()
