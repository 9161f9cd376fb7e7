"""Ratios, the best of a class, and targets, from made-up runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from procengine.bench.peers.comparison import Verdict, compare_engines, judge_targets, tables
from procengine.bench.peers.loads import WORKLOADS
from procengine.bench.peers.results import EngineResult, EngineSpec
from procengine.bench.peers.session import run_order
from procengine.bench.peers.targets import TARGETS

W2, W4, POISSON = WORKLOADS["w2"], WORKLOADS["w4"], WORKLOADS["w5-poisson"]


def engine(name: str, weights: str, is_ours: bool = False, **runs: Sequence[Any]) -> EngineResult:
    spec = EngineSpec(name, weights, [], frozenset(WORKLOADS), is_ours)
    return EngineResult(spec, runs_by_workload={key.replace("_", "-"): list(value) for key, value in runs.items()})


def rates(*values: float | None) -> list[dict[str, float] | None]:
    return [None if value is None else {"output_tokens_per_s": value} for value in values]


def walls(*values: float) -> list[dict[str, float]]:
    return [{"wall_s": value} for value in values]


def verdict_of(results: list[EngineResult], workload: str, weights: str | None, path: str | None = None) -> Verdict:
    (found,) = (
        one
        for one in judge_targets(results, [WORKLOADS[workload]])
        if one.target.weights == weights and path in (None, one.target.path)
    )
    return found


def test_orders_alternate() -> None:
    assert [run_order("ABC", number) for number in range(3)] == [list("ABC"), list("CBA"), list("ABC")]


def test_ratio_of_a_rate_is_ours_over_theirs_run_by_run() -> None:
    results = [engine("us", "bf16", True, w2=rates(100, 200, 300)), engine("peer", "bf16", w2=rates(50, 50, 300))]
    ours, peer = compare_engines(results, [W2])
    assert (ours.against, ours.ratios) == (None, ())
    assert (peer.against, peer.ratios) == ("us", (2.0, 4.0, 1.0))


def test_ratio_of_a_time_is_theirs_over_ours() -> None:
    results = [engine("us", "bf16", True, w4=walls(2, 4)), engine("peer", "bf16", w4=walls(5, 5))]
    assert compare_engines(results, [W4])[1].ratios == (2.5, 1.25)


def test_peer_is_compared_with_ours_of_its_class_else_with_the_first() -> None:
    results = [
        engine("default", "4-bit", True, w2=rates(1)),
        engine("ours in bf16", "bf16", True, w2=rates(2)),
        engine("a", "bf16", w2=rates(1)),
        engine("b", "8-bit", w2=rates(1)),
    ]
    assert {row.engine: row.against for row in compare_engines(results, [W2]) if not row.is_ours} == {
        "a": "ours in bf16",
        "b": "default",
    }


def test_runs_that_one_of_them_lacks_make_no_pair() -> None:
    """An engine that failed after its second run, and one that cannot do this at all."""
    results = [
        engine("us", "bf16", True, w2=rates(10, 30, 50)),
        engine("failed", "bf16", w2=rates(10, 10, None)),
        engine("cannot", "bf16", w2=rates(None, None, None)),
    ]
    assert [(row.engine, row.ratios) for row in compare_engines(results, [W2])] == [("us", ()), ("failed", (1.0, 3.0))]


def test_run_that_was_interrupted_between_two_engines_makes_no_pair() -> None:
    results = [engine("us", "bf16", True, w2=rates(10, 30)), engine("peer", "bf16", w2=rates(10))]
    assert compare_engines(results, [W2])[1].ratios == (1.0,)


def test_best_peer_of_a_class_and_of_all() -> None:
    results = [
        engine("us", "bf16", True, w2=rates(100, 110, 120)),
        engine("slow", "bf16", w2=rates(50, 50, 50)),
        engine("fast", "bf16", w2=rates(90, 80, 100)),
        engine("int8", "8-bit", w2=rates(100, 100, 100)),
    ]
    in_bf16, overall = verdict_of(results, "w2", "bf16"), verdict_of(results, "w2", None)
    assert in_bf16.peer is not None and in_bf16.peer.engine == "fast"
    assert in_bf16.ratios == pytest.approx((100 / 90, 110 / 80, 120 / 100)) and in_bf16.is_met is True
    assert overall.peer is not None and overall.peer.engine == "int8" and overall.is_met is False


def test_best_of_ours_counts_where_any_precision_will_do() -> None:
    results = [
        engine("us bf16", "bf16", True, w4=walls(3.0)),
        engine("us int8", "8-bit", True, w4=walls(2.0)),
        engine("peer", "bf16", w4=walls(2.6)),
    ]
    found = verdict_of(results, "w4", None)
    assert found.ours is not None and found.ours.engine == "us int8"
    assert found.ratios == (1.3,) and found.is_met is True
    assert found.first_ratios == pytest.approx((2.6 / 3.0,)), "what one gets without asking for a precision"


def test_target_without_a_pair_is_not_measured() -> None:
    results = [engine("us", "bf16", True, w2=rates(100)), engine("peer", "8-bit", w2=rates(10))]
    assert verdict_of(results, "w2", "bf16").is_met is None
    assert verdict_of(results, "w2", "bf16").first_ratios == ()
    assert verdict_of(results, "w2", None).is_met is True
    assert all(one.is_met is None for one in judge_targets(results, [POISSON]))


@pytest.mark.parametrize(("ttft_ms", "is_met"), [(200.0, True), (200.1, False)])
def test_limits_are_ours_alone_to_keep(ttft_ms: float, is_met: bool) -> None:
    runs = [{"ttft_ms": {"p99": ttft_ms}, "itl_ms": {"p99": 1.0}}]
    assert verdict_of([engine("us", "bf16", True, w5_poisson=runs)], "w5-poisson", None, "ttft_ms.p99").is_met is is_met


def test_targets_name_figures_that_exist() -> None:
    known = {(workload.name, figure.path) for workload in WORKLOADS.values() for figure in workload.figures}
    assert {(target.workload, target.path) for target in TARGETS} <= known
    assert all((target.min_ratio is None) != (target.limit is None) for target in TARGETS)


def test_tables_show_everybody_and_who_failed() -> None:
    failed = engine("broken", "bf16", w2=rates(None))
    failed.error = "it has ended"
    spinner = engine("peer", "bf16", w2=rates(80))
    spinner.is_stopped_when_idle, spinner.idle_share = True, 1.0
    text = tables([engine("us", "bf16", True, w2=rates(100)), spinner, failed], [W2, W4])
    assert "1.250" in text and "1.00 (stopped)" in text and "broken failed: it has ended" in text
    assert "w4" in text and "nobody has it" in text and "not measured" in text
    line = next(line for line in text.splitlines() if line.startswith("w2 output tok/s  bf16"))
    assert " ".join(line.split()) == "w2 output tok/s bf16 peer 80.0 us 100.0 1.250 1.250 .. 1.250 1.250 >= 1.2 x met"
