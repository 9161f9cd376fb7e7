"""What the status of a group says about its health: is it there, does it serve, does it move. Pure.

Owns: the meaning of live, ready and progressing for a whole group. Never does: ask a process.
"""

from __future__ import annotations

from dataclasses import dataclass

from procengine.messages import Status
from procengine.profiling.process_watch import process_name

__all__ = ["GroupHealth", "group_health", "health_object", "silent_health"]

_OPTIONAL_ROLES = ("metrics",)


@dataclass(frozen=True, slots=True)
class GroupHealth:
    """A group as a whole.

    Attributes:
        live: its supervisor answers.
        ready: it takes requests: the frontend, the output process and at least one worker serve, and it does not drain.
        progressing: no process is silent or stuck; a dead one is being restarted, and `ready` says if it is missed.
        problems: what is wrong, in words, also where the group as a whole is healthy.
    """

    live: bool
    ready: bool
    progressing: bool
    problems: tuple[str, ...]

    @property
    def is_healthy(self) -> bool:
        """Whether all is as it should be for those who send requests."""
        return self.live and self.ready and self.progressing


def group_health(status: Status) -> GroupHealth:
    """The health of a group that has answered."""
    needed = [process for process in status.processes if process.role not in _OPTIONAL_ROLES]
    ready_roles = {process.role for process in needed if process.ready}
    problems = [
        f"{process_name(process)} (pid {process.pid}): {process.state}"
        for process in status.processes
        if not (process.live and process.ready and process.progressing)
    ]
    return GroupHealth(
        live=True,
        ready=ready_roles >= {"supervisor", "frontend", "output", "worker"},
        progressing=all(process.progressing or process.state == "dead" for process in needed),
        problems=tuple(problems),
    )


def silent_health(wait_s: float) -> GroupHealth:
    """The health of a group whose supervisor has not answered for that long."""
    return GroupHealth(False, False, False, (f"supervisor: no answer within {wait_s:g} s",))


def health_object(group: str, health: GroupHealth, status: Status | None) -> dict[str, object]:
    """The same as a value for JSON."""
    processes = [] if status is None else status.processes
    return {
        "group": group,
        "healthy": health.is_healthy,
        "live": health.live,
        "ready": health.ready,
        "progressing": health.progressing,
        "problems": list(health.problems),
        "processes": {
            process_name(process): {
                name: getattr(process, name) for name in ("pid", "state", "live", "ready", "progressing", "waited_s")
            }
            for process in processes
        },
    }
