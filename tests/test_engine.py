"""The engine's promises, on a tiny model of bytes: what a request gets depends on it alone, and nothing is kept."""

import dataclasses
import queue
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import idle, reference, roomy

import jaxserve
from jaxserve.request import Delta, QueueFullError, RequestOutput, SamplingParams

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 256) for _ in range(size)] for size in (1, 5, 32, 33, 60, 64, 100, 150)]

SETTINGS = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 11},
    "truncated": {"seed": 12, "temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalised": {"seed": 13, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "steered": {"seed": 14, "logit_bias": {97: 3.0, 98: -100.0}, "min_tokens": 10, "bad_words": ["e", "ab"]},
    "listed": {"temperature": 0.0, "allowed_token_ids": list(range(40, 90)), "ignore_eos": True},
}


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test of the shared engine all pages and slots are back, and nothing was compiled."""
    yield
    if "llm" in request.fixturenames:
        engine = request.getfixturevalue("llm")
        idle(engine)
        assert engine.compilations_after_ready == 0


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, **fields})


def company(seed: int, count: int = 5) -> tuple[list[list[int]], list[SamplingParams]]:
    """Other requests, of every kind of sampling."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 256) for _ in range(rng.randrange(1, 120))] for _ in range(count)]
    kinds = [rng.choice(list(SETTINGS.values())) for _ in range(count)]
    return prompts, [params(**kind | {"max_tokens": rng.randrange(10, 60)}) for kind in kinds]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


@pytest.fixture(scope="module")
def alone(llm: jaxserve.LLM) -> dict[str, list[list[int]]]:
    """Every prompt under every setting, one request at a time: what all other ways must repeat."""
    return {
        name: [llm.generate(prompt, params(**fields))[0].outputs[0].token_ids for prompt in PROMPTS]
        for name, fields in SETTINGS.items()
    }


def everything() -> tuple[list[list[int]], list[SamplingParams]]:
    """All prompts under all settings as one batch."""
    pairs = [(prompt, params(**fields)) for fields in SETTINGS.values() for prompt in PROMPTS]
    return [p for p, _ in pairs], [s for _, s in pairs]


def expect(alone: dict[str, list[list[int]]]) -> list[list[int]]:
    return [found for name in SETTINGS for found in alone[name]]


# -- the same tokens --------------------------------------------------------------------------------------------------


def test_the_settings_matter(alone: dict[str, list[list[int]]]) -> None:
    """What follows compares something: settings and prompts give different tokens."""
    found = [tuple(t) for name in alone for t in alone[name]]
    assert len(set(found)) > len(found) * 0.9


def test_the_same_tokens_in_any_company(llm: jaxserve.LLM, alone: dict[str, list[list[int]]]) -> None:
    for seed, (name, fields) in enumerate(SETTINGS.items()):
        for prompt, expected in zip(PROMPTS[::3], alone[name][::3], strict=True):
            prompts, others = company(seed)
            outputs = llm.generate([*prompts[:2], prompt, *prompts[2:]], [*others[:2], params(**fields), *others[2:]])
            assert outputs[2].outputs[0].token_ids == expected, (name, len(prompt))


def test_more_requests_than_slots(llm: jaxserve.LLM, alone: dict[str, list[list[int]]]) -> None:
    prompts, each = everything()
    assert len(prompts) > 10 * llm.config.max_num_seqs
    assert tokens(llm.generate(prompts, each)) == expect(alone)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"max_num_batched_tokens": 32},
        {"layers_per_program": 0},
        {"layers_per_program": 1},
        {"layers_per_program": 2},
        {"tensor_parallel": 2},
    ],
    ids=str,
)
def test_the_same_tokens_from_any_engine(
    options: dict[str, Any], speaking: Path, programs_dir: str, alone: dict[str, list[list[int]]]
) -> None:
    """Without overlap, in other chunks, in other programs, over other devices."""
    prompts, each = everything()
    with roomy(programs_dir, speaking, **options) as other:
        assert tokens(other.generate(prompts, each)) == expect(alone)
        idle(other)
        assert other.compilations_after_ready == 0


@pytest.fixture(scope="module")
def tight(speaking: Path, programs_dir: str) -> Iterator[jaxserve.LLM]:
    """An engine whose cache holds little more than the longest sequence."""
    page = 8 * 768  # tokens a page, bytes a token
    with roomy(programs_dir, speaking, kv_cache_memory_bytes=33 * page) as made:
        assert made._built.limits.num_pages == 33
        yield made


