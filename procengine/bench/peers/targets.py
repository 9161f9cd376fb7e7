"""What procengine means to reach beside its peers on a CPU. Pure.

Owns: the numbers. Never does: measure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["TARGETS", "Target"]


@dataclass(frozen=True, slots=True)
class Target:
    """One claim about one figure.

    Attributes:
        workload, path: the figure.
        weights: class of weights compared on both sides; None: the best of each, whatever it computes in.
        min_ratio: how many times better than the best peer; None: no claim.
        limit: most that the figure itself may be, in its unit; None: no claim.
    """

    workload: str
    path: str
    weights: str | None
    min_ratio: float | None = None
    limit: float | None = None


TARGETS: Final = (
    Target("w1", "decode_tokens_per_s", "4-bit", 1.2),
    Target("w1", "decode_tokens_per_s", "8-bit", 1.2),
    Target("w1", "decode_tokens_per_s", "bf16", 1.1),
    Target("w2", "output_tokens_per_s", None, 1.5),
    Target("w2", "output_tokens_per_s", "bf16", 1.2),
    Target("w3", "prompt_tokens_per_s", "8-bit", 1.3),
    Target("w3", "prompt_tokens_per_s", "bf16", 1.05),
    Target("w4", "wall_s", None, 1.25),
    Target("w5", "output_tokens_per_s", None, 1.3),
    Target("w5", "ttft_ms.p50", None, 2.0),
    Target("w5", "itl_ms.p99", None, 1.0),
    Target("w5-poisson", "ttft_ms.p99", None, limit=200.0),
    Target("w5-poisson", "itl_ms.p99", None, limit=100.0),
)
