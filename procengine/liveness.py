"""`Liveness`: asks every process of a group, round by round, whether it answers.

Owns: how many rounds a process may miss. Never does: watch a clock, or end a process.

Rounds are counted, not seconds: when a whole group was stopped and goes on, one round is late, and nobody is blamed.
"""

from __future__ import annotations

from typing import Final

from procengine.child_process import ChildProcess
from procengine.children import Children
from procengine.messages import Query

__all__ = ["LIVENESS_QUERY", "MAX_MISSED", "Liveness"]

LIVENESS_QUERY: Final = 0  # query_id of the questions; those of `GroupStatus` begin with 1
MAX_MISSED: Final = 4


class Liveness:
    """Of the processes that are ready: one that starts has nothing to say."""

    def __init__(self, children: Children) -> None:
        self._children = children
        self._missed_by_pid: dict[int, int] = {}  # rounds in a row, the one under way included

    def begin_round(self) -> list[ChildProcess]:
        """Ask. Returns those that have not answered the last `MAX_MISSED` times; they start anew."""
        asked = [child for child in self._children if child.is_ready and child.is_alive]
        late = [child for child in asked if self._missed_by_pid.get(child.pid, 0) >= MAX_MISSED]
        for child in asked:
            self._children.send_to(child, Query(LIVENESS_QUERY))
        known = self._missed_by_pid
        self._missed_by_pid = {child.pid: 1 if child in late else known.get(child.pid, 0) + 1 for child in asked}
        return late

    def take_answer(self, identity: bytes) -> None:
        """The process with this control socket lives."""
        for child in self._children:
            if child.identity == identity:
                self._missed_by_pid[child.pid] = 0
