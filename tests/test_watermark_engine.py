"""The mark on a real engine: the same text by every way through it, what is said, and what is counted."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_engine import PROMPTS, company, params
from tiny import idle, roomy

import jaxserve
from jaxserve.request import RequestError, RequestOutput, Watermark
from jaxserve.watermark import prf
from jaxserve.watermark.config import SCHEME

KEY = {"philox": 20260802, "chacha": 2**200 + 20260802}
CONFIGS: dict[str, dict[str, Any]] = {
    "philox": {"keys": [{"id": "eu-1", "key": KEY["philox"]}]},
    "chacha": {
        "keys": [{"id": "eu-1", "key": KEY["chacha"]}],
        "prf": prf.CHACHA,
        "algorithm": "dual_key_gumbel",
        "alpha": 0.25,
        "context_width": 2,
        "deduplicate_contexts": "all",
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "seeded": {"seed": 21},
    "truncated": {"seed": 22, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "repeating": {"seed": 23, "allowed_token_ids": [65, 66, 67], "ignore_eos": True},
    "penalised": {"seed": 24, "presence_penalty": 0.5, "repetition_penalty": 1.2, "bad_words": ["e"]},
    "opted out": {"seed": 25, "watermarking": False},
    "greedy": {"temperature": 0.0},
}
Texts = dict[str, list[list[int]]]


def make(name: str, programs_dir: str, speaking: Path, **options: Any) -> jaxserve.LLM:
    """After a rotation: the scheme is that of the key in force, and the one before it had the default's."""
    fields = CONFIGS[name] | options.pop("mark", {})
    own = {field: fields.pop(field) for field in SCHEME if field in fields}
    fields["keys"] = [{"id": "eu-0", "key": 1}, {**fields["keys"][0], **own, "active_from": "2020-01-01"}]
    return roomy(programs_dir, speaking, watermark_config=json.dumps(fields), **options)


@pytest.fixture(scope="module", params=list(CONFIGS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def marked(name: str, programs_dir: str, speaking: Path) -> Iterator[jaxserve.LLM]:
    with make(name, programs_dir, speaking) as made:
        yield made
        idle(made)
        assert made.compilations_after_ready == 0


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def everything() -> tuple[list[list[int]], list[jaxserve.SamplingParams]]:
    pairs = [(prompt, params(**fields)) for fields in SETTINGS.values() for prompt in PROMPTS[:6]]
    return [p for p, _ in pairs], [s for _, s in pairs]


@pytest.fixture(scope="module")
def alone(marked: jaxserve.LLM) -> Texts:
    """One request at a time: what all other ways must repeat."""
    return {
        kind: [marked.generate(prompt, params(**fields))[0].outputs[0].token_ids for prompt in PROMPTS[:6]]
        for kind, fields in SETTINGS.items()
    }


def scores(name: str, ids: list[int], *, stream: int = 0, half: int = 0) -> np.ndarray:
    """-log(1 - u) of the tokens whose contexts are new, under the engine's key."""
    fields = CONFIGS[name]
    width, dual = fields.get("context_width", 4), "alpha" in fields
    key = prf.stream_key(KEY[name], stream)
    key = prf.dual_keys(key)[half] if dual else key
    text = [-1] * width + ids
    contexts = [tuple(text[i : i + width]) for i in range(len(ids))]
    new = [i for i, context in enumerate(contexts) if context not in contexts[:i]]
    scheme = fields.get("prf", prf.PHILOX)
    u = prf.uniforms(scheme, key, [contexts[i] for i in new], [ids[i] for i in new])
    return -np.log1p(-u)


# -- the mark is there ------------------------------------------------------------------------------------------------


def test_marked_text_scores_and_other_text_does_not(name: str, marked: jaxserve.LLM, llm: jaxserve.LLM) -> None:
    long = params(seed=5, max_tokens=150, ignore_eos=True)
    ours = tokens(marked.generate(PROMPTS[:4], long))
    plain = tokens(llm.generate(PROMPTS[:4], long))
    out = tokens(marked.generate(PROMPTS[:4], params(seed=5, max_tokens=150, ignore_eos=True, watermarking=False)))
    assert out == plain, "opting out gives what an engine without a mark gives"
    for ids, others in zip(ours, plain, strict=True):
        assert scores(name, ids).mean() > 2.5
        assert scores(name, others).mean() < 1.5
    if name == "chacha":
        a, b = (np.mean([scores(name, ids, half=half).mean() for ids in ours]) for half in (0, 1))
        assert a > b > 1.4


def test_completions_have_streams_of_their_own(name: str, marked: jaxserve.LLM) -> None:
    (output,) = marked.generate(PROMPTS[3], params(n=4, seed=9, max_tokens=120, ignore_eos=True))
    ids = [completion.token_ids for completion in output.outputs]
    assert [completion.watermark.stream for completion in output.outputs if completion.watermark] == [0, 1, 2, 3]
    assert len({tuple(each[:8]) for each in ids}) == 4
    table = [[scores(name, each, stream=stream).mean() for stream in range(4)] for each in ids]
    for i, row in enumerate(table):
        assert row[i] > 2.5
        assert max(row[:i] + row[i + 1 :]) < 1.5


# -- the same text ----------------------------------------------------------------------------------------------------


def expect(alone: Texts) -> list[list[int]]:
    return [ids for kind in SETTINGS for ids in alone[kind]]


def test_in_company_and_in_line(marked: jaxserve.LLM, alone: Texts) -> None:
    prompts, each = everything()
    assert tokens(marked.generate(prompts, each)) == expect(alone)
    others, wishes = company(3)
    found = tokens(marked.generate([*prompts, *others], [*each, *wishes]))
    assert found[: len(prompts)] == expect(alone)


def test_streamed(marked: jaxserve.LLM, alone: Texts) -> None:
    for kind, fields in SETTINGS.items():
        deltas = list(marked.stream(PROMPTS[2], params(**fields)))
        assert [token for delta in deltas for token in delta.token_ids] == alone[kind][2]
        assert len({delta.watermark for delta in deltas}) == 1, "every delta says what is done"
        assert deltas[0].watermark is not None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": False},
        {"max_num_batched_tokens": 32},
        {"prefix_caching": False},
        {"tensor_parallel": 2},
    ],
    ids=str,
)
def test_from_another_engine(
    options: dict[str, Any], name: str, programs_dir: str, speaking: Path, alone: Texts
) -> None:
    """After a restart, without overlap, in other chunks, without known prefixes, over other devices."""
    prompts, each = everything()
    with make(name, programs_dir, speaking, **options) as other:
        assert tokens(other.generate(prompts, each)) == expect(alone)
        assert tokens(other.generate(prompts[::-1], each[::-1])) == expect(alone)[::-1], "in slots of others"