@pytest.mark.parametrize("name", SETTINGS)
def test_the_same_tokens_after_preemptions(name: str, llm: jaxserve.LLM, tight: jaxserve.LLM) -> None:
    scheduler = tight._built.engine.scheduler
    before = scheduler.preemptions
    each = params(**SETTINGS[name] | {"max_tokens": 110, "ignore_eos": True})
    prompts = PROMPTS[:5] * 2
    outputs = tight.generate(prompts, each)
    assert scheduler.preemptions > before
    assert tokens(outputs) == tokens(llm.generate(prompts, each))
    idle(tight)


def test_log_probabilities_survive_preemptions(llm: jaxserve.LLM, tight: jaxserve.LLM) -> None:
    before = tight._built.engine.scheduler.preemptions
    each = params(seed=1, logprobs=2, prompt_logprobs=1, max_tokens=100, ignore_eos=True)
    ours, theirs = tight.generate(PROMPTS[3:7], each), llm.generate(PROMPTS[3:7], each)
    assert tight._built.engine.scheduler.preemptions > before
    for a, b in zip(ours, theirs, strict=True):
        same_logprobs(a.outputs[0].logprobs, b.outputs[0].logprobs)
        same_logprobs(a.prompt_logprobs[1:], b.prompt_logprobs[1:])
    idle(tight)


def test_n_completions_draw_from_the_seeds_that_follow(llm: jaxserve.LLM) -> None:
    (output,) = llm.generate(PROMPTS[4], params(n=6, seed=50, logprobs=1, prompt_logprobs=0))
    assert [completion.index for completion in output.outputs] == list(range(6))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 6
    for completion in output.outputs:
        (single,) = llm.generate(PROMPTS[4], params(seed=50 + completion.index))
        assert completion.token_ids == single.outputs[0].token_ids
        assert completion.text == single.outputs[0].text
        assert len(completion.logprobs) == len(completion.token_ids)
    assert len(output.prompt_logprobs) == len(PROMPTS[4])


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**32, 2**63 - 1, -(2**63)])
def test_every_seed_is_a_seed_of_its_own(llm: jaxserve.LLM, seed: int) -> None:
    first, again, other = (
        llm.generate(PROMPTS[1], params(seed=s))[0].outputs[0].token_ids for s in (seed, seed, seed ^ 1)
    )
    assert first == again != other


def test_unseeded_requests_differ(llm: jaxserve.LLM) -> None:
    found = tokens(llm.generate([PROMPTS[1]] * 4, params(ignore_eos=True)))
    assert len({tuple(t) for t in found}) == 4


def test_streams_say_what_whole_answers_say(llm: jaxserve.LLM) -> None:
    for fields in SETTINGS.values():
        each = params(**fields, logprobs=1, prompt_logprobs=0, stop=["th"])
        (whole,) = llm.generate(PROMPTS[5], each)
        deltas = list(llm.stream(PROMPTS[5], each))
        assert [d.request_done for d in deltas] == [False] * (len(deltas) - 1) + [True]
        assert [d.finish_reason is not None for d in deltas] == [d.request_done for d in deltas]
        pieces = RequestOutput(whole.request_id, whole.prompt, whole.prompt_token_ids, [])
        pieces.outputs.append(dataclasses.replace(whole.outputs[0], text="", token_ids=[], logprobs=None))
        for delta in deltas:
            pieces.add(delta)
        same_logprobs(pieces.outputs[0].logprobs, whole.outputs[0].logprobs)
        same_logprobs(pieces.prompt_logprobs[1:], whole.prompt_logprobs[1:])
        ours, theirs = (dataclasses.replace(o.outputs[0], logprobs=None) for o in (pieces, whole))
        assert ours == theirs


def test_text_prompts_are_their_token_ids(llm: jaxserve.LLM) -> None:
    text = "Ça va, 😀?"
    (by_text,) = llm.generate(text, params(seed=5))
    (by_ids,) = llm.generate(list(text.encode()), params(seed=5))
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == list(text.encode())
    assert by_text.outputs[0].token_ids == by_ids.outputs[0].token_ids
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    messages = [{"role": "user", "content": text}]
    (by_chat,) = llm.chat(messages, params(seed=5))
    assert by_chat.prompt == f"user: {text}\n"
    assert by_chat.outputs[0].token_ids == tokens(llm.generate(f"user: {text}\n", params(seed=5)))[0]


