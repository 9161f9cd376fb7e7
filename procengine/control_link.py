"""Questions to the supervisor of a group, and its answers.

Owns: the wait: an answer, the end of the group, or the end of patience. Never does: know what is asked.
"""

from __future__ import annotations

import time

import zmq

from procengine import ipc
from procengine.groups import GroupInfo, is_gone
from procengine.messages import FromAsker, encode

__all__ = ["ask_supervisor"]

_LOOK_MS = 200


def ask_supervisor(group: GroupInfo, question: FromAsker, wait_s: float | None) -> bytes | None:
    """The answer; None if there was none within `wait_s` (None: however long it takes), or the group ended first."""
    context = ipc.make_context()
    try:
        socket = ipc.connect(context, zmq.DEALER, group.control)
        socket.send(encode(question))
        deadline_s = None if wait_s is None else time.monotonic() + wait_s
        while True:
            was_gone = is_gone(group)  # before the look: the answer may be the last that it did
            if socket.poll(_LOOK_MS if wait_s is None else min(_LOOK_MS, int(1e3 * wait_s))):
                return socket.recv()
            if was_gone or (deadline_s is not None and time.monotonic() > deadline_s):
                return None
    finally:
        context.destroy(linger=0)
