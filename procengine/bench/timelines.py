"""`Timeline`: what happened to one request of a run, when. Pure: a `Record` in, timelines out.

Owns: which message belongs to which request. Never does: average anything (`report`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
from numpy.typing import NDArray

from procengine.bench.record import Record
from procengine.messages import Delta, Outputs, decode_to_client

__all__ = ["Timeline", "read_timelines"]

Milliseconds = NDArray[np.float64]


class Timeline(msgspec.Struct):
    """One request, in ns.

    Attributes:
        intended_ns: when it should have been sent; latencies count from here.
        submitted_ns: when it was sent.
        token_times_ns: when a message with tokens came; `token_counts` says how many.
        end_ns: its last message; 0 if none came.
        error: why it failed; its latencies count for nothing then.
    """

    intended_ns: int
    submitted_ns: int
    token_times_ns: list[int] = []
    token_counts: list[int] = []
    end_ns: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer."""
        return sum(self.token_counts)

    @property
    def lateness_ms(self) -> float:
        """From the intended time to sending."""
        return (self.submitted_ns - self.intended_ns) / 1e6

    @property
    def ttft_ms(self) -> float | None:
        """From the intended time to the first tokens; None if there were none."""
        return (self.token_times_ns[0] - self.intended_ns) / 1e6 if self.token_times_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per token after the first message's first; None for an answer of one token."""
        if self.num_tokens < 2:
            return None
        return (self.token_times_ns[-1] - self.token_times_ns[0]) / (self.num_tokens - 1) / 1e6

    @property
    def itl_ms(self) -> Milliseconds:
        """float64 [messages - 1]: between two messages with tokens."""
        times = np.array(self.token_times_ns, np.int64)
        return (times[1:] - times[:-1]) / 1e6

    @property
    def e2el_ms(self) -> float:
        """From the intended time to the last message."""
        return (self.end_ns - self.intended_ns) / 1e6


def read_timelines(record: Record) -> list[Timeline]:
    """The timelines of all requests, in the order they were sent."""
    timelines = {
        request_id: Timeline(record.intended_ns[request_id], at, error=record.failures.get(request_id))
        for request_id, at in record.submitted_ns.items()
    }
    for now_ns, delta in _deltas(record):
        timeline = timelines[delta.request_id]
        if delta.token_ids:
            timeline.token_times_ns.append(now_ns)
            timeline.token_counts.append(len(delta.token_ids))
        if delta.prompt_token_ids is not None:
            timeline.num_prompt_tokens = len(delta.prompt_token_ids)
        timeline.num_cached_tokens = delta.num_cached_tokens or timeline.num_cached_tokens
        timeline.end_ns = now_ns
    return list(timelines.values())


def _deltas(record: Record) -> Iterator[tuple[int, Delta]]:
    for now_ns, frame in record.frames:
        message = decode_to_client(frame)
        if isinstance(message, Outputs):
            yield from ((now_ns, item) for item in message.items if isinstance(item, Delta))
