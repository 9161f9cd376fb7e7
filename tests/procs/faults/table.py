"""The fault matrix as a table: which role suffers which fault in which phase, and what must come of it.

Owns: the cells and their outcomes. Never does: run one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

__all__ = ["CELLS", "FAST_CELLS", "Cell"]

# SIGSTOP: the process hangs; stall: it is continued after half a second. raise, memory, exit: an exception, a
# MemoryError, an exit with status 0, in a step of its work. limit: RLIMIT_AS at what it has. slow: ten times slower
# than the steps of the device, for a while.
FAULTS: Final = ("SIGKILL", "SIGSTOP", "stall", "raise", "memory", "exit", "limit", "slow")

# exact     every stream yields its tokens, once each, and one end; the group goes on, with a new process if one died
# lost      every request that ran ends with that word, or is sent again by its client and ends as if nothing had been;
#           the group goes on, with a new process
# told      every client hears an error within the time, and the group ends with status 1
# gone      no process is left within the time, and clients find out by themselves
# no-start  the group does not start, says which process failed, and leaves nothing
# -         there is no such cell
_OUTCOMES: Final = """
            starting   idle    prefill  decode  multi-step  draining  restarting
worker      no-start   exact   exact    exact   exact       exact     exact
output      no-start   exact   exact    exact   exact       exact     exact
frontend    no-start   lost    lost     lost    lost        told      lost
supervisor  gone       gone    gone     gone    gone        gone      -
metrics     no-start   exact   exact    exact   exact       exact     exact
"""


class Cell(NamedTuple):
    """One experiment. `outcome` is a word of the table above."""

    role: str
    fault: str
    phase: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.role}-{self.fault}-{self.phase}"


def _cells() -> Iterator[Cell]:
    header, *lines = _OUTCOMES.strip().splitlines()
    phases = header.split()
    for line in lines:
        role, *outcomes = line.split()
        for phase, outcome in zip(phases, outcomes, strict=True):
            for fault in FAULTS:
                actual = _outcome(role, fault, phase, outcome)
                if actual != "-":
                    yield Cell(role, fault, phase, actual)


def _outcome(role: str, fault: str, phase: str, usual: str) -> str:
    if usual == "-":
        return "-"
    if fault in ("slow", "stall") and (fault, phase) != ("slow", "restarting"):  # neither is dead
        return "-" if fault == "stall" and phase in ("starting", "restarting") and role != "supervisor" else "exact"
    if fault == "limit":  # it may die of this or may not
        return usual if usual == "exact" and phase != "restarting" else "-"
    if fault == "SIGSTOP" and role == "supervisor":
        return "-"  # nobody watches it; what it does not do meanwhile, nobody needs
    return usual


CELLS: Final = tuple(_cells())

# Those of the fast lane: each role, each fault, each phase, each outcome.
FAST_CELLS: Final = frozenset(
    {
        "worker-SIGKILL-prefill",
        "worker-raise-decode",
        "worker-exit-multi-step",
        "worker-slow-decode",
        "worker-SIGKILL-restarting",
        "output-exit-idle",
        "output-memory-prefill",
        "output-SIGSTOP-decode",
        "supervisor-stall-decode",
        "output-SIGKILL-draining",
        "frontend-raise-decode",
        "supervisor-raise-decode",
        "metrics-raise-starting",
    }
)
