"""One hop between two processes: a message over a real socket to a peer that sends it back.

Owns: the peer's process and the two sockets. Never does: look at what it sends. Run as a module, it is the peer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np
import zmq
from numpy.typing import NDArray

from procengine import ipc
from procengine.errors import StartupError
from procengine.paths import run_root

__all__ = ["EchoPeer"]

_START_TIMEOUT_MS: Final = 30_000
_NUM_WARMUP_HOPS: Final = 20


class EchoPeer:
    """A process that sends back what it gets. Use as a context manager: it ends with the block, or with us."""

    def __init__(self) -> None:
        self._exits = ExitStack()
        with self._exits:
            folder = Path(self._exits.enter_context(tempfile.TemporaryDirectory(prefix="hop-", dir=run_root())))
            context = ipc.make_context()
            self._exits.callback(context.destroy, linger=0)
            to_peer, from_peer = (f"ipc://{folder / name}" for name in ("to", "from"))
            self._from_peer = ipc.bind(context, zmq.PULL, from_peer)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "procengine.bench.hop", to_peer, from_peer], stdin=subprocess.PIPE
            )
            self._exits.callback(self._end_peer)
            self._to_peer = ipc.connect(context, zmq.PUSH, to_peer)
            self._say_hello()
            self._exits = self._exits.pop_all()  # it stands: nothing is taken down when this block ends

    def time_hops(self, frames: tuple[bytes, bytes], num_hops: int) -> NDArray[np.int64]:
        """int64 [num_hops]: half of the time from sending `frames` until they are back, in ns."""
        times_ns = []
        for _ in range(_NUM_WARMUP_HOPS + num_hops):
            begin_ns = time.perf_counter_ns()
            ipc.send_frames(self._to_peer, frames)
            self._from_peer.recv_multipart()
            times_ns.append((time.perf_counter_ns() - begin_ns) // 2)
        return np.array(times_ns[_NUM_WARMUP_HOPS:], np.int64)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._exits.close()

    def _say_hello(self) -> None:
        ipc.send_frames(self._to_peer, (b"hello", b""))
        if not self._from_peer.poll(_START_TIMEOUT_MS):
            raise StartupError(f"the peer of the hop did not answer within {_START_TIMEOUT_MS / 1e3:g} s")
        self._from_peer.recv_multipart()

    def _end_peer(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _echo(endpoints: Sequence[str]) -> None:
    """Send back what comes, until stdin closes: whoever started us has ended, or is done with us."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    context = ipc.make_context()
    incoming = ipc.bind(context, zmq.PULL, endpoints[0])
    outgoing = ipc.connect(context, zmq.PUSH, endpoints[1])
    while True:
        outgoing.send_multipart(incoming.recv_multipart())


if __name__ == "__main__":
    _echo(sys.argv[1:])
