"""`/v1/streams/ID`: going on with a stream whose connection was lost; and how a request asks for that.

Owns: the header, and which event comes next. Never does: keep a stream (`ResumableStreams`).
"""

from __future__ import annotations

from urllib.parse import unquote

from procengine.api.api_key import given_key
from procengine.api.errors import ApiError, bad_request
from procengine.api.exchange import EVENT_STREAM, Exchange, HttpRequest, Response
from procengine.api.resumable_stream import WINDOW_HEADER
from procengine.api.resumable_streams import MAX_WINDOW_S, StreamName
from procengine.api.routes import Call

__all__ = ["cancel_stream", "resume_stream", "way_back"]

_MAX_DIGITS = 15


def way_back(call: Call, *, streams: bool) -> Exchange:
    """Where an answer goes: to the connection, or through a stream that outlives it, if the request asks for one.

    Raises:
        ApiError: it cannot have one.
    """
    window_s = _window_s(call.request)
    if window_s is None:
        return call.exchange
    if not streams:
        raise bad_request(f"{WINDOW_HEADER}: only a streamed answer can be resumed, and stream is not true")
    if call.service.config.api.num_workers > 1:
        raise bad_request(f"{WINDOW_HEADER}: needs --api-workers 1: a new connection may come to any of them")
    stream = call.service.streams.open((given_key(call.request), call.request_id), window_s)
    stream.attach(call.exchange, 0)
    return stream


def resume_stream(call: Call) -> None:
    """`GET /v1/streams/ID`: the events behind `Last-Event-ID`, and those that are still to come."""
    stream, after = call.service.streams.find(_name(call)), _last_event(call.request)
    if call.request.method == "HEAD":  # it is there; who has it keeps it
        call.exchange.send(Response(200, b"", EVENT_STREAM))
    else:
        stream.attach(call.exchange, after)


def cancel_stream(call: Call) -> None:
    """`DELETE /v1/streams/ID`: abort it now, and not when the window is over."""
    call.service.streams.find(_name(call)).abandon()
    call.exchange.send(Response(204, b""))


def _name(call: Call) -> StreamName:
    return given_key(call.request), unquote(call.tail)


def _window_s(request: HttpRequest) -> int | None:
    given = request.headers.get(WINDOW_HEADER.lower())
    if given is None:
        return None
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS and 1 <= int(given) <= MAX_WINDOW_S):
        raise bad_request(f"{WINDOW_HEADER}: must be 1 to {MAX_WINDOW_S} (seconds), got {given!r}")
    return int(given)


def _last_event(request: HttpRequest) -> int:
    given = request.headers.get("last-event-id", "")
    if not given:
        return 0
    if not (given.isascii() and given.isdigit() and len(given) <= _MAX_DIGITS):
        raise ApiError(400, f"Last-Event-ID: must be the id of an event, got {given!r}", param="Last-Event-ID")
    return int(given)