def test_the_text_is_the_tokens_bytes(llm: jaxserve.LLM) -> None:
    """Random bytes: incomplete characters are replaced, none is lost, whatever the pieces."""
    for seed in range(6):
        (output,) = llm.generate("é", params(seed=seed, temperature=3.0, max_tokens=80, ignore_eos=True))
        ids = output.outputs[0].token_ids
        assert output.outputs[0].text == llm.tokenizer.decode(ids)
        assert output.outputs[0].text == bytes(ids).decode(errors="replace")


# -- log-probabilities ------------------------------------------------------------------------------------------------


def same_logprobs(ours: Any, theirs: Any) -> None:
    assert [(p.token_id, p.rank) for p in ours] == [(p.token_id, p.rank) for p in theirs]
    np.testing.assert_allclose([p.logprob for p in ours], [p.logprob for p in theirs], atol=1e-4)
    assert [[t for t, _ in p.top] for p in ours] == [[t for t, _ in p.top] for p in theirs]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def check_logprob(found: Any, row: np.ndarray, token: int, top: int) -> None:
    best = np.argsort(-row, kind="stable")
    assert found.token_id == token
    assert found.logprob == pytest.approx(row[token], abs=1e-3)
    assert found.rank == best.tolist().index(token) + 1
    assert [t for t, _ in found.top] == best[:top].tolist()
    np.testing.assert_allclose([p for _, p in found.top], row[best[:top]], atol=1e-3)


@pytest.mark.parametrize("crowd", [0, 5])
def test_log_probabilities_are_the_references(llm: jaxserve.LLM, crowd: int) -> None:
    """Of prompt and completion, raw whatever the sampling, alone and in company."""
    ref = reference("llama3")
    prompt = ref["input_ids"][0].tolist()
    rows = log_softmax(ref["full_logits"])
    greedy = ref["greedy_ids"].tolist()
    only = sorted(set(greedy))  # shapes what is chosen, not what is reported
    want = params(
        temperature=0.0, max_tokens=16, ignore_eos=True, allowed_token_ids=only, logprobs=3, prompt_logprobs=2
    )
    prompts, others = company(3, crowd)
    output = llm.generate([*prompts, prompt], [*others, want])[-1]
    ids = output.outputs[0].token_ids
    assert ids == greedy
    assert output.prompt_logprobs[0] is None
    for position in range(1, len(prompt)):
        check_logprob(output.prompt_logprobs[position], rows[position - 1], prompt[position], 2)
    for i in range(len(ids)):
        check_logprob(output.outputs[0].logprobs[i], rows[len(prompt) - 1 + i], ids[i], 3)


def test_a_prompts_log_probabilities_do_not_depend_on_its_chunks(llm: jaxserve.LLM) -> None:
    """What a completion says of its tokens, the prompt says of them when they are the prompt."""
    (output,) = llm.generate(PROMPTS[4], params(seed=3, max_tokens=90, ignore_eos=True, logprobs=1))
    ids = output.outputs[0].token_ids
    whole = PROMPTS[4] + ids
    (scored,) = llm.generate(whole, params(max_tokens=0, prompt_logprobs=1, temperature=0.0))
    same_logprobs(scored.prompt_logprobs[len(PROMPTS[4]) :], output.outputs[0].logprobs)
    crowd = llm.generate([whole, *PROMPTS], [params(max_tokens=1, prompt_logprobs=1), *[params()] * len(PROMPTS)])
    same_logprobs(crowd[0].prompt_logprobs[1:], scored.prompt_logprobs[1:])


def test_log_probabilities_of_none_and_of_many(llm: jaxserve.LLM) -> None:
    bare, chosen, many = llm.generate([PROMPTS[1]] * 3, [params(seed=1, logprobs=n) for n in (None, 0, 20)])
    assert bare.outputs[0].logprobs is None
    assert bare.prompt_logprobs is None
    assert {len(p.top) for p in chosen.outputs[0].logprobs} == {0}
    assert {len(p.top) for p in many.outputs[0].logprobs} == {20}


# -- ends and shapes --------------------------------------------------------------------------------------------------


def one(llm: jaxserve.LLM, prompt: Any = "Hello", **fields: Any) -> Any:
    return llm.generate(prompt, params(**fields))[0].outputs[0]


