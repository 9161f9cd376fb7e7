"""What the pictures show, and that there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from procengine.bench.plot import check_can_plot, plot_run
from procengine.bench.plot_data import bin_edges, cumulative, histogram, over_time
from procengine.bench.timelines import Timeline
from procengine.errors import ConfigError

S = 1_000_000_000


def test_cumulative_shares_end_at_one() -> None:
    values, shares = cumulative(np.array([3.0, 1.0, 2.0, 2.0]))
    assert values.tolist() == [1, 2, 2, 3] and shares.tolist() == [0.25, 0.5, 0.75, 1.0]
    assert [array.tolist() for array in cumulative(np.empty(0))] == [[], []]


def test_histogram_puts_an_outlier_into_the_last_bin() -> None:
    values = np.append(np.linspace(0, 10, 999), 1e6)
    edges = bin_edges([values], 10)
    shares = histogram(values, edges)
    assert edges[0] == 0 and edges[-1] < 11 and shares.sum() == pytest.approx(1)
    assert shares[-1] == pytest.approx(0.1, abs=0.02)


def test_bins_hold_several_sets_of_samples() -> None:
    a, b = np.array([1.0, 2.0]), np.array([5.0, 5.0])
    edges = bin_edges([a, b, np.empty(0)], 4)
    assert edges.tolist() == [1, 2, 3, 4, 5]
    assert histogram(a, edges).tolist() == [0.5, 0.5, 0, 0] and histogram(b, edges).tolist() == [0, 0, 0, 1]
    assert histogram(np.empty(0), edges).tolist() == [0] * 4


@pytest.mark.parametrize("samples", [[], [np.empty(0)], [np.array([2.0, 2.0])]])
def test_bins_of_nothing_or_of_one_value_have_a_width(samples: list[np.ndarray]) -> None:
    assert (np.diff(bin_edges(samples, 5)) > 0).all()


def test_course_counts_tokens_and_requests_under_way() -> None:
    begin = 7 * S
    timelines = [
        Timeline(begin, begin, [begin + S, begin + 3 * S], [4, 2], begin + 3 * S),
        Timeline(begin + S, begin + 2 * S, [begin + 4 * S], [6], begin + 4 * S),
    ]
    course = over_time(timelines, 4)
    assert course.edges_s.tolist() == [0, 1, 2, 3, 4]
    assert course.tokens_per_s.tolist() == [0, 4, 0, 8]  # a token on a border belongs to the bin that begins there
    assert course.tokens_per_s.mean() == 12 / 4
    assert course.num_running.tolist() == [1, 1, 2, 1], "from sending, not from the intended time"


def test_picture_is_made_of_completed_requests(tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    check_can_plot(path)
    timelines = [Timeline(0, 0, [S, 2 * S], [1, 1], 2 * S), Timeline(0, 0, [], [], 0, error="x")]
    plot_run(timelines, "a title", path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_what_cannot_be_plotted_is_said_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--plot: must be a \.png file, got .*run\.pdf"):
        check_can_plot(tmp_path / "run.pdf")
    with pytest.raises(ConfigError, match="--plot: there is no folder"):
        check_can_plot(tmp_path / "no" / "run.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--plot: needs matplotlib; pip install 'procengine\[plot\]'"):
        check_can_plot(tmp_path / "run.png")
