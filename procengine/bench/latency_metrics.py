"""The names of the latencies that a benchmark reports; `report` says what each is.

Owns: the names. Never does: compute one, or import anything, so that `--help` may show them.
"""

from __future__ import annotations

from typing import Final

__all__ = ["GOODPUT_METRICS", "LATENCY_METRICS"]

LATENCY_METRICS: Final = ("ttft", "itl", "tpot", "e2el")
GOODPUT_METRICS: Final = ("ttft", "tpot", "e2el")  # of one request each, so that it can meet them
