"""`RequestTotals`: how long requests took, and how they ended, since counting began. Pure.

Owns: the histograms of finished requests. Never does: say what a stage is (`requests`).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.histogram import Histogram
from procengine.profiling.records import FINISH_CODES, REJECT_CODES, RecordKind
from procengine.profiling.requests import Requests, finished_requests
from procengine.profiling.snapshot import SpanTables

__all__ = ["COMPLETE", "RequestTotals", "latencies"]

_FIRST_TOKEN_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_BOUNDS: Final = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BOUNDS: Final = (
    *(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_COUNT_BOUNDS: Final = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
_SECONDS: Final = {
    "time_to_first_token": _FIRST_TOKEN_BOUNDS,
    "time_per_output_token": _TOKEN_BOUNDS,
    "e2e": _REQUEST_BOUNDS,
    "queue": _REQUEST_BOUNDS,
    "prefill": _REQUEST_BOUNDS,
    "decode": _REQUEST_BOUNDS,
    "inference": _REQUEST_BOUNDS,
    "tokenize": _REQUEST_BOUNDS,
    "detokenize": _REQUEST_BOUNDS,
}
COMPLETE: Final = (FINISH_CODES.index("stop"), FINISH_CODES.index("length"))
_RECEIVED, _PREPARED, _ADMITTED, _FIRST_TOKEN, _LAST_TOKEN, _DETOKENIZED = range(1, 7)  # in Requests.bounds_ns


class RequestTotals:
    """Feed it all tables, oldest first. Times and sizes are of requests that ended by stop or length.

    Attributes:
        seconds: by name of the latency, see `latencies`.
        prompt_tokens, output_tokens: by request.
        num_by_reason: requests that ended, by finish reason.
        num_output_tokens: that running requests got.
        num_rejected_by_code: requests (and other messages) that were refused, by the code of the error.
        num_dropped_clients: whose requests were aborted, because they were gone, or did not read.
    """

    def __init__(self) -> None:
        self.seconds = {name: Histogram(bounds) for name, bounds in _SECONDS.items()}
        self.prompt_tokens = Histogram(_COUNT_BOUNDS)
        self.output_tokens = Histogram(_COUNT_BOUNDS)
        self.num_by_reason = dict.fromkeys(FINISH_CODES[1:], 0)
        self.num_output_tokens = 0
        self.num_rejected_by_code = dict.fromkeys(REJECT_CODES, 0)
        self.num_dropped_clients = {"gone": 0, "slow": 0}

    def add(self, tables: SpanTables) -> None:
        """Take in what is new."""
        self.num_output_tokens += int(tables[RecordKind.RESULT_APPLIED]["num_tokens"].sum())
        for code in tables[RecordKind.REQUEST_REJECTED]["reject_code"].tolist():
            self.num_rejected_by_code[REJECT_CODES[code]] += 1
        for is_slow in tables[RecordKind.CLIENT_DROPPED]["is_slow"].tolist():
            self.num_dropped_clients["slow" if is_slow else "gone"] += 1
        ended = finished_requests(tables)
        for reason in ended.finish_reasons:
            self.num_by_reason[reason] += 1
        complete = ended.where(np.isin(ended.counts["finish_code"], COMPLETE))
        self.prompt_tokens.observe(complete.counts["num_prompt_tokens"])
        self.output_tokens.observe(complete.counts["num_output_tokens"])
        for name, values_s in latencies(complete).items():
            self.seconds[name].observe(values_s)


def latencies(complete: Requests) -> dict[str, NDArray[np.float64]]:
    """Seconds by name. Those of tokens are of requests that have any; `time_per_output_token` of those with several."""
    bounds, num_output_tokens = complete.bounds_ns, complete.counts["num_output_tokens"]
    has_tokens = num_output_tokens > 0
    has_gaps = num_output_tokens > 1

    def between(first: int, last: int, selected: NDArray[np.bool_] | slice = slice(None)) -> NDArray[np.float64]:
        return np.asarray((bounds[selected, last] - bounds[selected, first]) / 1e9, np.float64)

    return {
        "time_to_first_token": between(0, _FIRST_TOKEN, has_tokens),
        "time_per_output_token": between(_FIRST_TOKEN, _LAST_TOKEN, has_gaps) / (num_output_tokens[has_gaps] - 1),
        "e2e": complete.e2e_ns / 1e9,
        "queue": between(_PREPARED, _ADMITTED),
        "prefill": between(_ADMITTED, _FIRST_TOKEN),
        "decode": between(_FIRST_TOKEN, _LAST_TOKEN, has_tokens),
        "inference": between(_ADMITTED, _LAST_TOKEN),
        "tokenize": between(_RECEIVED, _PREPARED),
        "detokenize": between(_LAST_TOKEN, _DETOKENIZED),
    }
