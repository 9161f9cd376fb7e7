"""A stream between its job and its connections: whoever has it, nothing is lost, doubled or kept too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from procengine.api.errors import ApiError
from procengine.api.exchange import EVENT_STREAM, Response
from procengine.api.resumable_stream import ResumableStream
from procengine.api.resumable_streams import ResumableStreams

ERROR = Response(400, b"{}")


class Peer:
    """A connection's side that remembers."""

    def __init__(self) -> None:
        self.headers: list[tuple[str, str]] = []
        self.has_begun = self.is_over = self.is_full = False
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.got: list[object] = []

    def send(self, response: Response) -> None:
        self.got.append(response.status)

    def begin(self, content_type: str) -> None:
        self.got.append("begin")

    def write(self, data: bytes) -> None:
        self.got.append(data)

    def end(self, data: bytes = b"") -> None:
        self.got += [data, "end"]

    def cut(self) -> None:
        self.got.append("cut")

    def leave(self) -> None:
        assert self.on_gone is not None
        self.on_gone()


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Case:
    """A stream and what it told."""

    def __init__(self, loop: asyncio.AbstractEventLoop, window_s: int = 60, max_bytes: int = 1000) -> None:
        self.forgotten = self.aborted = self.roomy = 0
        self.stream = ResumableStream(loop, window_s, max_bytes, self._forget)
        self.stream.on_gone = self._abort
        self.stream.on_room = self._room

    def _forget(self) -> None:
        self.forgotten += 1

    def _abort(self) -> None:
        self.aborted += 1

    def _room(self) -> None:
        self.roomy += 1

    def attach(self, after: int = 0) -> Peer:
        peer = Peer()
        self.stream.attach(peer, after)
        return peer


def test_who_comes_back_gets_what_he_missed_and_what_follows(loop: asyncio.AbstractEventLoop) -> None:
    case = Case(loop)
    first = case.attach()
    case.stream.begin(EVENT_STREAM)
    case.stream.write(b"data: a\n\n")
    first.leave()
    assert case.roomy == 1  # what waited for a slow peer can come
    case.stream.write(b"data: b\n\ndata: c\n\n")
    second = case.attach(1)
    case.stream.end(b"data: [DONE]\n\n")
    assert first.got == ["begin", b"id: 1\ndata: a\n\n"]
    assert second.got == ["begin", b"id: 2\ndata: b\n\nid: 3\ndata: c\n\n", b"id: 4\ndata: [DONE]\n\n", "end"]
    assert dict(second.headers)["X-Procengine-Resume-Window"] == "60"
    assert case.attach(2).got == ["begin", b"id: 3\ndata: c\n\nid: 4\ndata: [DONE]\n\n", "end"]
    assert case.attach(4).got == [204]  # the end is told once
    assert (case.aborted, case.forgotten) == (0, 0)


def test_an_error_before_the_first_event_is_told_once_whoever_is_there(loop: asyncio.AbstractEventLoop) -> None:
    for leaves_first in (False, True):
        case = Case(loop)
        peer = case.attach()
        if leaves_first:
            peer.leave()
        case.stream.send(ERROR)
        if leaves_first:
            assert case.forgotten == 0
            peer = case.attach()
        assert (peer.got, case.forgotten, case.aborted) == ([400], 1, 0)


def test_the_newest_connection_has_it(loop: asyncio.AbstractEventLoop) -> None:
    case = Case(loop)
    first, second = case.attach(), case.attach()
    case.stream.begin(EVENT_STREAM)
    case.stream.write(b"data: a\n\n")
    assert first.got == ["cut"] and second.got == ["begin", b"id: 1\ndata: a\n\n"]


def test_the_window_ends_the_request_and_only_once(loop: asyncio.AbstractEventLoop) -> None:
    case = Case(loop, window_s=0)
    case.attach().leave()
    loop.run_until_complete(asyncio.sleep(0.01))
    assert (case.aborted, case.forgotten, case.stream.is_over) == (1, 1, True)
    over = Case(loop, window_s=0)
    peer = over.attach()
    over.stream.begin(EVENT_STREAM)
    over.stream.end(b"data: [DONE]\n\n")
    loop.run_until_complete(asyncio.sleep(0.01))
    assert (over.aborted, over.forgotten) == (0, 1) and peer.got[-1] == "end"


def test_events_that_are_gone_or_never_were_are_errors(loop: asyncio.AbstractEventLoop) -> None:
    case = Case(loop, max_bytes=60)
    case.attach().leave()
    case.stream.begin(EVENT_STREAM)
    for at in range(20):
        case.stream.write(b"data: %d\n\n" % at)
    for after, status in ((0, 410), (21, 400)):
        with pytest.raises(ApiError) as refused:
            case.attach(after)
        assert refused.value.status == status
    assert case.attach(19).got == ["begin", b"id: 20\ndata: 19\n\n"]


def test_there_are_only_so_many(loop: asyncio.AbstractEventLoop) -> None:
    async def fill() -> None:
        streams = ResumableStreams()
        for number in range(256):
            streams.open(("", str(number)), 5)
        with pytest.raises(ApiError, match="kept already") as refused:
            streams.open(("", "256"), 5)
        assert (refused.value.status, refused.value.retry_after_s) == (503, 1)
        with pytest.raises(ApiError, match="is being answered") as refused:
            streams.open(("", "1"), 5)
        assert refused.value.status == 409
        with pytest.raises(ApiError, match="no stream"):
            streams.find(("another key", "1"))
        streams.find(("", "1")).abandon()
        streams.open(("", "1"), 5)

    loop.run_until_complete(fill())
