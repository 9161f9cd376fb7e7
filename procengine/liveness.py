"""`Liveness`: which processes have stopped answering. Pure: its owner asks, round by round, and brings the answers.

Owns: how many rounds a process may miss. Never does: end one.

Rounds are counted, not seconds: when a whole group was stopped and goes on, one round is late, and nobody is blamed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

__all__ = ["LIVENESS_QUERY", "MAX_MISSED", "Liveness"]

LIVENESS_QUERY: Final = 0  # query_id of the questions; those of `GroupStatus` begin with 1
MAX_MISSED: Final = 4


class Liveness:
    """Processes by their ids, which no two have at one time."""

    def __init__(self) -> None:
        self._num_missed: dict[int, int] = {}

    def begin_round(self, pids: Collection[int]) -> list[int]:
        """These are asked now. Returns those that have not answered the last `MAX_MISSED` times; they start anew."""
        missed = {pid: self._num_missed.get(pid, -1) + 1 for pid in pids}
        late = [pid for pid, num in missed.items() if num >= MAX_MISSED]
        self._num_missed = {pid: num for pid, num in missed.items() if num < MAX_MISSED}
        return late

    def take_answer(self, pid: int) -> None:
        """It lives."""
        self._num_missed[pid] = -1