def test_after_preemptions(name: str, programs_dir: str, speaking: Path, marked: jaxserve.LLM) -> None:
    with make(name, programs_dir, speaking, kv_cache_memory_bytes=33 * 8 * 768) as tight:
        for kind in ("seeded", "repeating", "penalised"):
            before = tight._built.engine.scheduler.preemptions
            each = params(**SETTINGS[kind] | {"max_tokens": 110, "ignore_eos": True})
            prompts = PROMPTS[:5] * 2
            ours = tokens(tight.generate(prompts, each))
            assert tight._built.engine.scheduler.preemptions > before
            assert ours == tokens(marked.generate(prompts, each)), kind
        idle(tight)


# -- what is said -----------------------------------------------------------------------------------------------------


def counted(llm: jaxserve.LLM) -> dict[str, float]:
    statuses = ("watermarked", "skipped", "not_watermarked")
    labels = {"model_name": llm.config.model, "engine": "0"}
    name = "jaxserve:watermark_requests_total"
    return {s: llm.metrics.get_sample_value(name, {**labels, "status": s}) for s in statuses}


def test_what_was_done_is_said_and_counted(marked: jaxserve.LLM) -> None:
    before = counted(marked)

    def said(**fields: Any) -> list[Watermark | None]:
        (output,) = marked.generate(PROMPTS[1], params(**fields))
        return [completion.watermark for completion in output.outputs]

    assert said(n=2, temperature=0.7) == [Watermark("watermarked", None, "eu-1", i) for i in (0, 1)]
    assert said(watermarking=True) == [Watermark("watermarked", None, "eu-1", 0)]
    assert said(temperature=0.0) == said(top_k=1, watermarking=True) == [Watermark("skipped", "greedy")]
    assert said(watermarking=False) == [Watermark("not_watermarked", "opted out")]
    assert said(max_tokens=0, echo=True) == [Watermark("skipped", "nothing to generate")]
    after = counted(marked)
    assert {s: after[s] - before[s] for s in after} == {"watermarked": 3, "skipped": 3, "not_watermarked": 1}


def test_an_engine_without_a_mark_says_and_pays_nothing(llm: jaxserve.LLM) -> None:
    (output,) = llm.generate(PROMPTS[1], params(seed=1, watermarking=False))
    assert output.outputs[0].watermark is None
    with pytest.raises(RequestError, match="the engine has no watermark_config") as caught:
        llm.generate(PROMPTS[1], params(watermarking=True))
    assert caught.value.param == "watermarking"
    assert llm._built.runner.state.mark is None
    assert not [program for program in llm._built.runner.compiled if "mark" in program]
    assert "watermark" not in llm.report()
    assert counted(llm) == dict.fromkeys(("watermarked", "skipped", "not_watermarked"))


def test_modes(programs_dir: str, speaking: Path, llm: jaxserve.LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    plain = tokens(llm.generate(PROMPTS[1], params(seed=3)))
    off_and_forgetful = {"mode": "off", "deduplicate_contexts_max_history": 1000}
    with make("philox", programs_dir, speaking, mark=off_and_forgetful) as off:
        assert caplog.text.count("deduplicate_contexts_max_history 1000 forgets") == 1, "a warning comes once"
        (output,) = off.generate(PROMPTS[1], params(seed=3))
        assert tokens([output]) == plain
        assert output.outputs[0].watermark == Watermark("not_watermarked", "switched off")
        assert not [program for program in off._built.runner.compiled if "mark" in program]
        with pytest.raises(RequestError, match="watermarking is switched off here"):
            off.generate(PROMPTS[1], params(watermarking=True))
    with make("philox", programs_dir, speaking, mark={"mode": "enforced", "unmarkable": "refuse"}) as strict:
        for fields in ({"watermarking": False}, {"temperature": 0.0}, {"min_p": 1.0}, {"allowed_token_ids": [65]}):
            with pytest.raises(RequestError, match="watermarking is enforced here") as caught:
                strict.generate(PROMPTS[1], params(**fields))
            assert caught.value.param == "watermarking"
        assert tokens(strict.generate(PROMPTS[1], params(seed=3))) != plain
        said = f"{strict.report()} {strict.config} {caplog.text}"
        assert str(KEY["philox"]) not in said
        assert strict.report()["watermark"]["keys"] == ["eu-0", "eu-1"]
