"""Detection: the peer's vectors, tails against independent computations, what is scored, spans, and bad input."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxserve.watermark import Scheme, detect, detect_many
from jaxserve.watermark.evidence import as_ids, windows
from jaxserve.watermark.localise import marked_intervals
from jaxserve.watermark.prf import CHACHA, PHILOX, dual_keys, stream_key, uniforms
from jaxserve.watermark.statistics import Likelihood, Sum, WeightedSum
from jaxserve.watermark.tails import (
    log_gamma_tail,
    log_normal_tail,
    log_weighted_tail,
    log_weighted_tail_of_peer,
)
from tests.fake_llm import ByteTokenizer
from tests.watermarked import marked

VECTORS = json.loads((Path(__file__).parent / "fixtures" / "watermark_vectors.json").read_text())


# -- the peer's vectors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "vector", VECTORS["uniforms"], ids=lambda vector: f"{len(vector['context'])}-{vector['token']}"
)
def test_uniforms_are_the_peers_to_the_last_bit(vector):
    drawn = uniforms(VECTORS["prf"], int(vector["key"]), np.array([vector["context"]]), np.array([vector["token"]]))
    assert drawn[0] == vector["u"]


@pytest.mark.parametrize("case", ["deduplicated", "all_positions", "wrong_key"])
@pytest.mark.parametrize("vector", VECTORS["detections"], ids=lambda vector: vector["key"])
def test_detections_are_the_peers(vector, case):
    key = int(vector["key"]) ^ (case == "wrong_key")
    found = detect(
        token_ids=vector["tokens"],
        key=key,
        context_width=vector["context_width"],
        alpha=vector["alpha"],
        dedup=case != "all_positions",
    )
    expected = vector[case]
    assert found.num_scored_tokens == expected["num_scored_tokens"]
    assert found.score == pytest.approx(expected["score"], abs=1e-9)
    assert found.p_value == pytest.approx(expected["p_value"], rel=1e-6)
    assert found.is_watermarked == (expected["p_value"] < 0.01 and found.num_scored_tokens >= 16)


# -- tails ------------------------------------------------------------------------------------------------------------


def poisson_tail(n: int, x: float) -> float:
    """log Q(n, x) for a whole n: the logarithm of a sum of n Poisson probabilities."""
    terms = [k * math.log(x) - x - math.lgamma(k + 1) for k in range(n)]
    high = max(terms)
    return high + math.log(math.fsum(math.exp(term - high) for term in terms))


@pytest.mark.parametrize("n", [1, 2, 13, 19, 20, 21, 200, 3000])
def test_the_gamma_tail_is_a_sum_of_poisson_probabilities(n):
    for x in (0.2 * n, 0.9 * n, n, n + 0.5, 1.1 * n + 1, 1.5 * n + 5, 4 * n + 30):
        assert log_gamma_tail(n, x) == pytest.approx(poisson_tail(n, x), rel=1e-11, abs=1e-11)


def test_the_gamma_tail_goes_on_where_floats_end_and_begins_with_certainty():
    logs = log_gamma_tail([1, 1, 0, 5, 50], [800.0, 1e6, 3.0, 0.0, 2000.0])
    assert logs[:4].tolist() == pytest.approx([-800, -1e6, 0, 0], rel=1e-12)
    assert logs[4] == pytest.approx(poisson_tail(50, 2000.0), rel=1e-12)
    assert log_gamma_tail(1_000_000, 1_000_000.0) == pytest.approx(math.log(0.5), abs=1e-3)


def mixture_tail(n: int, x: float, alpha: float) -> float:
    """log P((1 - alpha) A + alpha B > x): the wider exponential is a geometric number of the narrower one's size."""
    wide, narrow = max(alpha, 1 - alpha), min(alpha, 1 - alpha)
    k = np.arange(20_000 if wide > narrow else 1)
    choose = np.array([math.lgamma(n + i) - math.lgamma(n) - math.lgamma(i + 1) for i in k])
    rest = k * np.log1p(-narrow / wide) if wide > narrow else 0.0 * k
    logs = choose + n * math.log(narrow / wide) + rest + log_gamma_tail(2 * n + k, x / narrow)
    high = logs.max()
    return high + math.log(np.exp(logs - high).sum())


