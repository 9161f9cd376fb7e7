"""What a worker did while it decoded one token for each of a number of requests, pass after pass. Pure.

Owns: which passes are steady, and their figures. Never does: run or record anything (`decode_bench`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from procengine.errors import ProcengineError
from procengine.profiling.bubbles import CAUSES
from procengine.profiling.capture import Joined

__all__ = ["SteadyDecode", "steady_decode"]

_NUM_FILLING: Final = 4  # passes after the last prompt, in which the window of steps in flight fills again
_MIN_PASSES: Final = 4


@dataclass(frozen=True, slots=True)
class SteadyDecode:
    """Passes of one token for each of `batch_size` requests and nothing else, after the first few.

    Attributes:
        tokens_per_s: of these passes and the gaps between them.
        pass_ms, least_pass_ms: median and least time in a pass, from taking it up until its tokens are sampled.
        idle_share: of the worker's time, spent between passes; 0 to 1.
        idle_share_by_cause: the same, divided as `profiling.bubbles` does; adds up to `idle_share`.
    """

    batch_size: int
    num_passes: int
    tokens_per_s: float
    pass_ms: float
    least_pass_ms: float
    idle_share: float
    idle_share_by_cause: dict[str, float]


def steady_decode(joined: Joined, batch_size: int) -> SteadyDecode:
    """The figures of a capture of one worker.

    Raises:
        ProcengineError: there were too few such passes: answers were too short.
    """
    passes, bubbles = joined.passes, joined.bubbles
    is_steady = (passes["num_rows"] == batch_size) & (passes["num_tokens"] == batch_size)
    is_steady[np.flatnonzero(is_steady)[:_NUM_FILLING]] = False
    num_passes = int(is_steady.sum())
    if num_passes < _MIN_PASSES:
        raise ProcengineError(f"{num_passes} passes decoded {batch_size} requests at once, {_MIN_PASSES} are needed")
    is_between = is_steady[bubbles.next_pass] & is_steady[bubbles.next_pass - 1]
    gaps_ns = bubbles.parts_ns[is_between].sum(axis=0)
    lengths_ns = (passes["done_ns"] - passes["started_ns"])[is_steady]
    idle_ns, whole_ns = int(gaps_ns.sum()), int(gaps_ns.sum() + lengths_ns.sum())
    return SteadyDecode(
        batch_size=batch_size,
        num_passes=num_passes,
        tokens_per_s=batch_size * num_passes / (whole_ns / 1e9),
        pass_ms=float(np.median(lengths_ns)) / 1e6,
        least_pass_ms=float(lengths_ns.min()) / 1e6,
        idle_share=idle_ns / whole_ns,
        idle_share_by_cause={cause: ns / whole_ns for cause, ns in zip(CAUSES, gaps_ns.tolist(), strict=True)},
    )