def test_echo_puts_the_prompt_first(llm: jaxserve.LLM) -> None:
    plain = one(llm, seed=4)
    echoed = one(llm, seed=4, echo=True)
    assert echoed.text == "Hello" + plain.text
    assert echoed.token_ids == [*b"Hello", *plain.token_ids]
    only = one(llm, echo=True, max_tokens=0)
    assert (only.text, only.token_ids, only.finish_reason) == ("Hello", [*b"Hello"], "length")
    by_ids = one(llm, [*b"Hello"], echo=True, max_tokens=0)
    assert by_ids.text == "Hello"


def test_lengths(llm: jaxserve.LLM) -> None:
    for count in (1, 2, 33):
        found = one(llm, max_tokens=count, ignore_eos=True)
        assert (len(found.token_ids), found.finish_reason) == (count, "length")
    to_the_end = one(llm, [7] * 200, max_tokens=None, ignore_eos=True)
    assert len(to_the_end.token_ids) == llm.max_model_len - 200
    full = one(llm, [7] * (llm.max_model_len - 1), max_tokens=50)
    assert len(full.token_ids) == 1


def biased_to(llm: jaxserve.LLM, token: int) -> dict[str, Any]:
    """Nothing but this token is chosen unless something forbids it."""
    return {"logit_bias": {token: 100.0}, "temperature": 0.0}


def test_the_end_of_sequence_token_ends_unless_ignored(llm: jaxserve.LLM) -> None:
    """Its text is never shown; its id is listed, as every chosen token."""
    found = one(llm, **biased_to(llm, 2))
    assert (found.token_ids, found.text, found.finish_reason, found.stop_reason) == ([2], "", "stop", None)
    ignored = one(llm, **biased_to(llm, 2), ignore_eos=True, max_tokens=5)
    assert (ignored.token_ids, ignored.text, ignored.finish_reason) == ([2] * 5, "\x02" * 5, "length")


@pytest.mark.parametrize("stop", [{}, {"stop_token_ids": [120], "ignore_eos": True}])
def test_min_tokens_holds_back_what_would_end_it(llm: jaxserve.LLM, stop: dict[str, Any]) -> None:
    ends = stop.get("stop_token_ids", [2])[0]
    for least in (0, 1, 7):
        found = one(llm, **biased_to(llm, ends), **stop, min_tokens=least)
        assert len(found.token_ids) == least + 1
        assert found.token_ids.index(ends) == least
        assert found.finish_reason == "stop"
        assert found.stop_reason == (ends if stop else None)


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_ids(llm: jaxserve.LLM, include: bool) -> None:
    whole = one(llm, seed=6, ignore_eos=True)
    token = next(t for t in whole.token_ids[5:] if 32 < t < 127 and t not in whole.token_ids[:5])
    end = whole.token_ids.index(token) + 1
    found = one(llm, seed=6, stop_token_ids=[token], include_stop_str_in_output=include, ignore_eos=True)
    assert (found.finish_reason, found.stop_reason) == ("stop", token)
    assert found.token_ids == whole.token_ids[:end]
    assert found.text == llm.tokenizer.decode(whole.token_ids[: end if include else end - 1])


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm: jaxserve.LLM, include: bool) -> None:
    """The earliest in the text, also across tokens; what follows is cut, what might have begun one is not lost."""
    letters = {"allowed_token_ids": list(range(97, 103)), "seed": 8, "temperature": 1.5, "max_tokens": 60}
    text = one(llm, **letters).text
    assert len(text) == 60
    stop = text[20:23]
    at = text.index(stop)
    found = one(llm, **letters, stop=["zz", stop, text[-6:]], include_stop_str_in_output=include)
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert found.text == text[: at + 3 if include else at]
    assert found.token_ids == [*text[: at + 3].encode()]
    held = one(llm, **letters, stop=text[-2:] + "z")
    assert held.text == text, "the tail that might have begun a stop string is given at the end"
    pieces = [delta.text for delta in llm.stream("Hello", params(**letters, stop=[stop]))]
    assert "".join(pieces) == text[:at]


def test_bad_words_never_appear(llm: jaxserve.LLM) -> None:
    """Of one token and of several, where almost nothing else could be said."""
    letters = {"allowed_token_ids": [*b"abc"], "max_tokens": 80, "temperature": 1.0}
    for seed in range(4):
        free = one(llm, **letters, seed=seed).text
        assert "ab" in free
        assert "cca" in free
        found = one(llm, **letters, seed=seed, bad_words=["ab", "cca"]).text
        assert len(found) == 80
        assert "ab" not in found
        assert "cca" not in found
        assert set(one(llm, **letters, seed=seed, bad_words=["b"]).text) == {"a", "c"}