@pytest.mark.parametrize("alpha", [0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("n", [1, 3, 16, 200])
def test_the_weighted_tail_is_a_mixture_of_gamma_tails(alpha, n):
    deviation = math.sqrt(n) * math.hypot(alpha, 1 - alpha)
    for x in [n + z * deviation for z in (-3, -1, -0.05, 0, 0.05, 1, 4, 12) if n + z * deviation > 0]:
        exact = mixture_tail(n, x, alpha)
        assert float(log_weighted_tail(n, x, alpha)) == pytest.approx(exact, rel=1e-9, abs=1e-9)


def test_the_peers_tail_is_too_light_and_exact_only_for_equal_shares():
    n, x = 100, 155.0
    for alpha in (0.05, 0.1, 0.3):
        assert log_weighted_tail_of_peer(n, x, alpha) < log_weighted_tail(n, x, alpha) - 0.05
    assert log_weighted_tail_of_peer(n, x, 0.5) == pytest.approx(float(log_weighted_tail(n, x, 0.5)), abs=1e-9)


def test_the_normal_tail():
    for z in (-8.0, -1.0, 0.0, 0.3, 5.0, 20.0):
        assert float(log_normal_tail(np.array(z))) == pytest.approx(
            math.log(math.erfc(z / math.sqrt(2)) / 2), abs=1e-12
        )


def convolved_tail(n: int, tilt: float) -> tuple[np.ndarray, np.ndarray]:
    """Sums of n likelihood scores around the tilt's mean, and log P(sum > that), by convolution of all values of u."""
    step, values = 2e-3, np.arange(1, 2**24 + 1, 16, dtype=float) + 7.5
    scores = Likelihood().scores((math.log(2**24 + 1) - np.log(values))[:, None])
    # The largest values of u one by one.
    scores = np.concatenate(
        [scores[1:], Likelihood().scores((math.log(2**24 + 1) - np.log(np.arange(1, 17)))[:, None])]
    )
    weights = np.concatenate([np.full(len(values) - 1, 16.0), np.ones(16)])
    weights = weights / weights.sum() * np.exp(tilt * scores)
    norm = weights.sum()
    place = (scores - scores.min()) / step
    low = np.floor(place).astype(int)
    single = np.bincount(low, weights * (1 - place + low), minlength=low.max() + 2)
    single += np.bincount(low + 1, weights * (place - low), minlength=len(single))
    size = 1 << (n * len(single)).bit_length()
    dense = np.fft.irfft(np.fft.rfft(single / norm, size) ** n, size)
    sums = n * scores.min() + step * np.arange(size)
    mean = dense @ sums
    deviation = math.sqrt(dense @ (sums - mean) ** 2)
    chosen = [int(np.searchsorted(sums, mean + z * deviation)) for z in (-1, -0.02, 0.3, 1)]
    beyond = [np.exp(-tilt * (sums[i:] - sums[i])) @ dense[i:] for i in chosen]
    logs = [n * math.log(norm) + math.log(b) - tilt * sums[i] for i, b in zip(chosen, beyond, strict=True)]
    return sums[chosen] - step / 2, np.array(logs)


@pytest.mark.parametrize(("n", "within"), [(16, 0.07), (64, 0.013)])
@pytest.mark.parametrize("tilt", [0.0, 0.5, 1.0])
def test_the_likelihoods_tail_is_that_of_the_convolution(n, within, tilt):
    sums, logs = convolved_tail(n, tilt)
    off = Likelihood().log_tail(np.full(4, n), sums) - logs
    assert off.max() < within
    assert off.min() > -0.01  # never much too sure


@pytest.mark.parametrize("measure", [Sum(), WeightedSum(0.1), WeightedSum(0.1, "peer"), Likelihood(), Likelihood(0.1)])
def test_tails_fall_and_moments_are_right(measure):
    rng = np.random.default_rng(3)
    dual = getattr(measure, "alpha", None) is not None
    scores = measure.scores(rng.exponential(size=(200_000, 2 if dual else 1)))
    mean, deviation = measure.moments()
    assert scores.mean() == pytest.approx(mean, abs=4 * deviation / math.sqrt(200_000))
    assert scores.std() == pytest.approx(deviation, rel=0.03)
    n = 40
    x = n * mean + np.linspace(-6, 40, 400) * deviation * math.sqrt(n)
    logs = measure.log_tail(np.full(400, n), x)
    assert (np.diff(logs) <= 1e-9).all()
    assert logs[0] == pytest.approx(0, abs=1e-4)
    assert measure.log_tail(np.zeros(1), np.zeros(1))[0] == 0


# -- what is scored ---------------------------------------------------------------------------------------------------


def test_a_context_counts_once_in_each_document_and_its_first_token_is_scored():
    documents = [as_ids(ids) for ids in ([5, 6, 5, 6, 5, 7], [5, 6, 5], [], [9])]
    [part] = windows(documents, 1, dedup=True)
    assert list(zip(part.document.tolist(), part.position.tolist(), strict=True)) == [
        *((0, 0), (0, 1), (0, 2)),
        *((1, 0), (1, 1), (1, 2)),
        (3, 0),
    ]
    assert part.contexts[:, 0].tolist() == [2**32 - 1, 5, 6, 2**32 - 1, 5, 6, 2**32 - 1]
    [whole] = windows(documents, 1, dedup=False)
    assert len(whole.tokens) == 10


def test_blocks_change_nothing(monkeypatch):
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50, size) for size in (0, 300, 5, 40, 0, 900, 1)]
    scheme = [Scheme(key=3, context_width=2)]
    whole = detect_many(documents, scheme)
    monkeypatch.setattr("jaxserve.watermark.evidence.BLOCK", 64)
    for again in (detect_many(documents, scheme), [detect_many([one], scheme)[0] for one in documents]):
        assert [one.score for one in again] == [one.score for one in whole]
        assert [one.log10_p_value for one in again] == pytest.approx([one.log10_p_value for one in whole], rel=1e-12)


