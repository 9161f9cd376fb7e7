"""Why a tcp endpoint does not let us in: asked when a client's first message has gone without an answer.

Owns: one short-lived connection of its own, and what ZeroMQ's handshake says about it. Never does: send a message.
A handshake that fails is invisible on the socket itself, which tries again for ever.
"""

from __future__ import annotations

import struct
import time
from typing import Final

import zmq

from procengine import ipc
from procengine.curve_keys import ClientKeys
from procengine.errors import AccessDeniedError

__all__ = ["raise_if_refused", "why_refused"]

_WAIT_S: Final = 2.0
_EVENT: Final = struct.Struct("=HI")  # zmq_socket_monitor(3): the event, its value; the endpoint is a second frame
_FAILURES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_MOST_FAILURES: Final = 2  # one may be a process that died in the middle of it


def why_refused(endpoint: str, keys: ClientKeys | None, wait_s: float = _WAIT_S) -> str | None:
    """What is wrong, as far as a handshake tells; None if it succeeds, or nothing is known after `wait_s`. Blocks."""
    if not endpoint.startswith("tcp://"):
        return None
    context = ipc.make_context()
    try:
        socket = context.socket(zmq.DEALER)
        monitor = socket.get_monitor_socket(_FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        ipc.connect_socket(socket, endpoint, keys)
        return _listen(monitor, keys, time.monotonic() + wait_s)
    finally:
        context.destroy(linger=0)


def raise_if_refused(endpoint: str, keys: ClientKeys | None) -> None:
    """The same as an error. Blocks.

    Raises:
        AccessDeniedError: we are not let in.
    """
    if (reason := why_refused(endpoint, keys)) is not None:
        raise AccessDeniedError(f"{endpoint}: {reason}")


def _listen(monitor: zmq.Socket[bytes], keys: ClientKeys | None, deadline_s: float) -> str | None:
    num_failures = 0
    while (left_s := deadline_s - time.monotonic()) > 0:
        if not monitor.poll(int(1e3 * left_s) + 1):
            break
        event, _ = _EVENT.unpack(monitor.recv_multipart()[0])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return None
        num_failures += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return "it does not know this client's key; its operator adds it with `procengine keys add`"
        if num_failures >= _MOST_FAILURES or event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return _mismatch(keys)
    return None


def _mismatch(keys: ClientKeys | None) -> str:
    """Which side hangs up first is chance, so the two cases of a client with keys look alike."""
    if keys is None:
        return "it demands keys, and this client has none; give it curve_keys"
    return "its key is not the one that this client was told (server_key), or it has no keys at all"
