"""`ProcessWatch`: the processes of a group from one status to the next. Pure.

Owns: what takes two looks to say: CPU share, when a process last answered. Never does: ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from procengine.messages import ProcessStatus, Status

__all__ = ["ProcessFigures", "ProcessWatch", "process_name"]

_NOT_ANSWERING: Final = frozenset({"silent", "dead"})


def process_name(process: ProcessStatus) -> str:
    """`worker-0`; roles that exist once go without a number."""
    return f"{process.role}-{process.rank}" if process.role in ("worker", "api") else process.role


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """One process now.

    Attributes:
        cpu_share: CPU time per time since the status before, 1.0 is one core; None on the first look.
        heard_ns: when it last answered its supervisor (CLOCK_MONOTONIC); 0: never.
    """

    name: str
    status: ProcessStatus
    cpu_share: float | None
    heard_ns: int

    @property
    def is_up(self) -> bool:
        """Whether it runs and answers."""
        return self.status.state not in _NOT_ANSWERING


class ProcessWatch:
    """Feed it each status of one group.

    Attributes:
        group, model: as the newest status says; "" before the first.
        processes: as of the newest status, the supervisor first.
    """

    def __init__(self) -> None:
        self.group = self.model = ""
        self.processes: list[ProcessFigures] = []
        self._seen_ns = 0

    @property
    def num_unfinished(self) -> int | None:
        """Requests that the frontend has not finished, by its own word; None if it has not said."""
        depths = [process.status.queue_depth for process in self.processes if process.name == "frontend"]
        return depths[0] if depths and self["frontend"].is_up else None

    def __getitem__(self, name: str) -> ProcessFigures:
        return next(process for process in self.processes if process.name == name)

    def add(self, status: Status, now_ns: int) -> None:
        """Take in a status that came at `now_ns`."""
        before = {(p.name, p.status.pid): p for p in self.processes}
        self.group, self.model = status.group, status.model
        elapsed_s = (now_ns - self._seen_ns) / 1e9
        self.processes = [self._figures(process, before, elapsed_s, now_ns) for process in status.processes]
        self._seen_ns = now_ns

    @staticmethod
    def _figures(
        process: ProcessStatus, before: dict[tuple[str, int], ProcessFigures], elapsed_s: float, now_ns: int
    ) -> ProcessFigures:
        name = process_name(process)
        last = before.get((name, process.pid))
        is_up = process.state not in _NOT_ANSWERING
        cpu_share = max(process.cpu_s - last.status.cpu_s, 0.0) / elapsed_s if last and elapsed_s > 0 else None
        return ProcessFigures(name, process, cpu_share, now_ns if is_up else last.heard_ns if last else 0)
