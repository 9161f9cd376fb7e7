"""`HttpBenchClient`: sends requests to a group's HTTP front door and notes when pieces of the answers came.

Owns: plain sockets, a connection for each request under way, kept for the next. Reads no event while requests are under
way, but for their end. Afterwards its notes become the messages that the group's own client would have noted, so that
one report serves both. Never does: compute a figure.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from procengine.bench.arrivals import Pace
from procengine.bench.record import Record
from procengine.bench.run import BenchClient, PacedRun, no_collections
from procengine.bench.workload import BenchRequest
from procengine.client_core import Pending
from procengine.errors import ConfigError, EngineDeadError, ProcengineError
from procengine.messages import Delta, Outputs, Stats, Welcome, encode
from procengine.sampling_params import SamplingParams

__all__ = ["HttpBenchClient"]

_END: Final = b"data: [DONE]\n\n\r\n0\r\n\r\n"
_EVENT: Final = b"data: {"
_SILENCE_S: Final = 120.0
_PIECE: Final = 1 << 18
_JSON: Final = json.JSONDecoder()


class _Connection:
    """One connection and the request that is under way on it."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=_SILENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.pending: Pending | None = None
        self.tail = b""

    def is_answered(self, data: bytes) -> bool:
        """Take in a piece of the answer; whether it is the last."""
        self.tail = (self.tail + data)[-len(_END) :]
        return self.tail == _END


class HttpBenchClient:
    """A client of one group that measures over HTTP. What it asks of the group itself goes through `own`."""

    def __init__(self, own: BenchClient, url: str, key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or parts.hostname is None or parts.port is None:
            raise ConfigError(f"--http: the group serves no plain HTTP on a port ({url or 'none at all'})")
        self._own = own
        self._key = b"" if key is None else b"Authorization: Bearer %b\r\n" % key.encode()
        self._address = (parts.hostname, parts.port)
        self._free: list[_Connection] = []
        self._busy: dict[int, _Connection] = {}

    @property
    def welcome(self) -> Welcome:
        """What the group said about itself."""
        return self._own.welcome

    def stats(self, *, reset: bool = False) -> Stats:
        """The group's counters since the last reset."""
        return self._own.stats(reset=reset)

    def close(self) -> None:
        """Close all connections."""
        for connection in [*self._free, *self._busy.values()]:
            connection.socket.close()
        self._own.close()

    def run(self, requests: Sequence[BenchRequest], params: SamplingParams, pace: Pace) -> Record:
        """Send all requests at the given pace and wait for all answers, as `BenchClient.run`.

        Raises:
            EngineDeadError: a connection broke, or nothing came for two minutes.
        """
        prepared = [(Pending(f"h{at}"), self._request(one, params)) for at, one in enumerate(requests)]
        self._connect(min(len(prepared), pace.max_concurrency or len(prepared)))
        notes: list[tuple[int, Pending, bytes]] = []
        by_id = {pending.request_id: pending for pending, _ in prepared}
        poller = select.epoll()
        for connection in self._free:
            poller.register(connection.socket, select.EPOLLIN)
        with contextlib.closing(poller), no_collections():
            paced = PacedRun(prepared, pace)
            while len(paced.record.submitted_ns) < len(prepared) or self._busy:
                frame = paced.next_frame()
                if frame is not None:
                    self._send(by_id[next(reversed(paced.record.submitted_ns))], frame)
                    self._take(poller, 0, notes)
                else:
                    self._take(poller, paced.poll_ms(), notes)
                    paced.sleep_if_nearly_due()
        _fill(paced.record, notes)
        return paced.record

    def _connect(self, number: int) -> None:
        self._free += [_Connection(self._address) for _ in range(number - len(self._free))]

    def _request(self, request: BenchRequest, params: SamplingParams) -> bytes:
        body: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": params.temperature,
            "ignore_eos": params.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        is_chat = isinstance(request.prompt, list) and bool(request.prompt) and isinstance(request.prompt[0], dict)
        body["messages" if is_chat else "prompt"] = request.prompt
        data = msgspec.json.encode(body)
        path = b"/v1/chat/completions" if is_chat else b"/v1/completions"
        head = b"POST %b HTTP/1.1\r\nHost: localhost\r\n%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        return head % (path, self._key, len(data)) + data

    def _send(self, pending: Pending, frame: bytes) -> None:
        connection = self._free.pop()
        connection.pending = pending
        self._busy[connection.socket.fileno()] = connection
        connection.socket.sendall(frame)

    def _take(self, poller: select.epoll, timeout_ms: int, notes: list[tuple[int, Pending, bytes]]) -> None:
        ready = poller.poll(timeout_ms / 1e3)
        now_ns = time.perf_counter_ns()
        for fd, _ in ready:
            connection = self._busy.get(fd)
            if connection is None or connection.pending is None:
                raise EngineDeadError("a connection that had nothing under way was closed")
            data = connection.socket.recv(_PIECE)
            if not data:
                raise EngineDeadError("the server closed a connection in the middle of an answer")
            pending = connection.pending
            notes.append((now_ns, pending, data))
            if connection.is_answered(data) or _is_refusal(data):
                connection.pending = None
                self._free.append(self._busy.pop(fd))
                if pending.on_end is not None:
                    pending.on_end(pending)


def _is_refusal(data: bytes) -> bool:
    return data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 200")


def _fill(record: Record, notes: Sequence[tuple[int, Pending, bytes]]) -> None:
    """The notes as messages of the group. An event is a token; what the counts say beyond that came with the last."""
    pieces: dict[str, list[tuple[int, bytes]]] = {}
    for now_ns, pending, data in notes:
        pieces.setdefault(pending.request_id, []).append((now_ns, data))
    frames: list[tuple[int, bytes]] = []
    for request_id, of_one in pieces.items():
        text = b"".join(data for _, data in of_one)
        if _is_refusal(text):
            record.failures[request_id] = text.partition(b"\r\n\r\n")[2].decode(errors="replace")[:200]
            continue
        usage = _usage(text)
        counts = _token_counts([data for _, data in of_one], usage["completion_tokens"])
        last = len(counts) - 1
        for at, ((now_ns, _), count) in enumerate(zip(of_one, counts, strict=True)):
            delta = Delta(
                request_id,
                0,
                "",
                [0] * count,
                finish_reason="length" if at == last else None,
                prompt_token_ids=[0] * usage["prompt_tokens"] if at == 0 else None,
            )
            if count or at == last:
                frames.append((now_ns, encode(Outputs([delta]))))
    record.frames.extend(sorted(frames, key=lambda noted: noted[0]))


def _usage(text: bytes) -> dict[str, int]:
    at = text.rfind(b'"usage":{')
    if at < 0:
        raise ProcengineError(f"an answer ended without its counts: {text[-200:]!r}")
    decoded, _ = _JSON.raw_decode(text[at + len(b'"usage":') :].decode(errors="replace"))
    return dict(decoded)


def _token_counts(pieces: Sequence[bytes], num_tokens: int) -> list[int]:
    """How many tokens came with each piece."""
    counts, left = [], num_tokens
    for data in pieces:
        count = min(data.count(_EVENT), left)
        counts.append(count)
        left -= count
    last = max((at for at, count in enumerate(counts) if count), default=0)
    counts[last] += left
    return counts
