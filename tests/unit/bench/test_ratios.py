"""The statistics of paired runs."""

from __future__ import annotations

import re

import numpy as np
import pytest

from procengine.bench.compare import Side, make_side, table
from procengine.bench.ratios import compare_metric, figure_at, pair_order
from procengine.errors import ConfigError


def test_order_of_runs_favours_neither_side() -> None:
    assert "".join(pair_order(3)) == "ABBAAB"
    order = pair_order(4)
    assert sum(at for at, side in enumerate(order) if side == "A") == sum(
        at for at, side in enumerate(order) if side == "B"
    )


def test_ratios_are_those_of_pairs_and_not_of_medians() -> None:
    found = compare_metric([1.0, 10.0, 100.0], [2.0, 30.0, 100.0])
    assert found["ratios"] == [2.0, 3.0, 1.0]
    assert (found["a_median"], found["b_median"]) == (10.0, 30.0)
    assert (found["ratio_median"], found["ratio_min"], found["ratio_max"]) == (2.0, 1.0, 3.0)


def test_interval_is_that_of_the_bootstrap() -> None:
    """Of 3 values, the least is the median of 7 in 27 resamples: it is the 2.5 % point, and the largest the other."""
    assert compare_metric([1.0] * 3, [1.0, 2.0, 3.0])["ratio_ci95"] == [1.0, 3.0]
    assert compare_metric([2.0] * 5, [2.2] * 5)["ratio_ci95"] == [pytest.approx(1.1)] * 2
    assert compare_metric([1.0] * 2, [1.0, 2.0])["ratio_ci95"] is None, "two pairs say nothing"


def test_interval_covers_the_true_median_as_often_as_it_says() -> None:
    generator = np.random.default_rng(0)
    num_covered = 0
    for _ in range(60):
        low, high = compare_metric([1.0] * 15, generator.lognormal(0, 0.3, 15).tolist())["ratio_ci95"]
        num_covered += low <= 1.0 <= high
    assert 52 <= num_covered <= 60


def test_pair_without_a_ratio_is_left_out() -> None:
    found = compare_metric([0.0, 2.0], [5.0, 3.0])
    assert found["ratios"] == [None, 1.5] and found["ratio_median"] == found["ratio_max"] == 1.5
    none = compare_metric([0.0], [0.0])
    assert none["ratio_median"] is None and none["ratio_ci95"] is None


FIGURES = {"rate": 3, "ttft_ms": {"p50": 1.5, "p99": None}, "is_on": True}


def test_figure_is_found_by_its_path() -> None:
    assert (figure_at(FIGURES, "rate"), figure_at(FIGURES, "ttft_ms.p50")) == (3.0, 1.5)


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("speed", "--metrics: there is no 'speed' in the figures; they hold: rate, ttft_ms, is_on"),
        ("ttft_ms.p90", "there is no 'ttft_ms.p90' in the figures; ttft_ms hold: p50, p99"),
        ("rate.p50", "there is no 'rate.p50' in the figures; rate hold: a value, 3"),
        ("ttft_ms.p99", "--metrics: 'ttft_ms.p99' is no number in these figures, it is None"),
        ("ttft_ms", "'ttft_ms' is no number"),
        ("is_on", "'is_on' is no number"),
    ],
)
def test_figure_that_is_not_there_is_named(path: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        figure_at(FIGURES, path)


def test_options_of_a_side_are_read_as_a_shell_reads_them() -> None:
    assert make_side("A", "--name 'a b' --x=1", None) == Side("A", ("--name", "a b", "--x=1"), None)
    with pytest.raises(ConfigError, match=re.escape('--b: "\'" cannot be read as options: No closing quotation')):
        make_side("B", "'", None)


def test_table_shows_both_sides_and_their_ratio() -> None:
    result = {
        "num_pairs": 1,
        "sides": {"A": {"options": (), "path": "/x"}, "B": {"options": ("--y", "2"), "path": ""}},
        "metrics": {"rate": compare_metric([1000.0], [1500.0]), "tpot": compare_metric([0.0], [1.0])},
    }
    lines = table(result).splitlines()
    assert lines[:2] == ["A: no options of its own, in /x", "B: --y 2"]
    assert lines[-2].split() == ["rate", "1,000.000", "1,500.000", "1.5000", "1.5000", "1.5000", "-"]
    assert lines[-1].split() == ["tpot", "0.000", "1.000", "-", "-", "-", "-"]
