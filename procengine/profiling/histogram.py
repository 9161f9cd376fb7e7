"""`Histogram`: how often values fell into which bucket, and percentiles of weighted samples. Pure.

Owns: counting. Never does: know what the values mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Histogram", "percentiles"]


class Histogram:
    """Counts values by upper bound, as Prometheus does: a bucket holds what is at most its bound.

    Attributes:
        bounds: float64 [n], rising.
        counts: int64 [n + 1], by bucket; the last one has no bound.
        sum: of all values.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.array(bounds, np.float64)
        self.counts = np.zeros(len(bounds) + 1, np.int64)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many values there were."""
        return int(self.counts.sum())

    def observe(self, values: ArrayLike, weights: NDArray[np.int64] | None = None) -> None:
        """Count `values`, [n]; with `weights`, int64 [n], each of them so many times."""
        values = np.asarray(values, np.float64)
        weights = np.ones(values.size, np.int64) if weights is None else weights
        buckets = np.searchsorted(self.bounds, values, side="left")
        np.add.at(self.counts, buckets, weights)
        self.sum += float(values @ weights)


def percentiles(
    values: NDArray[np.float64], wanted: Sequence[float], weights: NDArray[np.int64] | None = None
) -> list[float | None]:
    """Percentiles (0 to 100) of `values`, float64 [n], each counted `weights` times; None of nothing."""
    if weights is None:
        return list(map(float, np.percentile(values, wanted))) if values.size else [None] * len(wanted)
    total = int(weights.sum())
    if not total:
        return [None] * len(wanted)
    order = np.argsort(values)
    ends = np.cumsum(weights[order])
    at = np.searchsorted(ends, np.array(wanted) / 100 * (total - 1), side="right")
    return list(map(float, values[order][at]))
