"""`GroupMonitor`: one running group as `procengine top` sees it, from outside.

Owns: the reader of its spans and the socket to its supervisor. Never does: compute (`Window`, `GroupTotals`), or draw.
"""

from __future__ import annotations

import time

import zmq

from procengine import ipc
from procengine.groups import GroupInfo, is_gone
from procengine.messages import GetStatus, decode_status, encode
from procengine.profiling.group_frame import Frame, make_frame
from procengine.profiling.group_totals import GroupTotals
from procengine.profiling.snapshot import SpanReader
from procengine.profiling.window import Window

__all__ = ["GroupMonitor"]


class GroupMonitor:
    """Watches one group until it is gone. `window_s`: how far back figures go."""

    def __init__(self, info: GroupInfo, window_s: float) -> None:
        self.info = info
        self._num_workers = sum(name.startswith("worker-") for name in info.pids)
        self._reader = SpanReader(info.pids["supervisor"])
        self._window = Window(window_s)
        self._totals = GroupTotals(self._num_workers)
        self._context = ipc.make_context()
        self.status_socket = ipc.connect(self._context, zmq.DEALER, info.control)
        self._status_ns = 0
        self._is_asked = False

    @property
    def is_gone(self) -> bool:
        """Whether the group has ended, or another one has taken its place."""
        return is_gone(self.info)

    @property
    def has_status(self) -> bool:
        """Whether the supervisor has answered once."""
        return bool(self._status_ns)

    def ask(self) -> None:
        """Ask the supervisor how its processes are, unless it still owes an answer."""
        if not self._is_asked:
            self.status_socket.send(encode(GetStatus()))
            self._is_asked = True

    def take_status(self) -> None:
        """Take in the answer, which is there (`status_socket` is readable)."""
        self._is_asked = False
        self._status_ns = time.monotonic_ns()
        self._totals.add_status(decode_status(self.status_socket.recv()), self._status_ns)

    def read(self) -> None:
        """Take in what is new in the rings.

        Raises:
            OSError: the group is gone, or belongs to another user.
        """
        tables = self._reader.read()
        self._totals.add_tables(tables)
        self._window.add(tables, time.monotonic_ns())

    def frame(self) -> Frame:
        """What there is to see now."""
        return make_frame(self.info, self._totals, self._window, time.monotonic_ns())

    def close(self) -> None:
        """Let go of the group."""
        self._context.destroy(linger=0)
