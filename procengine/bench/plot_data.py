"""What the figures of a run show, as arrays. Pure: values in, values out.

Owns: binning and cumulation. Never does: draw (`plot`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.bench.timelines import Timeline

__all__ = ["Course", "bin_edges", "cumulative", "histogram", "over_time"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Course:
    """A run over time, in bins of equal width.

    Attributes:
        edges_s: float64 [bins + 1], seconds after the first request.
        tokens_per_s: float64 [bins], output tokens that came in the bin.
        num_running: float64 [bins], requests under way, averaged over the bin.
    """

    edges_s: Floats
    tokens_per_s: Floats
    num_running: Floats


def cumulative(values: Floats) -> tuple[Floats, Floats]:
    """The empirical distribution: values in order, and the share of samples that are at most as large."""
    ordered = np.sort(values)
    return ordered, np.arange(1, ordered.size + 1) / max(ordered.size, 1)


def bin_edges(samples: Sequence[Floats], num_bins: int) -> Floats:
    """float64 [num_bins + 1]: bins for several sets of samples, from the least to the highest 99.5th percentile.

    Not to the largest: one outlier would squeeze the rest into one bar.
    """
    present = [values for values in samples if values.size]
    low = min((float(values.min()) for values in present), default=0.0)
    high = max((float(np.percentile(values, 99.5)) for values in present), default=0.0)
    return np.linspace(low, high if high > low else low + 1.0, num_bins + 1)


def histogram(values: Floats, edges: Floats) -> Floats:
    """float64 [bins]: the share of the samples in each bin. The last one holds all beyond it too."""
    counts, _ = np.histogram(np.minimum(values, edges[-1]), edges)
    return counts / max(values.size, 1)


def over_time(timelines: Sequence[Timeline], num_bins: int) -> Course:
    """Tokens and running requests of the whole run; the mean of `tokens_per_s` is the run's throughput."""
    begin_ns = min(t.intended_ns for t in timelines)
    times_s = (_joined([t.token_times_ns for t in timelines]) - begin_ns) / 1e9
    counts = _joined([t.token_counts for t in timelines])
    ends_s = (np.array([max(t.end_ns, t.submitted_ns) for t in timelines]) - begin_ns) / 1e9
    starts_s = (np.array([t.submitted_ns for t in timelines]) - begin_ns) / 1e9
    edges = np.linspace(0.0, max(float(ends_s.max()), 1e-9), num_bins + 1)
    width = edges[1] - edges[0]
    tokens, _ = np.histogram(times_s, edges, weights=counts)
    return Course(edges, tokens / width, (_time_before(edges, starts_s) - _time_before(edges, ends_s)) / width)


def _time_before(edges: Floats, moments: Floats) -> Floats:
    """float64 [bins]: summed over the moments, how much of each bin lies after the moment."""
    after = np.clip(edges[1:, None] - moments[None, :], 0.0, edges[1] - edges[0])
    return np.asarray(after.sum(axis=1))


def _joined(lists: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *(np.array(values, np.int64) for values in lists)])
