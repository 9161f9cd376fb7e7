"""`PauseTimers`: ends the pauses of pipelines.

Wiring only: `Pipeline` decides when it pauses and for how long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from procengine.pipeline import Pipeline

__all__ = ["PauseTimers"]


class PauseTimers:
    """One timer for each pipeline that pauses, and none for the others. `on_end` is called when a pause is over.

    The loop counts in milliseconds. A pause may be one shorter or longer: it is 2 at least, and as much is left then.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self._loop = loop
        self._on_end = on_end
        self._handles: dict[int, asyncio.TimerHandle] = {}  # by rank

    def settle(self, pipeline: Pipeline) -> None:
        """Steps were planned, or not because of a pause that may have just begun."""
        if not pipeline.pause_ns:
            if self._handles and (handle := self._handles.pop(pipeline.rank, None)):
                handle.cancel()
        elif pipeline.rank not in self._handles:
            self._handles[pipeline.rank] = self._loop.call_later(pipeline.pause_ns / 1e9, self._end, pipeline)

    def _end(self, pipeline: Pipeline) -> None:
        del self._handles[pipeline.rank]
        pipeline.end_pause()
        self._on_end()
