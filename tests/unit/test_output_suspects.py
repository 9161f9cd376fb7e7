"""A request is taken for what kills output processes when two die at its text, and no sooner."""

from __future__ import annotations

import pytest

from procengine.output_suspects import OutputSuspects


@pytest.mark.parametrize(
    ("deaths", "verdicts"),
    [
        ([5, 5], [False, True]),
        ([-1, 5, 5], [False, False, True]),
        ([5, -1, 5], [False, False, False]),
        ([5, 6, 5, 6], [False, False, True, True]),
        ([-1, -1, -1], [False, False, False]),
        ([0, 0, 0], [False, True, False]),
    ],
)
def test_two_deaths_with_none_of_another_cause_between_them(deaths: list[int], verdicts: list[bool]) -> None:
    suspects = OutputSuspects()
    assert [suspects.blame(key) for key in deaths] == verdicts
