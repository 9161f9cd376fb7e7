"""`WorkerLinks`: the frontend's sockets to the workers, one each.

Wiring only: what is sent there is others' business.
"""

from __future__ import annotations

import zmq

from procengine import ipc
from procengine.child import Child
from procengine.messages import Begin, LoadAdapter, encode

__all__ = ["WorkerLinks"]


class WorkerLinks:
    """They connect: a socket that is bound would block when its peer is dead, one that connects queues."""

    def __init__(self, child: Child) -> None:
        self._child = child
        self._sockets = [self._connect(rank) for rank in range(child.config.worker.num_workers)]

    def _connect(self, rank: int) -> zmq.Socket[bytes]:
        return ipc.connect(self._child.context, zmq.PUSH, self._child.endpoint(f"steps-{rank}"))

    def begin(self, epoch: int) -> None:
        """Tell all workers that the steps from here on are those of a new frontend."""
        for rank in range(len(self._sockets)):
            self.begin_again(rank, epoch)

    def begin_again(self, rank: int, epoch: int) -> None:
        """Tell one that failed in a step the same, by the frontend that it has."""
        self._sockets[rank].send(encode(Begin(epoch)))

    def load_adapter(self, rank: int, message: LoadAdapter) -> None:
        """Steps that are sent when it has answered may use the adapter."""
        self._sockets[rank].send(encode(message))

    def send(self, rank: int, frames: ipc.Frames) -> None:
        """A step."""
        ipc.send_frames(self._sockets[rank], frames)

    def connect_again(self, rank: int) -> None:
        """To the successor of a worker that is gone, whose steps nobody will take."""
        self._sockets[rank].close(linger=0)
        self._sockets[rank] = self._connect(rank)
