"""Streams of a group in which processes die: when each message came, and how long it stood still.

Owns: the client of `faults`. Never does: kill anything.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from procengine.client_bodies import generate_body, prompt_body
from procengine.client_core import ClientCore, Pending, dead_group_error
from procengine.client_handshake import connect_link
from procengine.errors import ProcengineError
from procengine.groups import GroupInfo, is_gone
from procengine.sampling_params import SamplingParams

__all__ = ["Streams", "moved_ns"]

_NUM_MESSAGES: Final = 10  # that a stream must get to have moved: more than can have been under way
_PROMPT_TOKENS: Final = 16
_POLL_MS: Final = 200


class Streams:
    """Requests that stream until they are closed."""

    def __init__(self, group: GroupInfo, num_streams: int, max_tokens: int) -> None:
        self._group = group
        self._core = ClientCore()
        self._link, _ = connect_link(group, self._core)
        self._arrivals_ns: list[list[int]] = [[] for _ in range(num_streams)]
        self._pending: list[Pending] = []
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for number, arrivals in enumerate(self._arrivals_ns):
            prompt = [1 + number + at for at in range(_PROMPT_TOKENS)]
            pending, frame = self._core.submit(
                "generate", generate_body(prompt_body(prompt), params), on_item=partial(self._note, arrivals)
            )
            self._pending.append(pending)
            self._link.queue(frame)

    def wait_messages(self, count: int, timeout_s: float) -> None:
        """Until each stream has had so many messages."""
        self._wait(lambda: min(map(len, self._arrivals_ns)) >= count, f"{count} messages each", timeout_s)

    def wait_moved(self, since_ns: int, timeout_s: float) -> float:
        """Until all have moved on since a process died. Milliseconds that the one took that stood still the longest."""
        self._wait(
            lambda: all(_num_since(arrivals, since_ns) >= _NUM_MESSAGES for arrivals in self._arrivals_ns),
            "all streams move again",
            timeout_s,
        )
        return (max(moved_ns(np.array(arrivals), since_ns) for arrivals in self._arrivals_ns) - since_ns) / 1e6

    def close(self) -> None:
        """Abort all that runs."""
        for pending in self._pending:
            frame = self._core.abandon(pending)
            if frame is not None:
                self._link.queue(frame)
        self._link.close(linger=not is_gone(self._group))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @staticmethod
    def _note(arrivals: list[int]) -> None:
        arrivals.append(time.monotonic_ns())

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            frames = self._link.receive(_POLL_MS)
            for frame in frames:
                self._core.receive(frame)
            self._raise_ended()
            if not frames and is_gone(self._group):
                raise dead_group_error(self._group.name)
            if time.monotonic() > deadline_s:
                raise ProcengineError(f"within {timeout_s:g} s this did not come true: {what}")

    def _raise_ended(self) -> None:
        for pending in self._pending:
            pending.raise_error()
            if pending.is_done:
                raise ProcengineError("a stream ended before it could be seen to move on: give it more tokens")


def moved_ns(arrivals_ns: NDArray[np.int64], since_ns: int) -> int:
    """When a stream moved on: the end of its longest pause that was not over at `since_ns`.

    Args:
        arrivals_ns: int64 [n], when its messages came, in order; one before `since_ns` and one behind it, at least.
    """
    first = max(int(np.searchsorted(arrivals_ns, since_ns, side="right")) - 1, 0)
    pauses = np.diff(arrivals_ns[first:])
    return int(arrivals_ns[first + 1 + int(pauses.argmax())])


def _num_since(arrivals_ns: list[int], since_ns: int) -> int:
    """How many of these times, which are in order, are later."""
    return sum(1 for at in arrivals_ns[-_NUM_MESSAGES:] if at > since_ns)
