"""Counters and percentiles from the nanoseconds that the frontend brings."""

from __future__ import annotations

import pytest

from procengine.step_stats import StepStats

US = 1000


def run_steps(stats: StepStats, steady: list[bool], *, cpu_us: int = 100, round_trip_us: int = 300) -> None:
    for step_id, is_steady in enumerate(steady):
        now = step_id * 1000 * US
        stats.step_sent(0, step_id, is_steady, step_id * cpu_us * US, now)
        stats.result_received(0, step_id, True, 200 * US, now + round_trip_us * US)


def test_nothing_sent_nothing_measured() -> None:
    nothing = {"p50": None, "p99": None}
    assert StepStats().values(1) == {
        "num_steps": 0,
        "frontend_us_per_step": nothing,
        "frontend_us_per_steady_step": nothing,
        "round_trip_us": nothing,
        "worker_busy_share": 0.0,
    }


def test_percentiles_are_of_cpu_time_between_steps_and_of_round_trips() -> None:
    stats = StepStats()
    run_steps(stats, [True] * 5)
    assert stats.values(1) == {
        "num_steps": 5,
        "frontend_us_per_step": {"p50": 100.0, "p99": 100.0},
        "frontend_us_per_steady_step": {"p50": 100.0, "p99": 100.0},
        "round_trip_us": {"p50": 300.0, "p99": 300.0},
        "worker_busy_share": pytest.approx(5 * 200 / (4 * 1000 + 300)),
    }


def test_busy_share_is_of_all_workers() -> None:
    stats = StepStats()
    run_steps(stats, [True] * 5)
    assert stats.values(2)["worker_busy_share"] == stats.values(1)["worker_busy_share"] / 2


def test_step_is_steady_only_after_a_steady_one() -> None:
    stats = StepStats()
    for step_id, (is_steady, cpu_us) in enumerate([(True, 0), (False, 1), (True, 10), (True, 100), (True, 100)]):
        stats.step_sent(0, step_id, is_steady, cpu_us * US, 0)
    values = stats.values(1)
    assert values["frontend_us_per_steady_step"] == {"p50": 45.0, "p99": 89.1}
    assert values["num_steps"] == 5


def test_round_trip_ends_with_the_last_result_of_a_steady_step() -> None:
    stats = StepStats()
    stats.step_sent(0, 0, False, 0, 0)
    stats.step_sent(1, 0, True, 0, 0)
    stats.result_received(0, 0, True, 0, 999 * US)
    stats.result_received(1, 0, False, 0, 10 * US)
    stats.result_received(1, 0, True, 0, 20 * US)
    assert stats.values(2)["round_trip_us"] == {"p50": 20.0, "p99": 20.0}


def test_reset_forgets_what_was_measured_and_what_is_in_flight_spoils_nothing() -> None:
    stats = StepStats()
    run_steps(stats, [True] * 5)
    stats.step_sent(0, 5, True, 0, 5000 * US)
    stats.reset()
    stats.result_received(0, 5, True, 0, 9_000_000 * US)
    assert stats.values(1) == StepStats().values(1) | {"worker_busy_share": 0.0}
    run_steps(stats, [True] * 3, cpu_us=7)
    values = stats.values(1)
    assert (values["num_steps"], values["frontend_us_per_step"]) == (3, {"p50": 7.0, "p99": 7.0})
    assert values["round_trip_us"] == {"p50": 300.0, "p99": 300.0}


def test_ring_keeps_the_newest_steps() -> None:
    stats = StepStats()
    count = 1 << 16
    for step_id in range(count + 1):
        stats.step_sent(0, step_id, True, 0, 0)
    for step_id in range(count):
        stats.step_sent(0, step_id, True, (step_id + 1) * 5 * US, 0)
    values = stats.values(1)
    assert values["num_steps"] == 2 * count + 1
    assert values["frontend_us_per_step"] == {"p50": 5.0, "p99": 5.0}


def test_asking_again_costs_little_and_news_are_seen() -> None:
    """Of few samples every value is new; of many, percentiles may be as old as a hundred steps. Counters never are."""
    stats = StepStats()
    run_steps(stats, [True] * 20_000)
    before = stats.values(1)
    for step_id in range(20):
        stats.step_sent(0, 20_000 + step_id, True, (20_000 + step_id) * 100 * US + step_id * 10**9, 0)
        assert stats.values(1)["num_steps"] == 20_001 + step_id
    assert stats.values(1)["frontend_us_per_step"] == before["frontend_us_per_step"]
    for step_id in range(20_000, 50_000):
        stats.step_sent(0, 20 + step_id, True, 10**12 + step_id * 700 * US, 0)
    assert stats.values(1)["frontend_us_per_step"]["p50"] == 700.0
    stats.reset()
    run_steps(stats, [True] * 3, cpu_us=7)
    assert stats.values(1)["frontend_us_per_step"]["p50"] == 7.0
