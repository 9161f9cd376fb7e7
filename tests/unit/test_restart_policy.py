"""How often and how soon a child is started again."""

from __future__ import annotations

from procengine.restart_policy import RestartPolicy


def test_first_restart_is_immediate_and_later_ones_wait_longer() -> None:
    policy = RestartPolicy(max_restarts=9, window_s=60)
    assert [policy.delay_s(at) for at in range(8)] == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0]


def test_too_many_within_the_window_is_the_end() -> None:
    policy = RestartPolicy(max_restarts=2, window_s=60)
    assert [policy.delay_s(at) for at in (0.0, 30.0, 59.0)] == [0.0, 0.25, None]
    assert policy.num_recent == 3


def test_deaths_that_are_long_ago_do_not_count() -> None:
    policy = RestartPolicy(max_restarts=2, window_s=60)
    assert [policy.delay_s(at) for at in (0.0, 50.0, 100.0, 170.0)] == [0.0, 0.25, 0.25, 0.0]


def test_no_restarts_at_all() -> None:
    assert RestartPolicy(max_restarts=0, window_s=60).delay_s(0.0) is None