def test_only_allowed_tokens_appear(llm: jaxserve.LLM) -> None:
    found = one(llm, seed=1, temperature=2.0, allowed_token_ids=[65, 66, 200], max_tokens=100)
    assert set(found.token_ids) == {65, 66, 200}


def test_bias_forces_and_forbids(llm: jaxserve.LLM) -> None:
    assert one(llm, seed=1, logit_bias={88: 100.0}, max_tokens=20).text == "X" * 20
    greedy = one(llm, temperature=0.0, max_tokens=30, ignore_eos=True)
    never = set(greedy.token_ids[:4])
    found = one(llm, temperature=0.0, max_tokens=30, ignore_eos=True, logit_bias=dict.fromkeys(never, -100.0))
    assert not never & set(found.token_ids)


def test_penalties_work_on_what_was_said(llm: jaxserve.LLM) -> None:
    """The strongest frequency penalty spreads the tokens; a strong repetition penalty spares the prompt's."""
    plain = one(llm, temperature=0.0, ignore_eos=True, max_tokens=60)
    spread = one(llm, temperature=0.0, ignore_eos=True, max_tokens=60, frequency_penalty=2.0, presence_penalty=2.0)
    assert len(set(spread.token_ids)) > len(set(plain.token_ids))
    prompt = sorted(set(range(3, 256)) - {100, 101})
    found = one(llm, prompt[:200], temperature=0.0, ignore_eos=True, max_tokens=20, repetition_penalty=100.0)
    assert len(set(found.token_ids)) == 20
    assert not set(found.token_ids) & set(prompt[:200])


# -- ends from outside ------------------------------------------------------------------------------------------------


class Listener:
    """Collects a request's deltas, and can wait for its end."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []
        self.done = threading.Event()
        self.begun = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.begun.set()
        if delta.request_done:
            self.done.set()


LONG = {"max_tokens": None, "ignore_eos": True, "seed": 1}


def test_an_abort_in_mid_stream_returns_everything(llm: jaxserve.LLM) -> None:
    """At any moment: still queued, in its prompt, in its answer; with several completions, each told once."""
    rng = random.Random(9)
    for delay in (0.0, 0.001, 0.01, 0.03) * 3:
        listeners = [Listener() for _ in range(7)]
        ids = []
        for listener in listeners:
            prompt = rng.choice(PROMPTS)
            n = rng.choice([1, 3])
            ids.append(llm.submit(prompt, params(**LONG, n=n, prompt_logprobs=1), on_delta=listener))
        time.sleep(delay)
        for request_id in rng.sample(ids, len(ids)):
            llm.abort(request_id)
        for listener in listeners:
            assert listener.done.wait(10)
            ends = [d for d in listener.deltas if d.finish_reason is not None]
            assert len({d.index for d in ends}) == len(ends)
            assert {d.finish_reason for d in ends} <= {"abort", "length"}
            assert listener.deltas[-1].request_done
        idle(llm)


def test_a_closed_stream_aborts_its_request(llm: jaxserve.LLM) -> None:
    stream = llm.stream("Hi", params(**LONG))
    next(stream)
    stream.close()
    idle(llm)


def test_aborting_strangers_is_ignored(llm: jaxserve.LLM) -> None:
    listener = Listener()
    request_id = llm.submit("Hi", params(), on_delta=listener)
    assert listener.done.wait(10)
    llm.abort(request_id)
    llm.abort("nobody")
    assert len(one(llm, max_tokens=3, ignore_eos=True).token_ids) == 3
    assert listener.deltas[-1].finish_reason != "abort"


def test_an_engine_that_wakes_up_late_has_not_stalled(llm: jaxserve.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """After minutes without work, a probe may come between a request and the engine's thread taking it."""
    engine = llm._built.engine
    idle(llm)
    for ask in (lambda: llm.abort("stranger"), lambda: llm.submit("Hi", SamplingParams(max_tokens=2), on_delta=print)):
        with monkeypatch.context() as patch:
            patch.setattr(engine._wake, "notify", lambda: None)  # it sleeps on
            engine._progress -= 1000
            ask()
            health = llm.health()
            assert not health.idle
            assert health.seconds_since_progress < 5
        with engine._wake:
            engine._wake.notify()
        idle(llm)


