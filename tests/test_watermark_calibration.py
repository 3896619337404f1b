"""p-values mean what they say: on 20,000 documents without a mark they are uniform, whatever the documents are.

Each document has a random key of its own. Documents that share phrases, looked at with one key, share their luck: then
p-values are right on average over keys, and not over documents; the last test shows that.
"""

import functools
import math
import re
from pathlib import Path

import numpy as np
import pytest

import jaxserve
from jaxserve.watermark import Scheme, detect_many
from jaxserve.watermark.evidence import windows
from jaxserve.watermark.prf import CHACHA, PHILOX, WORDS, as_uniform, candidate_words, context_words
from jaxserve.watermark.statistics import Likelihood, Statistic, Sum, WeightedSum

type Scored = tuple[np.ndarray, np.ndarray]
"""Each scored token's document, and its evidence ``[N, K]``."""

SUM = Sum()

KINDS = ("generated", "code", "templates", "one text")
EACH = 5000
LEVELS = (1e-2, 1e-3, 1e-4)
FIXTURES = Path(__file__).parent / "fixtures"


def generated(rng: np.random.Generator) -> np.ndarray:
    """A piece of what SmolLM2 said (256 answers and continuations at temperature 1), or of two answers."""
    ids = _answers()
    size = rng.integers(30, 220)
    cut = size if rng.random() < 0.5 else rng.integers(1, size)
    places = rng.integers(0, len(ids) - size, 2)
    return np.concatenate([ids[places[0] : places[0] + cut], ids[places[1] : places[1] + size - cut]])


@functools.cache
def _answers() -> np.ndarray:
    with np.load(FIXTURES / "smollm2_texts.npz") as held:
        return held["ids"].astype(np.int64)


@functools.cache
def _source() -> np.ndarray:
    """This project's own source as words, spaces and signs."""
    text = "".join(path.read_text() for path in sorted(Path(jaxserve.__file__).parent.glob("*.py")))
    words = re.findall(r"\w+|\s+|[^\w\s]", text)
    known = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return np.array([known[word] for word in words])


def code(rng: np.random.Generator) -> np.ndarray:
    ids = _source()
    size = rng.integers(30, 400)
    start = rng.integers(0, len(ids) - size)
    return ids[start : start + size]


def templates(rng: np.random.Generator) -> np.ndarray:
    """A form that is filled in a few times: the same phrases again and again."""
    form = np.arange(100, 140)
    parts = []
    for _ in range(rng.integers(2, 6)):
        filled = form.copy()
        filled[[3, 11, 19, 30]] = rng.integers(0, 12, 4)
        parts.append(filled)
    return np.concatenate(parts)


def one_text(rng: np.random.Generator) -> np.ndarray:
    return _answers()[:150]


MAKERS = dict(zip(KINDS, (generated, code, templates, one_text), strict=True))


def evidence(documents: list[np.ndarray], rng: np.random.Generator, width: int, prf: str, keys: int) -> Scored:
    """What ``Windows.evidence`` says, each document under keys of its own, which it does not offer."""
    document, columns, first = [], [[] for _ in range(keys)], 0
    for part in windows(documents, width, dedup=True):
        size = part.documents.stop - part.documents.start
        for column in columns:
            secret = rng.integers(0, 1 << 32, (WORDS, size)).astype(np.uint32)
            secret[2 if prf == PHILOX else WORDS :] = 0
            words = context_words(prf, secret[:, part.document], part.contexts.T)
            column.append(-np.log1p(-as_uniform(prf, candidate_words(prf, words, part.tokens))))
        document.append(part.document + first)
        first += size
    return np.concatenate(document), np.stack([np.concatenate(column) for column in columns], axis=1)


@functools.cache
def p_values(kind: str, measure: Statistic = SUM, count: int = EACH) -> np.ndarray:
    rng = np.random.default_rng(list(map(ord, kind)))
    found = []
    settings = [(1, PHILOX, 0.1), (2, PHILOX, 0.2), (4, PHILOX, 0.4), (4, CHACHA, 0.2), (8, PHILOX, 0.1)]
    for width, prf, share in settings:
        documents = [MAKERS[kind](rng) for _ in range(round(share * count))]
        document, drawn = evidence(documents, rng, width, prf, 2 if hasattr(measure, "alpha") and measure.alpha else 1)
        scored = np.bincount(document, minlength=len(documents))
        sums = np.bincount(document, measure.scores(drawn), minlength=len(documents))
        found.append(np.exp(measure.log_tail(scored, sums)))
    return np.concatenate(found)


def interval(count: int, level: float, doubt: float = 1e-4) -> tuple[int, int]:
    """How many of ``count`` uniform values lie below ``level``, but for the least likely ``doubt`` at either end."""
    k = np.arange(int(count * level + 12 * math.sqrt(count * level) + 30))
    choose = np.array([math.lgamma(count + 1) - math.lgamma(i + 1) - math.lgamma(count - i + 1) for i in k])
    below = np.cumsum(np.exp(choose + k * math.log(level) + (count - k) * math.log1p(-level)))
    return int(np.searchsorted(below, doubt)), int(np.searchsorted(below, 1 - doubt))


def kolmogorov(values: np.ndarray) -> float:
    """The p-value of the greatest distance from the uniform distribution (Kolmogorov's limit)."""
    ordered, n = np.sort(values), len(values)
    place = np.arange(1, n + 1) / n
    distance = max((place - ordered).max(), (ordered - place + 1 / n).max())
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)))


@pytest.mark.parametrize("kind", KINDS)
def test_p_values_are_uniform_on_every_kind_of_text(kind):
    found = p_values(kind)
    assert kolmogorov(found) > 1e-4
    for level in LEVELS:
        assert (found < level).sum() <= interval(len(found), level)[1]
        assert (1 - found < level).sum() <= interval(len(found), level)[1]


def test_shares_below_each_level_lie_in_their_binomial_interval():
    found = np.concatenate([p_values(kind) for kind in KINDS])
    assert len(found) == EACH * len(KINDS)
    for level in LEVELS:
        low, high = interval(len(found), level)
        assert low <= (found < level).sum() <= high


@pytest.mark.parametrize("measure", [WeightedSum(0.1), WeightedSum(0.3), Likelihood(), Likelihood(0.1)], ids=repr)
def test_the_other_tails_are_calibrated_as_well(measure):
    found = np.concatenate([p_values(kind, measure, EACH // 4) for kind in KINDS])
    assert kolmogorov(found) > 1e-4
    for level in LEVELS:
        assert (found < level).sum() <= interval(len(found), level)[1]


def test_without_deduplication_texts_that_repeat_look_marked_and_one_key_shares_its_luck():
    rng = np.random.default_rng(5)
    documents = [templates(rng) for _ in range(200)]
    schemes = [Scheme(key=int(rng.integers(1 << 63))) for _ in range(30)]
    loose = np.array([[one.p_value for one in detect_many(documents, [s], dedup=False)] for s in schemes])
    strict = np.array([[one.p_value for one in detect_many(documents, [s])] for s in schemes])
    assert (loose < 0.01).mean() > 0.02
    assert (strict < 0.1).mean() == pytest.approx(0.1, abs=0.08)  # over keys
    assert (strict < 0.1).mean(axis=1).std() > 4 * math.sqrt(0.1 * 0.9 / 200)  # and not under each
