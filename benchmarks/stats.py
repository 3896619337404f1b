"""Summaries of samples, with the definitions that the peers' benchmarks use."""

from collections.abc import Iterable, Sequence

import numpy as np

PERCENTILES = (50, 90, 99)


def summary(samples: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Mean, median, population standard deviation and linearly interpolated percentiles, each times ``scale``.

    An empty dict where there are no samples: a figure that was not measured is not shown as zero.
    """
    if not samples:
        return {}
    values = np.asarray(samples, float) * scale
    points = {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {"mean": float(values.mean()), "median": float(np.median(values)), "std": float(values.std())} | points


def median(samples: Iterable[float]) -> float:
    return float(np.median(list(samples)))
