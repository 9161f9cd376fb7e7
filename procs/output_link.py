"""`OutputLink`: the frontend's socket to the output process.

Wiring only: what is said there is others' business.
"""

from __future__ import annotations

import zmq

from procengine import ipc
from procengine.child import Child
from procengine.messages import Admitted, Finish, Register, Replay, Resume, encode

__all__ = ["OutputLink"]


class OutputLink:
    """Messages and results go out in the order of the calls. It connects: one that is bound would block when its peer
    is dead, one that connects queues.
    """

    def __init__(self, child: Child) -> None:
        self._child = child
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        return ipc.connect(self._child.context, zmq.PUSH, self._child.endpoint("register"))

    def send(self, message: Register | Admitted | Finish | Replay | Resume) -> None:
        """A message."""
        self._socket.send(encode(message))

    def send_encoded(self, message: bytes) -> None:
        """A message that is encoded already."""
        self._socket.send(message)

    def send_result(self, frames: ipc.Frames) -> None:
        """What a worker sent."""
        ipc.send_frames(self._socket, frames)

    def connect_again(self) -> None:
        """To the successor of a process that is gone, whose messages nobody will take."""
        self._socket.close(linger=0)
        self._socket = self._connect()
