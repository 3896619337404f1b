"""How likely a score is without a mark: tails of sums of token scores, as natural logarithms, far into the tail.

Everything takes arrays of documents at once, and needs numpy alone: scipy's ``gammaincc`` underflows near 1e-308, has
no logarithm, and knows nothing of sums of unequal exponentials.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

type Floats = NDArray[np.float64]

HALVINGS = 80
"""Bisections of the bracket around a saddle point."""
PATH = np.arange(0, 26, 0.25)
"""Where the integrand is taken along its path, in standard deviations; what lies beyond is below 1e-14 of the whole."""
BLOCK = 4096
"""Documents whose paths are held in memory at a time."""


def log_gamma_tail(shape: ArrayLike, x: ArrayLike) -> Floats:
    """log Q(shape, x): the chance that a Gamma(shape, 1) variable exceeds x. A shape of 0 gives 0, that is certainty.

    A series for the other tail where x is below the mean, the continued fraction (Lentz) beyond; 1e-12 relative.
    """
    shapes, xs = np.broadcast_arrays(np.asarray(shape, float), np.asarray(x, float))
    found = np.zeros(shapes.shape)
    live = (shapes > 0) & (xs > 0)
    low = live & (xs <= shapes)
    if low.any():
        a, v = shapes[low], xs[low]
        found[low] = np.log1p(-np.minimum(np.exp(_log_power(a, v)) / a * _series(a, v), 1 - 1e-16))
    high = live & ~low
    if high.any():
        a, v = shapes[high], xs[high]
        found[high] = _log_power(a, v) + np.log(_fraction(a, v))
    return np.minimum(found, 0.0)


def _log_power(a: Floats, x: Floats) -> Floats:
    """log(x^a e^-x / Gamma(a)), by Stirling's series where a is large: the three terms alone would cancel."""
    big = np.maximum(a, 20.0)
    off = (x - big) / big
    series = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / big**2) / big**2) / big**2) / big
    found = big * (np.log1p(off) - off) + 0.5 * np.log(big / (2 * math.pi)) - series
    few = a < 20
    if few.any():
        found[few] = a[few] * np.log(x[few]) - x[few] - [math.lgamma(value) for value in a[few]]
    return found


def _series(a: Floats, x: Floats) -> Floats:
    """Sum of x^k / ((a + 1) ... (a + k))."""
    term, total, k = np.ones_like(x), np.ones_like(x), 0
    while (term > 1e-17 * total).any():
        k += 1
        term = term * (x / (a + k))
        total += term
    return total


def _fraction(a: Floats, x: Floats) -> Floats:
    """1 / (x + 1 - a - 1 (1 - a) / (x + 3 - a - 2 (2 - a) / (x + 5 - a - ...)))."""
    tiny = 1e-300
    b = x + 1 - a
    c = np.full_like(x, 1 / tiny)
    d = 1 / np.where(b == 0, tiny, b)
    found, i = d.copy(), 0
    while True:
        i += 1
        step = i * (a - i)
        b = b + 2
        d = b + step * d
        d = 1 / np.where(d == 0, tiny, d)
        c = b + step / c
        c = np.where(c == 0, tiny, c)
        found *= c * d
        if (np.abs(c * d - 1) < 1e-15).all() or i > 100_000:
            return found


def log_weighted_tail(n: ArrayLike, x: ArrayLike, alpha: float) -> Floats:
    """log P((1 - alpha) A + alpha B > x) for independent A, B ~ Gamma(n, 1): the dual key's sum, exact to 1e-9.

    The inversion of the Laplace transform, summed along a parabola through the saddle point (steepest descent), where
    the integrand falls like a Gaussian and the trapezoidal rule converges geometrically. Below the mean the other tail
    is integrated and subtracted from one.
    """
    counts, xs = np.broadcast_arrays(np.asarray(n, float), np.asarray(x, float))
    found = np.zeros(counts.size)
    live = np.flatnonzero((counts.ravel() > 0) & (xs.ravel() > 0))
    for start in range(0, len(live), BLOCK):
        part = live[start : start + BLOCK]
        found[part] = _weighted(counts.ravel()[part], xs.ravel()[part], alpha)
    return np.minimum(found, 0.0).reshape(counts.shape)


def _weighted(n: Floats, x: Floats, alpha: float) -> Floats:
    a, b = 1 - alpha, alpha
    upper = x > n

    def slope(s: Floats) -> Floats:
        return n * (a / (1 - a * s) + b / (1 - b * s)) - x - 1 / s

    edge = 1 / max(a, b)
    least = np.where(upper, 0.0, -(2 * n + 1) / x)  # at -(2n + 1)/x the slope is negative
    most = np.where(upper, edge, 0.0)
    s = _root(slope, least, most)
    second = n * ((a / (1 - a * s)) ** 2 + (b / (1 - b * s)) ** 2) + 1 / s**2
    third = 2 * n * ((a / (1 - a * s)) ** 3 + (b / (1 - b * s)) ** 3)
    sigma = 1 / np.sqrt(second)
    bend = third / (6 * second) * sigma**2
    way = s[:, None] + 1j * sigma[:, None] * PATH + bend[:, None] * PATH**2
    speed = sigma[:, None] - 2j * bend[:, None] * PATH  # ds / (i dt)

    def exponent(z: Any) -> Any:
        return -n[:, None] * np.log((1 - a * z) * (1 - b * z)) - z * x[:, None]  # n is whole: any branch will do

    peak = exponent(s[:, None] + 0j).real
    values = (np.exp(exponent(way) - peak) * speed / way).real
    whole = (values.sum(axis=1) - values[:, 0] / 2) * (PATH[1] - PATH[0]) / math.pi
    log_part = peak[:, 0] + np.log(np.abs(whole))
    return np.where(upper, log_part, np.log1p(-np.minimum(np.exp(np.minimum(log_part, 0)), 1 - 1e-16)))


def _root(slope: Callable[[Floats], Floats], least: Floats, most: Floats) -> Floats:
    """Where an increasing function is zero, between two arrays."""
    with np.errstate(divide="ignore", invalid="ignore"):
        for _ in range(HALVINGS):
            middle = (least + most) / 2
            below = slope(middle) < 0
            least, most = np.where(below, middle, least), np.where(below, most, middle)
    return (least + most) / 2


def log_weighted_tail_of_peer(n: ArrayLike, x: ArrayLike, alpha: float) -> Floats:
    """log Q(n / v, x / v), v = (1 - alpha)^2 + alpha^2: a Gamma of the same mean and variance, as the peer takes it.

    Its tail is too light: see docs/watermark.md for how much.
    """
    v = (1 - alpha) ** 2 + alpha**2
    return log_gamma_tail(np.asarray(n, float) / v, np.asarray(x, float) / v)


def log_normal_tail(z: Floats) -> Floats:
    """log P(Z > z) of a standard normal Z: half of Q(1/2, z^2 / 2), or one minus that."""
    half = log_gamma_tail(0.5, z**2 / 2) - math.log(2)
    return np.where(z >= 0, half, np.log1p(-np.exp(half)))
