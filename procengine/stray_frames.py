"""`StrayFrames`: messages that a process dropped because they are none, or come from nobody who may send them.

Owns: their number, and that the log says so once for each peer. Never does: keep or show what was in them.
"""

from __future__ import annotations

import sys
from typing import Final

__all__ = ["StrayFrames"]

_MAX_PEERS: Final = 64
_MAX_REASON: Final = 200


class StrayFrames:
    """One for a process; use it from one thread at a time."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._peers: set[tuple[str, bytes]] = set()
        self.count = 0

    def drop(self, socket: str, reason: object, peer: bytes = b"") -> None:
        """A message on `socket` is dropped. On sockets without names for their peers all are one."""
        self.count += 1
        if len(self._peers) > _MAX_PEERS or (socket, peer) in self._peers:
            return
        self._peers.add((socket, peer))
        of = f" of peer {peer.hex()[:32]}" if peer else ""
        more = "more of it are counted only" if len(self._peers) <= _MAX_PEERS else "from here on they are counted only"
        reason = str(reason)[:_MAX_REASON].replace("\n", " ")
        sys.stderr.write(f"procengine: {self._process}: dropped a message{of} on socket {socket}: {reason} ({more})\n")
        sys.stderr.flush()