def test_token_scores_add_up_and_repeats_have_none():
    ids = [1, 2, 3, 1, 2, 3, 1, 2]
    found = detect(token_ids=ids, key=8, context_width=2, token_scores=True)
    assert [score is None for score in found.token_scores] == [False] * 5 + [True] * 3
    assert sum(score for score in found.token_scores if score is not None) == pytest.approx(found.score)


def test_text_is_tokenized_without_special_tokens():
    text = "Grüße, world"
    found = detect(text, key=1, tokenizer=ByteTokenizer(add_bos=True))
    assert found.num_tokens == len(text.encode())
    assert found == detect(token_ids=list(text.encode()), key=1)


# -- marked text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prf", [PHILOX, CHACHA])
@pytest.mark.parametrize("alpha", [None, 0.1])
@pytest.mark.parametrize("statistic", ["sum", "likelihood"])
def test_marked_text_is_found_under_its_key_alone(prf, alpha, statistic):
    scheme = Scheme(key=77, prf=prf, alpha=alpha)
    ids = marked(120, scheme, seed=1)
    [found] = detect_many([ids], [scheme], statistic=statistic)
    assert found.is_watermarked
    assert found.p_value < 1e-12
    [other] = detect_many([ids], [Scheme(key=78, prf=prf, alpha=alpha)], statistic=statistic)
    assert other.p_value > 1e-3


def test_the_key_and_the_stream_are_named_and_every_candidate_is_paid_for():
    schemes = [Scheme(key=key, name=f"k{key}") for key in (1, 2, 3)]
    ids = marked(80, Scheme(key=stream_key(2, 5)), seed=2)
    [alone] = detect_many([ids], [Scheme(key=stream_key(2, 5))])
    [found] = detect_many([ids], schemes, streams=8)
    assert (found.key_name, found.stream, found.num_candidates) == ("k2", 5, 24)
    assert found.log10_p_value == pytest.approx(alone.log10_p_value + math.log10(24))
    [missed] = detect_many([ids], schemes, streams=5)
    assert not missed.is_watermarked


def test_p_values_are_at_most_one_and_underflow_to_a_logarithm():
    ids = marked(2000, Scheme(key=4), seed=3)
    [found] = detect_many([ids], [Scheme(key=4)])
    assert found.p_value == 0.0
    assert found.log10_p_value < -330
    [empty] = detect_many([[]], [Scheme(key=4), Scheme(key=5)])
    assert (empty.p_value, empty.num_scored_tokens, empty.is_watermarked) == (1.0, 0, False)


