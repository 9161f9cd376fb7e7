"""Two series of paired runs as ratios with their spread. Pure.

Owns: the statistics of `bench compare`. Never does: run anything.
On a noisy machine neighbouring runs share most of the noise, so the ratio within a pair says more than two averages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ConfigError

__all__ = ["compare_metric", "figure_at", "pair_order"]

_NUM_RESAMPLES = 10_000
_MIN_PAIRS_FOR_INTERVAL = 3


def pair_order(num_pairs: int) -> list[str]:
    """The order of the runs: AB, BA, AB, ... A steady drift of the machine then favours neither side."""
    return [side for pair in range(num_pairs) for side in ("AB" if pair % 2 == 0 else "BA")]


def figure_at(figures: Mapping[str, Any], path: str) -> float:
    """The number at a dotted path, `ttft_ms.p50`.

    Raises:
        ConfigError: there is none; names what there is.
    """
    value: Any = figures
    at = ""
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = ", ".join(value) if isinstance(value, Mapping) else f"a value, {value!r}"
            raise ConfigError(f"--metrics: there is no {path!r} in the figures; {at or 'they'} hold: {known}")
        value, at = value[name], f"{at}.{name}" if at else name
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"--metrics: {path!r} is no number in these figures, it is {value!r}")
    return float(value)


def compare_metric(a: Sequence[float], b: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Medians of both series, and the ratios B/A of their pairs: median, range, 95 % interval of the median.

    A pair whose A is 0 has no ratio (None). The interval is the percentile bootstrap over the others (Efron, 1979);
    with fewer than 3 of them it is None, and so are median and range without any.
    """
    assert len(a) == len(b) > 0
    ratios = [y / x if x else None for x, y in zip(a, b, strict=True)]
    found = np.array([ratio for ratio in ratios if ratio is not None])
    return {
        "a_median": float(np.median(a)),
        "b_median": float(np.median(b)),
        "ratios": ratios,
        "ratio_median": float(np.median(found)) if found.size else None,
        "ratio_min": float(found.min()) if found.size else None,
        "ratio_max": float(found.max()) if found.size else None,
        "ratio_ci95": _interval(found, seed) if found.size >= _MIN_PAIRS_FOR_INTERVAL else None,
    }


def _interval(ratios: NDArray[np.float64], seed: int) -> list[float]:
    drawn = np.random.default_rng(seed).choice(ratios, (_NUM_RESAMPLES, ratios.size))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return [float(low), float(high)]
