"""When requests are sent. Pure: the same seed gives the same times.

Owns: the arrival process. Never does: wait (`run`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pace", "arrival_times"]


@dataclass(frozen=True, slots=True)
class Pace:
    """When a request may be sent: both conditions hold.

    Attributes:
        arrivals_s: float64 [requests], ascending seconds after the start (open loop). A request counts from its time
            here, whenever it is sent. None: there is no plan, and a request counts from when it is sent.
        max_concurrency: most requests under way (closed loop, when nothing else holds them back); None is no limit.
    """

    arrivals_s: NDArray[np.float64] | None = None
    max_concurrency: int | None = None


def arrival_times(num_requests: int, request_rate: float, burstiness: float, seed: int) -> NDArray[np.float64]:
    """Seconds from the first request on, float64 [requests]; gaps are independent, with mean `1 / request_rate`.

    Gaps follow a gamma distribution of shape `burstiness`, so their coefficient of variation is `burstiness ** -0.5`:
    1 is a Poisson process, less comes in bursts, more is closer to a metronome. The sum of the gaps is not forced to
    its mean: a short run's true rate differs from the one asked for, and the report shows it.
    """
    generator = np.random.default_rng(seed)
    gaps = generator.gamma(burstiness, 1.0 / (request_rate * burstiness), max(num_requests - 1, 0))
    return np.concatenate((np.zeros(min(num_requests, 1)), np.cumsum(gaps)))