def test_little_evidence_is_no_verdict():
    scheme = Scheme(key=4)
    ids = marked(12, scheme, seed=3)
    [found] = detect_many([ids], [scheme])
    assert found.p_value < 0.01
    assert not found.enough_evidence
    assert not found.is_watermarked
    assert detect_many([ids], [scheme], min_scored_tokens=12)[0].is_watermarked


def evidence_of(probabilities: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Evidence of tokens that were chosen with these probabilities: u is Beta(1 / p, 1)."""
    return -np.log(-np.expm1(np.log(rng.random(probabilities.shape)) * probabilities))


@pytest.mark.parametrize(("kept", "better", "worse"), [(1.0, Sum(), Likelihood()), (0.17, Likelihood(), Sum())])
def test_the_likelihood_is_for_edited_text_and_the_sum_for_text_as_it_was(kept, better, worse):
    rng, n = np.random.default_rng(4), 400
    probabilities = np.exp(-rng.exponential(3.4, (200, n)))  # such as SmolLM2's
    evidence = np.where(rng.random((200, n)) < kept, evidence_of(probabilities, rng), rng.exponential(size=(200, n)))

    def mean_log(measure) -> float:
        sums = measure.scores(evidence.reshape(-1, 1)).reshape(200, n).sum(axis=1)
        return measure.log_tail(np.full(200, n), sums).mean()

    assert mean_log(better) < 1.1 * mean_log(worse) < 0


def test_both_statistics_are_two_tries():
    scheme = Scheme(key=11)
    documents = [marked(200, scheme, seed=seed, unmarked=seed / 8) for seed in range(8)]
    found = {name: detect_many(documents, [scheme], statistic=name) for name in ("sum", "likelihood", "both")}
    logs = {name: np.array([one.log10_p_value for one in some]) for name, some in found.items()}
    assert logs["both"] == pytest.approx(np.minimum(0, np.minimum(logs["sum"], logs["likelihood"]) + math.log10(2)))
    for one, left, right in zip(found["both"], found["sum"], found["likelihood"], strict=True):
        assert one.statistic == ("sum" if left.log10_p_value <= right.log10_p_value else "likelihood")


# -- spans ------------------------------------------------------------------------------------------------------------


def test_marked_spans_are_found_where_they_are():
    rng, scheme = np.random.default_rng(5), Scheme(key=21, name="mine")
    plain = [rng.integers(0, 5000, 300) for _ in range(3)]
    first, second = marked(120, scheme, seed=6), marked(200, scheme, seed=7)
    ids = np.concatenate([plain[0], first, plain[1], second, plain[2]])
    [found] = detect_many([ids], [scheme], spans=True)
    assert [(span.key_name, span.stream) for span in found.spans] == [("mine", 0)] * 2
    for span, (start, end) in zip(found.spans, [(300, 420), (720, 920)], strict=True):
        assert abs(span.start - start) <= 12
        assert abs(span.end - end) <= 12
        assert span.p_value < 1e-6


@pytest.mark.parametrize("measure", [Sum(), WeightedSum(0.1), Likelihood()])
def test_documents_without_a_mark_have_no_span_but_for_the_level(measure):
    rng, wrong, documents, level = np.random.default_rng(9), 0, 400, 0.05
    for _ in range(documents):
        evidence = rng.exponential(size=(300, 2 if isinstance(measure, WeightedSum) else 1))
        wrong += bool(marked_intervals(measure.scores(evidence), measure, level=level))
    assert wrong <= level * documents + 3 * math.sqrt(level * documents)


def test_spans_pay_for_every_key_that_was_tried():
    """By chance a key out of many finds a span in text without a mark: no more often than ``threshold`` in all."""
    rng, level = np.random.default_rng(11), 0.3
    documents = [rng.integers(0, 5000, 80) for _ in range(60)]
    schemes = [Scheme(key=100 + i) for i in range(16)]
    apart = [detect_many(documents, [scheme], spans=True, threshold=level) for scheme in schemes]
    together = detect_many(documents, schemes, spans=True, threshold=level)
    alone = sum(any(found[i].spans for found in apart) for i in range(len(documents)))
    wrong = sum(bool(found.spans) for found in together)
    allowed = level * len(documents)
    assert wrong <= allowed < alone, (wrong, alone)
    text = marked(200, schemes[3], seed=6)
    [one], [many] = (detect_many([text], tried, spans=True)[0].spans for tried in (schemes[3:4], schemes))
    assert many.p_value == pytest.approx(16 * one.p_value)


def test_short_documents_have_no_spans():
    assert marked_intervals(np.full(15, 9.0), Sum(), level=0.01) == []
    assert [(one.start, one.end) for one in marked_intervals(np.full(16, 9.0), Sum(), level=0.01)] == [(0, 16)]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({}, "text or token_ids"),
        ({"text": "a", "token_ids": [1]}, "text or token_ids"),
        ({"text": "a"}, "tokenizer"),
        ({"text": 3}, "text must be"),
        ({"text": "a", "tokenizer": "smollm2-135m"}, "tokenizer must be an object with an encode method.*got str"),
        ({"text": "\ud800", "tokenizer": ByteTokenizer()}, "surrogate"),
        ({"token_ids": "abc"}, "token_ids must be"),
        ({"token_ids": [1, 2.0]}, r"token_ids\[1\]"),
        ({"token_ids": [True]}, r"token_ids\[0\]"),
        ({"token_ids": [3, -1]}, r"token_ids\[1\]"),
        ({"token_ids": [2**31]}, r"token_ids\[0\]"),
        ({"token_ids": [2**70]}, r"token_ids\[0\]"),
        ({"token_ids": np.zeros((2, 2), int)}, "token_ids must be"),
        ({"token_ids": np.zeros(2)}, "token_ids must be"),
        ({"token_ids": np.array([4, -1])}, r"token_ids\[1\]"),
        ({"token_ids": [1], "context_width": 0}, "context_width"),
        ({"token_ids": [1], "context_width": 2.0}, "context_width"),
        ({"token_ids": [1], "context_width": 65}, "context_width"),
        ({"token_ids": [1], "alpha": 0}, "alpha"),
        ({"token_ids": [1], "alpha": 1.0}, "alpha"),
        ({"token_ids": [1], "alpha": math.nan}, "alpha"),
        ({"token_ids": [1], "alpha": "0.1"}, "alpha"),
        ({"token_ids": [1], "prf": "md5"}, "prf"),
        ({"token_ids": [1], "key": 2**64}, "key must"),
        ({"token_ids": [1], "key": 2**255}, 'needs "prf": "chacha20-threefry-v1"'),
        ({"token_ids": [1], "key": "0x"}, "key must"),
        ({"token_ids": [1], "key": -1}, "key must"),
        ({"token_ids": [1], "key": "12345678901h"}, "key must"),
        ({"token_ids": [1], "streams": 0}, "streams"),
        ({"token_ids": [1], "threshold": 1}, "threshold"),
        ({"token_ids": [1], "threshold": "0.1"}, "threshold"),
        ({"token_ids": [1], "min_scored_tokens": -1}, "min_scored_tokens"),
        ({"token_ids": [1], "statistic": "z"}, "statistic"),
        ({"token_ids": [1], "dual_tail": "z"}, "dual_tail"),
    ],
)
def test_bad_arguments_are_named(arguments, names):
    with pytest.raises(ValueError, match=names) as caught:
        detect(**{"key": 1} | arguments)
    assert "12345678901" not in str(caught.value)


def test_a_key_may_be_text_as_in_a_configuration():
    number = detect(token_ids=[1, 2, 3], key=42)
    assert number == detect(token_ids=[1, 2, 3], key="0x2A\n") == detect(token_ids=[1, 2, 3], key="42")


def test_keys_are_in_no_repr():
    scheme = Scheme(key=123456789, name="a")
    assert "123456789" not in repr(scheme)
    assert str(dual_keys(123456789)[0]) not in repr(scheme)


def test_the_detector_imports_neither_jax_nor_scipy():
    code = (
        "import sys, jaxserve.watermark as w; w.detect(token_ids=[1] * 9, key=1, alpha=.1, statistic='likelihood');"
        "print([m for m in ('jax', 'jaxlib', 'scipy') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
