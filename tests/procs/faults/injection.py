"""How a fault reaches a process of a group: a signal, a limit, or a file that `injected/sitecustomize.py` looks for.

Owns: the means. Never does: know what should come of it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from pathlib import Path
from typing import Final

from procengine.messages import GetStatus, encode
from tests.procs.harness import Served, descendants, is_running, wait_until
from tests.procs.raw_client import RawClient

__all__ = ["SIGNALS", "Injector", "child_pid", "is_stopped", "marked_processes", "stall"]

_INJECTED: Final = Path(__file__).parent / "injected"
_DIR: Final = "FAULTS_DIR"
_APPEARS_S: Final = 30.0
SIGNALS: Final = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "stall": signal.SIGSTOP}
# Ten times slower than the steps of 5 ms that the device takes here.
_ORDERS: Final = {"raise": "raise", "memory": "memory", "exit": "exit", "slow": "slow 0.05 20"}


class Injector:
    """Faults for one group: `environment` is what its supervisor must be started with."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.first_fds: dict[str, int] = {}  # by process, before the first fault: see `Experiment`
        path = os.pathsep.join([str(_INJECTED), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment = {"PYTHONPATH": path, _DIR: str(folder)}

    def arm(self, role: str, point: str, fault: str) -> None:
        """Whoever of that role passes that point first suffers it."""
        draft = self._folder / "draft"
        draft.write_text(_ORDERS[fault])
        draft.rename(self._folder / f"{role}.{point}")

    def is_armed(self, role: str, point: str) -> bool:
        """Whether nobody has passed there yet."""
        return (self._folder / f"{role}.{point}").exists()

    def processes(self) -> set[int]:
        """All processes that were started with this environment and still run, whoever their parent is now."""
        return marked_processes(f"{_DIR}={self._folder}")

    def strike(self, group: Served, role: str, pid: int, fault: str, raw: RawClient | None) -> None:
        """The fault happens to the process: at once, or as soon as it does anything."""
        if fault in SIGNALS:
            os.kill(pid, SIGNALS[fault])
        elif fault == "limit":
            size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(pid, resource.RLIMIT_AS, (size, size))
        else:
            self.arm(role, "step", fault)
            if role == "supervisor" and raw is not None:
                raw.connect(group.ready["control"]).send(encode(GetStatus()))  # else it sleeps


def child_pid(group: Served, role: str, known: set[int] | None = None) -> int:
    """A child of that role that is not among the known ones, as soon as it is there, ready or not."""

    def find() -> int | None:
        for pid in descendants(group.pid):
            if pid not in (known or ()) and _is_of_role(pid, role):
                return pid
        return None

    return wait_until(find, f"a process of {role} appears", _APPEARS_S) or 0


def _is_of_role(pid: int, role: str) -> bool:
    with contextlib.suppress(OSError):
        return f"procengine.procs.{role}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def marked_processes(mark: str) -> set[int]:
    """Running processes that have this in their environment."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes().split(b"\0") and is_running(int(entry.name)):
                    found.add(int(entry.name))
    return found


def is_stopped(pid: int) -> bool:
    """Whether a signal holds the process."""
    with contextlib.suppress(OSError):
        return "State:\tT" in Path(f"/proc/{pid}/status").read_text()
    return False


def stall(pid: int, duration_s: float, raw: RawClient | None) -> None:
    """Let the stopped process be, then have it go on."""
    deadline_s = time.monotonic() + duration_s
    while (left_s := deadline_s - time.monotonic()) > 0:
        raw.receive(left_s) if raw else time.sleep(left_s)
    assert is_stopped(pid)
    os.kill(pid, signal.SIGCONT)
