"""`OwedResults`: preempted requests whose tokens are still under way.

Owns: which they are. The output process shows those tokens when they come, so they count, although the request has no
slot any more; and it gets none before they are all back.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from procengine.request import Request
from procengine.stopping import NO_TOKEN, FinishLimits, check_finish

__all__ = ["OwedResults"]

Int32s = NDArray[np.int32]
_FIRST = np.zeros(1, np.intp)


class OwedResults:
    """Requests by key."""

    def __init__(self) -> None:
        self._request_by_key: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """A request was preempted; remember it if a worker owes it results."""
        if request.num_in_flight:
            self._request_by_key[request.key] = request

    def forget(self, request: Request) -> None:
        """A request is finished: what comes for it is dropped."""
        self._request_by_key.pop(request.key, None)

    def take(
        self, keys: NDArray[np.int64], positions: Int32s, token_ids: Int32s, is_row_done: NDArray[np.bool_]
    ) -> Iterator[tuple[Request, int, int]]:
        """Append tokens to the requests that wait for them: (request, token, finish code), one by one.

        Args are those of `Scheduler.apply`. Tokens of requests that are not here belong to nobody any more.
        """
        for row, key in enumerate(keys.tolist()):
            request = self._request_by_key.get(key)
            if request is None:
                continue
            assert positions[row] == len(request.token_ids), "a worker skipped or repeated a token"
            request.token_ids = np.append(request.token_ids, token_ids[row])
            request.num_in_flight -= int(is_row_done[row])
            if not request.num_in_flight:
                del self._request_by_key[key]
            codes = check_finish(token_ids[row : row + 1], positions[row : row + 1], _limits_of(request), _FIRST)
            yield request, int(token_ids[row]), int(codes[0])


def _limits_of(request: Request) -> FinishLimits:
    stops = request.stop_token_ids or (NO_TOKEN,)
    return FinishLimits(
        np.array([request.end_position], np.int32),
        np.array([stops], np.int32),
        np.array([request.min_position], np.int32),
    )
