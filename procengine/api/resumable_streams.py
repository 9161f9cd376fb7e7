"""`ResumableStreams`: the streamed answers of this process that a connection may come back to.

Owns: who may have a stream (its request id, and the key it was asked for with), and how many are kept. Never does: keep
an event.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from procengine.api.errors import ApiError
from procengine.api.resumable_stream import WINDOW_HEADER, ResumableStream

__all__ = ["MAX_WINDOW_S", "ResumableStreams", "StreamName"]

MAX_WINDOW_S: Final = 600
_MAX_STREAMS: Final = 256
_MAX_BYTES: Final = 1 << 20  # of one stream's events

StreamName = tuple[str, str]  # the key that was given, "" for none, and the request's id


class ResumableStreams:
    """All of one process."""

    def __init__(self) -> None:
        self._by_name: dict[StreamName, ResumableStream] = {}

    def open(self, name: StreamName, window_s: int) -> ResumableStream:
        """A new one.

        Raises:
            ApiError: 409, there is one with this name; 503, there are too many.
        """
        if name in self._by_name:
            message = f"X-Request-Id: {name[1]} is being answered; GET /v1/streams/ID goes on with it"
            raise ApiError(409, message, param="X-Request-Id", code="request_id_in_use")
        if len(self._by_name) >= _MAX_STREAMS:
            message = f"{WINDOW_HEADER}: {_MAX_STREAMS} streams are kept already; try again later, or without it"
            raise ApiError(503, message, code="overloaded", retry_after_s=1)
        loop = asyncio.get_running_loop()
        stream = self._by_name[name] = ResumableStream(loop, window_s, _MAX_BYTES, partial(self._forget, name))
        return stream

    def find(self, name: StreamName) -> ResumableStream:
        """The one of that name.

        Raises:
            ApiError: 404, there is none, or it is another key's.
        """
        stream = self._by_name.get(name)
        if stream is None:
            message = f"there is no stream {name[1]!r}: it was never there, its window is over, or its end is known"
            raise ApiError(404, message, code="stream_not_found")
        return stream

    def _forget(self, name: StreamName) -> None:
        self._by_name.pop(name, None)
