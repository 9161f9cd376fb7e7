"""`StepStats`: where the frontend's time goes, step by step, in preallocated rings.

Owns: the samples since the last reset. Never does: read a clock: the caller brings nanoseconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["StepStats"]

_RING = 1 << 16
_FEW = 1 << 13


class StepStats:
    """The last 65536 steps. A *steady* step holds decode rows alone, and so did the step before it."""

    def __init__(self) -> None:
        self._cpu_ns = np.zeros(_RING, np.int64)
        self._round_trip_ns = np.zeros(_RING, np.int64)
        self._is_steady = np.zeros(_RING, np.bool_)
        self.reset()

    def reset(self) -> None:
        """Forget everything but the steps in flight."""
        self._num_steps = 0
        self._num_round_trips = 0
        self._busy_ns = 0
        self._first_sent_ns = 0
        self._last_result_ns = 0
        self._last_cpu_ns: int | None = None
        self._was_steady = False
        self._sent_ns: dict[tuple[int, int], tuple[int, bool]] = {}
        self._percentiles: dict[str, dict[str, float | None]] = {}
        self._num_in_percentiles = 0

    def step_sent(self, rank: int, step_id: int, is_steady: bool, cpu_ns: int, now_ns: int) -> None:
        """A step went out; `cpu_ns` is the CPU time of the whole process so far."""
        if self._last_cpu_ns is None:
            self._first_sent_ns = now_ns
        else:
            at = self._num_steps % _RING
            self._cpu_ns[at] = cpu_ns - self._last_cpu_ns
            self._is_steady[at] = is_steady and self._was_steady
            self._num_steps += 1
        self._last_cpu_ns = cpu_ns
        self._was_steady = is_steady
        self._sent_ns[rank, step_id] = (now_ns, is_steady)

    def result_received(self, rank: int, step_id: int, is_last: bool, busy_ns: int, now_ns: int) -> None:
        """A result of a step came back; `busy_ns` is what the worker's device loop spent on it."""
        self._busy_ns += busy_ns
        self._last_result_ns = now_ns
        if not is_last:
            return
        sent_ns, is_steady = self._sent_ns.pop((rank, step_id), (0, False))
        if is_steady:
            self._round_trip_ns[self._num_round_trips % _RING] = now_ns - sent_ns
            self._num_round_trips += 1

    def forget(self, rank: int) -> None:
        """The steps in flight at this worker will have no results."""
        self._sent_ns = {step: sent for step, sent in self._sent_ns.items() if step[0] != rank}

    def values(self, num_workers: int) -> dict[str, Any]:
        """Percentiles (microseconds) and shares.

        Percentiles of many samples are those of the last call until there is some news: they take milliseconds, and
        whoever asks for the other values again and again shall not hold up the steps.
        """
        num_samples = self._num_steps + self._num_round_trips
        num_new = num_samples - self._num_in_percentiles
        if not self._percentiles or num_new > (0 if num_samples < _FEW else _FEW // 64):
            self._percentiles, self._num_in_percentiles = self._new_percentiles(), num_samples
        wall_ns = self._last_result_ns - self._first_sent_ns
        return {
            "num_steps": self._num_steps + (self._last_cpu_ns is not None),
            **self._percentiles,
            "worker_busy_share": self._busy_ns / (wall_ns * num_workers) if wall_ns > 0 else 0.0,
        }

    def _new_percentiles(self) -> dict[str, dict[str, float | None]]:
        num_sampled = min(self._num_steps, _RING)
        cpu_ns, is_steady = self._cpu_ns[:num_sampled], self._is_steady[:num_sampled]
        return {
            "frontend_us_per_step": _percentiles_us(cpu_ns),
            "frontend_us_per_steady_step": _percentiles_us(cpu_ns[is_steady]),
            "round_trip_us": _percentiles_us(self._round_trip_ns[: min(self._num_round_trips, _RING)]),
        }


def _percentiles_us(samples_ns: NDArray[np.int64]) -> dict[str, float | None]:
    if not samples_ns.size:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(samples_ns, [50, 99]) / 1e3
    return {"p50": round(float(p50), 1), "p99": round(float(p99), 1)}
