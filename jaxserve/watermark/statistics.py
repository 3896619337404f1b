"""What a document is scored by, and how surprising the sum is: one class a statistic.

All start from the evidence of a token under a key, ``r = -log(1 - u)``: exponential with mean 1 without a mark, larger
with one. ``scores`` turns it into the token's score; ``log_tail`` says how likely a sum of n scores is to be so large
without a mark.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxserve.watermark.tails import (
    Floats,
    log_gamma_tail,
    log_normal_tail,
    log_weighted_tail,
    log_weighted_tail_of_peer,
)

STATISTICS = ("sum", "likelihood", "both")
DUAL_TAILS = ("exact", "peer")


class Statistic(Protocol):
    """``evidence`` is ``[N, K]``, K = 2 for a dual key and 1 otherwise; n is whole numbers, x sums of n scores."""

    @property
    def name(self) -> str: ...

    def scores(self, evidence: Floats) -> Floats: ...

    def log_tail(self, n: Any, x: Any) -> Floats: ...

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation of a score without a mark."""
        ...


def statistics(name: str, alpha: float | None, dual_tail: str = "exact") -> list[Statistic]:
    """The statistics of a name, each of which is a try of its own. Raises ValueError for a name that is not known."""
    if name not in STATISTICS:
        raise ValueError(f"statistic must be one of {', '.join(STATISTICS)}, got {name!r:.80}")
    if dual_tail not in DUAL_TAILS:
        raise ValueError(f"dual_tail must be one of {', '.join(DUAL_TAILS)}, got {dual_tail!r:.80}")
    found: list[Statistic] = []
    if name != "likelihood":
        found.append(Sum() if alpha is None else WeightedSum(alpha, dual_tail))
    if name != "sum":
        found.append(Likelihood(alpha))
    return found


@dataclass(frozen=True)
class Sum:
    """The evidence itself (Aaronson 2022). n of it are Gamma(n, 1)."""

    name = "sum"

    def scores(self, evidence: Floats) -> Floats:
        return evidence[:, 0]

    def log_tail(self, n: Any, x: Any) -> Floats:
        return log_gamma_tail(n, x)

    def moments(self) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True)
class WeightedSum:
    """The evidence under a dual key's two halves, each weighted by how often it chooses."""

    name = "sum"

    alpha: float
    tail: str = "exact"

    def scores(self, evidence: Floats) -> Floats:
        return (1 - self.alpha) * evidence[:, 0] + self.alpha * evidence[:, 1]

    def log_tail(self, n: Any, x: Any) -> Floats:
        if self.tail == "peer":
            return log_weighted_tail_of_peer(n, x, self.alpha)
        return log_weighted_tail(n, x, self.alpha)

    def moments(self) -> tuple[float, float]:
        return 1.0, math.hypot(1 - self.alpha, self.alpha)


# -- the likelihood ratio ---------------------------------------------------------------------------------------------

MARKED = 0.3
"""Share of tokens taken to carry evidence; edits have spoilt the others. Text that nobody edited is the sum's."""
POWER = 0.65
"""How fast the number of tokens with a probability above v falls: like v^-POWER."""
LEAST, MOST, STEP = -6.0, 10.0, 1 / 32
"""The tilts that the null's table holds."""
VALUES = 2**24
"""Values that u takes, 1 / (VALUES + 1) apart; those of the other function lie close by."""
POINTS = 24
"""Largest values of u that are counted one by one; the others are integrated over."""
NODES = 48
CENTRE = 0.1
"""Standard deviations around the mean within which the saddle point formula loses digits, and Edgeworth's is used."""


@dataclass(frozen=True)
class Likelihood:
    """The logarithm of a likelihood ratio: u after a choice of probability p has density u^(1/p - 1) / p.

    Averaged over a text's choices that is the number of tokens with a probability above about v = 1 - u, plus one: a
    power of v, as vocabularies go (see docs/watermark.md). So ``log(1 - m + m (1 - c) v^-c)``, with m and c as above;
    under a dual key the second part is weighted between its halves. Small evidence can count against the mark only so
    much, so tokens whose mark an edit has spoilt drown the others less than in the sum.

    The null's tail is Barndorff-Nielsen's, from cumulants computed by quadrature; see the tests for its error.
    """

    name = "likelihood"

    alpha: float | None = None

    def scores(self, evidence: Floats) -> Floats:
        raised = (1 - POWER) * np.exp(POWER * evidence)
        if self.alpha is None:
            mixed = raised[:, 0]
        else:
            mixed = (1 - self.alpha) * raised[:, 0] + self.alpha * raised[:, 1]
        return np.log(1 - MARKED + MARKED * mixed)

    def log_tail(self, n: Any, x: Any) -> Floats:
        counts, sums = np.broadcast_arrays(np.asarray(n, float), np.asarray(x, float))
        return _null(self.alpha).log_tail(counts.ravel(), sums.ravel()).reshape(counts.shape)

    def moments(self) -> tuple[float, float]:
        _, mean, variance = _null(self.alpha).at(np.zeros(1))
        return float(mean[0]), math.sqrt(variance[0])


