"""`Record`: what a run leaves behind. Owns: the raw notes. Never does: interpret them (`timelines`)."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Record"]


class Record(NamedTuple):
    """One run, all times in ns of one clock.

    Attributes:
        intended_ns: when each request should have been sent, by its id; its latencies count from here.
        submitted_ns: when it was sent.
        frames: each message as it came, with its time of arrival.
        failures: why a request failed, by its id.
    """

    intended_ns: dict[str, int]
    submitted_ns: dict[str, int]
    frames: list[tuple[int, bytes]]
    failures: dict[str, str]
