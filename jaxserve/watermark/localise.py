"""Which spans of a document are marked, with the chance of any false span bounded for the whole document.

Intervals of many lengths, each shifted by an eighth of its length, are tested as documents of their own, and each
p-value is multiplied by the number of intervals (Bonferroni, over keys as well): the chance that any interval without
a mark is reported is at most the level, whatever else the document holds. The most surprising interval is taken, its
edges are moved to where the likelihood is greatest, and the search goes on beside it; or inside, where it has a gap.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxserve.watermark.statistics import Statistic
from jaxserve.watermark.tails import Floats

SHORTEST = 16
"""Scored tokens of the shortest interval: fewer cannot be surprising enough, among so many intervals."""
SHIFTS = 8
"""Intervals of a length that overlap."""
SCREEN = 2.0
"""Standard deviations above the mean below which an interval's tail is not worth computing: its p-value is above 1 %
before any correction."""

GAP = 8.0
"""How far the sum may fall behind half of a marked stretch's rate before the stretch is taken for two."""


@dataclass(frozen=True)
class Interval:
    """Scored tokens ``start`` to ``end`` (exclusive)."""

    start: int
    end: int
    p_value: float
    """Of the interval that gave rise to it, corrected for all intervals that were looked at."""


def _family(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of all intervals of a document with ``count`` scored tokens."""
    starts, ends, length = [], [], float(SHORTEST)
    while round(length) < count:
        size = round(length)
        places = np.arange(0, count - size + 1, max(1, size // SHIFTS))
        starts.append(places)
        ends.append(places + size)
        length *= math.sqrt(2)
    if count >= SHORTEST:
        starts.append(np.zeros(1, np.int64))
        ends.append(np.full(1, count, np.int64))
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *starts]), np.concatenate([none, *ends])


def marked_intervals(scores: Floats, statistic: Statistic, *, level: float, tests: int = 1) -> list[Interval]:
    """The marked spans of a document, in order and apart from each other; ``tests`` is the number of keys tried.

    ``level`` is the chance that a document without a mark has any.
    """
    starts, ends = _family(len(scores))
    sums = np.concatenate([[0.0], np.cumsum(scores)])
    size, total = ends - starts, sums[ends] - sums[starts]
    mean, deviation = statistic.moments()
    worth = np.flatnonzero(total - size * mean > SCREEN * deviation * np.sqrt(size))
    logs = statistic.log_tail(size[worth], total[worth]) + math.log(max(1, len(starts) * tests))
    order = np.argsort(logs, kind="stable")
    order = order[logs[order] < math.log(level)]
    starts, ends, p_values = starts[worth[order]], ends[worth[order]], np.exp(logs[order])
    found: list[Interval] = []
    open_: list[tuple[int, int, np.ndarray]] = [(0, len(scores), np.arange(len(order)))]
    while open_:
        low, high, those = open_.pop()
        those = those[(starts[those] >= low) & (ends[those] <= high)]
        if not len(those):
            continue
        start, end = int(starts[those[0]]), int(ends[those[0]])
        start, end, gap = _fitted(sums, mean, start, end, low, high)
        if gap is not None and ((ends[those] <= gap[0]) | (starts[those] >= gap[1])).any():
            start, end = gap
        else:
            found.append(Interval(start, end, float(p_values[those[0]])))
        open_ += [(low, start, those), (end, high, those)]
    return sorted(found, key=lambda one: one.start)


def _fitted(
    sums: Floats, mean: float, start: int, end: int, low: int, high: int
) -> tuple[int, int, tuple[int, int] | None]:
    """The interval with each edge moved, by up to its length, to where a token is worth half of what one inside is; and
    the stretch inside that speaks most against the mark, where it does so beyond chance."""
    size = end - start
    half = (mean + (sums[end] - sums[start]) / size) / 2
    low, high = max(low, start - size), min(high, end + size)
    drift = sums[low : high + 1] - half * np.arange(high + 1 - low)
    middle = (start + end) // 2 - low
    first = int(np.argmin(drift[:middle]))
    last = middle + 1 + int(np.argmax(drift[middle + 1 :]))
    inside = drift[first : last + 1]
    fall = np.maximum.accumulate(inside) - inside
    deepest = int(np.argmax(fall))
    gap = None
    if fall[deepest] >= GAP:
        highest = int(np.argmax(inside[: deepest + 1]))
        gap = (low + first + highest, low + first + deepest)
    return low + first, low + last, gap