@dataclass(frozen=True)
class Null:
    """The distribution of a token's score without a mark: cumulant generating function and its first five derivatives
    on a grid of tilts, interpolated by Taylor's series (the step is small)."""

    tilts: Floats
    table: Floats
    """``[tilts, 6]``."""

    def at(self, s: Floats) -> tuple[Floats, Floats, Floats]:
        """K, K' and K'' at ``s``, which must lie on the grid."""
        row = np.clip(np.rint((s - LEAST) / STEP).astype(int), 0, len(self.tilts) - 1)
        off = s - self.tilts[row]
        terms = self.table[row]
        found = []
        for order in range(3):
            value = np.zeros_like(s)
            for degree in range(5 - order, -1, -1):
                value = value * off / (degree + 1) + terms[:, order + degree]
            found.append(value)
        return found[0], found[1], found[2]

    def log_tail(self, n: Floats, x: Floats) -> Floats:
        """log P(a sum of n scores exceeds x); 0 for n = 0. Beyond the table Chernoff's bound, which is larger."""
        found = np.zeros(n.shape)
        live = n > 0
        if not live.any():
            return found
        n, x = n[live], x[live]
        mean = x / n
        means = self.table[:, 1]
        s = np.interp(mean, means, self.tilts)  # increasing, since K is convex
        for _ in range(4):
            _, first, second = self.at(s)
            s = np.clip(s - (first - mean) / second, LEAST, MOST)
        value, _, second = self.at(s)
        drop = np.maximum(s * x - n * value, 0.0)
        w = np.sign(s) * np.sqrt(2 * drop)
        u = s * np.sqrt(n * second)
        centre = np.abs(w) < CENTRE
        safe = np.where(centre, 1.0, w)
        tail = log_normal_tail(safe + np.log(np.where(centre, 1.0, u) / safe) / safe)
        zero = round(-LEAST / STEP)
        variance, skew = self.table[zero, 2], self.table[zero, 3] / self.table[zero, 2] ** 1.5
        z = np.where(centre, (x - n * self.table[zero, 1]) / np.sqrt(n * variance), 0.0)
        density = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)
        middle = np.log(np.exp(log_normal_tail(z)) + density * skew / (6 * np.sqrt(n)) * (z**2 - 1))
        tail = np.where(centre, middle, tail)
        tail = np.where(mean > means[-1], -drop, tail)
        found[live] = np.where(mean < means[0], 0.0, np.minimum(tail, 0.0))
        return found


@functools.lru_cache(maxsize=64)
def _null(alpha: float | None) -> Null:
    evidence, weights = _uniform_nodes()
    if alpha is not None:
        pairs = np.stack(np.meshgrid(evidence[:, 0], evidence[:, 0], indexing="ij"), axis=-1)
        evidence, weights = pairs.reshape(-1, 2), np.outer(weights, weights).ravel()
    scores = Likelihood(alpha).scores(evidence)
    tilts = np.arange(round(LEAST / STEP), round(MOST / STEP) + 1).astype(np.float64) * STEP
    return Null(tilts, np.stack([_cumulants(scores, weights, tilt) for tilt in tilts]))


def _uniform_nodes() -> tuple[Floats, Floats]:
    """Values of the evidence ``[N, 1]`` and their weights, which stand for all values of u."""
    points = np.arange(1, POINTS + 1, dtype=float)
    ends = np.log(np.array([POINTS + 0.5, 1e3, 5e4, 5e5, 3e6, VALUES + 0.5]))
    nodes, weights = np.polynomial.legendre.leggauss(NODES // (len(ends) - 1) + 2)
    logs, parts = [np.log(points)], [np.ones(POINTS)]
    for low, high in itertools.pairwise(ends):
        place = (high + low) / 2 + (high - low) / 2 * nodes
        logs.append(place)
        parts.append((high - low) / 2 * weights * np.exp(place))
    found = np.concatenate(parts)
    return (math.log(VALUES + 1) - np.concatenate(logs))[:, None], found / found.sum()


def _cumulants(scores: Floats, weights: Floats, tilt: float) -> Floats:
    """K and its derivatives to the fifth: the cumulants of the tilted distribution."""
    high = (tilt * scores).max()
    tilted = weights * np.exp(tilt * scores - high)
    whole = tilted.sum()
    tilted /= whole
    mean = tilted @ scores
    off = scores - mean
    square = off * off
    m2, m3, m4, m5 = (float(tilted @ power) for power in (square, square * off, square * square, square * square * off))
    return np.array([high + math.log(whole), mean, m2, m3, m4 - 3 * m2**2, m5 - 10 * m3 * m2])
