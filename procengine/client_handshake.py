"""How a client that blocks becomes known to a group, and again when the group has a new frontend.

Owns: the order of the handshake, and how long it may take. Never does: keep anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from procengine.client_core import ClientCore, Pending, dead_group_error
from procengine.client_link import ClientLink
from procengine.curve_keys import ClientKeys
from procengine.errors import EngineDeadError
from procengine.groups import GroupInfo, is_gone
from procengine.messages import Attached, Welcome
from procengine.refusal import raise_if_refused

__all__ = ["answer_losses", "connect_link"]

_LIVENESS_MS = 500
_CONNECT_TIMEOUT_S = 30.0


def connect_link(group: GroupInfo, core: ClientCore, keys: ClientKeys | None = None) -> tuple[ClientLink, Welcome]:
    """Connect to a group and shake hands with its frontend and its output process.

    Raises:
        EngineDeadError: it is gone or does not answer.
        ProtocolError: it speaks another version.
        AccessDeniedError: it does not know our key, or we do not know its.
    """
    link = ClientLink(group.endpoint, keys)
    try:
        question, frame = core.hello()
        link.queue(frame)
        _wait_handshake(link, core, question, group, on_silence=lambda: raise_if_refused(group.endpoint, keys))
        welcome = question.answer(Welcome)
        question, frame = core.attach()
        link.attach(welcome.output_endpoint, frame)
        _wait_handshake(link, core, question, group, on_silence=lambda: link.attach_again(core.attach_again()))
        question.answer(Attached)
    except BaseException:
        link.close(linger=False)
        raise
    return link, welcome


def answer_losses(link: ClientLink, core: ClientCore) -> None:
    """Queue what a client that has just received has to send because a frontend is gone, in order of numbers."""
    for frame in core.take_frames():
        link.queue(frame)
    if link.take_disconnect():
        link.queue(core.hello_again())


def _wait_handshake(
    link: ClientLink, core: ClientCore, question: Pending, group: GroupInfo, on_silence: Callable[[], object] = bool
) -> None:
    deadline = time.monotonic() + _CONNECT_TIMEOUT_S
    while not question.is_done:
        frames = link.receive(_LIVENESS_MS)
        for frame in frames:
            core.receive(frame)
        answer_losses(link, core)
        if frames:
            continue
        if is_gone(group):
            raise dead_group_error(group.name)
        if time.monotonic() > deadline:
            raise EngineDeadError(f"group {group.name!r} does not answer within {_CONNECT_TIMEOUT_S:g} s")
        on_silence()