def test_a_callback_that_raises_hurts_only_its_own_request(llm: jaxserve.LLM, caplog: pytest.LogCaptureFixture) -> None:
    calls: queue.SimpleQueue[Delta] = queue.SimpleQueue()

    def broken(delta: Delta) -> None:
        calls.put(delta)
        raise RuntimeError("no ear")

    expected = one(llm, seed=2)
    neighbour = Listener()
    llm.submit("Hello", params(**LONG, n=2), on_delta=broken)
    llm.submit("Hello", params(seed=2), on_delta=neighbour)
    assert neighbour.done.wait(10)
    assert [t for d in neighbour.deltas for t in d.token_ids] == expected.token_ids
    idle(llm)
    assert calls.qsize() == 1, "not called again"
    assert "callback failed" in caplog.text


def test_a_full_queue_refuses_and_recovers(speaking: Path, programs_dir: str) -> None:
    with roomy(programs_dir, speaking, max_queued_requests=3) as small:
        running = [Listener() for _ in range(4)]
        for listener in running:
            small.submit("Hi", params(**LONG), on_delta=listener)
            assert listener.begun.wait(10)
        # The four slots are taken: three more may wait.
        listeners = [Listener() for _ in range(3)]
        for listener in listeners:
            small.submit("Hi", params(max_tokens=2, ignore_eos=True), on_delta=listener)
        with pytest.raises(QueueFullError, match="the most allowed is 3"):
            small.submit("Hi", params(), on_delta=Listener())
        assert small.health().waiting == 3
        for listener in running + listeners:
            assert listener.done.wait(20)
        assert len(one(small, max_tokens=2, ignore_eos=True).token_ids) == 2
        idle(small)


def test_closing_ends_open_requests_and_refuses_new_ones(speaking: Path, programs_dir: str) -> None:
    with roomy(programs_dir, speaking) as short:
        listeners = [Listener() for _ in range(8)]
        for listener in listeners:
            short.submit("Hi", params(**LONG), on_delta=listener)
    assert all(listener.done.wait(10) for listener in listeners)
    assert {listener.deltas[-1].finish_reason for listener in listeners} <= {"abort", "length"}
    with pytest.raises(jaxserve.EngineDeadError, match="closed"):
        short.submit("Hi", params(), on_delta=Listener())
    assert not short.health().alive


def test_a_broken_device_ends_the_engine_and_everybody_is_told(
    speaking: Path, programs_dir: str, caplog: pytest.LogCaptureFixture
) -> None:
    with roomy(programs_dir, speaking) as doomed:
        listeners = [Listener() for _ in range(6)]
        for listener in listeners:
            doomed.submit("Hi", params(**LONG), on_delta=listener)
        assert listeners[0].begun.wait(10)

        def fail(step: Any) -> Any:
            raise RuntimeError("the device is gone")

        doomed._built.engine.runner.collect = fail
        for listener in listeners:
            assert listener.done.wait(10)
            assert listener.deltas[-1].finish_reason == "error"
            assert "the device is gone" in listener.deltas[-1].error
        with pytest.raises(jaxserve.EngineDeadError, match="the device is gone"):
            doomed.generate("Hi")
        assert not doomed.health().alive
    assert "the engine has failed" in caplog.text


def test_whole_answers_are_not_made_of_errors(speaking: Path, programs_dir: str) -> None:
    """A batch whose engine fails under it raises."""
    with roomy(programs_dir, speaking) as doomed:
        runner, collects = doomed._built.engine.runner, []
        collect = runner.collect

        def fail(step: Any) -> Any:
            collects.append(step)
            if len(collects) == 5:
                raise RuntimeError("the device is gone")
            return collect(step)

        runner.collect = fail
        with pytest.raises(jaxserve.EngineDeadError, match="the device is gone"):
            doomed.generate(["Hi"] * 8, params(ignore_eos=True))


def test_urgent_requests_go_first(llm: jaxserve.LLM) -> None:
    """Lower priority numbers overtake those that wait."""
    order: list[int] = []
    done = threading.Semaphore(0)

    def listen(priority: int):
        def on_delta(delta: Delta) -> None:
            if delta.request_done:
                order.append(priority)
                done.release()

        return on_delta

    blockers = [Listener() for _ in range(4)]
    for listener in blockers:
        llm.submit("Hi", params(**LONG), on_delta=listener)
        assert listener.begun.wait(10)
    for priority in (3, 1, 2, 0, 3, 1):
        same = params(max_tokens=30, ignore_eos=True)
        llm.submit("Hi", same, on_delta=listen(priority), priority=priority)
    for _ in range(6):
        assert done.acquire(timeout=20)
    assert order == sorted(order)
