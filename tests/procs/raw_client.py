"""A client made of bare sockets: it sends what it is told, right or wrong, and keeps every message that comes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq

from procengine import ipc
from procengine.delta_cursor import DeltaCursor
from procengine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Attached,
    Delta,
    Embedding,
    GetStats,
    Hello,
    Lost,
    Outputs,
    Received,
    Rejected,
    Stats,
    Submit,
    Welcome,
    decode_to_client,
    encode,
)
from tests.procs.harness import PATIENCE_S

__all__ = ["RawClient", "body"]

Message = Welcome | Received | Rejected | Stats | Attached | Lost | Delta | Embedding


def body(prompt: str | list[int] | None = None, *, max_tokens: int | None = 4, **fields: Any) -> dict[str, Any]:
    """A `generate` body; further fields are sampling parameters unless they are the body's own."""
    names = ("messages", "priority", "cache_salt")
    own: dict[str, Any] = {name: fields.pop(name) for name in names if name in fields}
    if isinstance(prompt, str):
        own["prompt"] = prompt
    elif prompt is not None:
        own["prompt_token_ids"] = prompt
    return {**own, "sampling_params": {"temperature": 0.0, "max_tokens": max_tokens, **fields}}


class RawClient:
    """Two DEALER sockets under one identity. `messages` holds all that came, oldest first, outputs taken apart.

    One that `drops_repeats` follows the rule for what a restarted output process sends again; ids are used once then.
    """

    def __init__(
        self, endpoint: str, *, is_attached: bool = True, drops_repeats: bool = False, identity: bytes | None = None
    ) -> None:
        self._context = ipc.make_context()
        self.identity = identity or b"t" + os.urandom(8)
        self.frontend = ipc.connect(self._context, zmq.DEALER, endpoint, identity=self.identity)
        self.output: zmq.Socket[bytes] | None = None
        self._others: list[zmq.Socket[bytes]] = []
        self.messages: list[Message] = []
        self.num_repeats = 0
        self._drops_repeats = drops_repeats
        self._cumulative: set[str] = set()
        self._cursors: dict[tuple[str, int], DeltaCursor] = {}
        self._poller = zmq.Poller()
        self._poller.register(self.frontend, zmq.POLLIN)
        try:
            self.send(Hello(PROTOCOL_VERSION))
            welcome = self.wait_for(lambda m: isinstance(m, Welcome))
            assert isinstance(welcome, Welcome)
            self.welcome = welcome
            if is_attached:
                self.attach()
        except BaseException:
            self.close()
            raise

    def attach(self) -> None:
        """Connect to the output process."""
        self.output = ipc.connect(self._context, zmq.DEALER, self.welcome.output_endpoint, identity=self.identity)
        self._poller.register(self.output, zmq.POLLIN)
        self.output.send(encode(Attach(PROTOCOL_VERSION)))
        self.wait_for(lambda m: isinstance(m, Attached))

    def connect(self, endpoint: str, kind: int = zmq.DEALER) -> zmq.Socket[bytes]:
        """A socket to any other door of the group; it is closed with this client."""
        self._others.append(ipc.connect(self._context, kind, endpoint))
        return self._others[-1]

    def send(self, message: Hello | Submit | Abort | GetStats) -> None:
        """A message of the protocol."""
        self.frontend.send(encode(message))

    def send_bytes(self, *frames: bytes) -> None:
        """Anything."""
        self.frontend.send_multipart(list(frames))

    def submit(self, request_id: str, request_body: Any, workflow: str = "generate") -> None:
        """A request with any body."""
        params = request_body.get("sampling_params", {}) if isinstance(request_body, dict) else {}
        if isinstance(params, dict) and params.get("output_kind") == "cumulative":
            self._cumulative.add(request_id)
        self.send(Submit(request_id, workflow, msgspec.Raw(encode(request_body))))

    def abort(self, request_id: str) -> None:
        """End a request."""
        self.send(Abort(request_id))

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """The group's counters."""
        self.send(GetStats(reset))
        answer = self.wait_for(lambda m: isinstance(m, Stats))
        assert isinstance(answer, Stats)
        self.messages.remove(answer)
        return answer.values

    def receive(self, timeout_s: float = 0.0) -> None:
        """Take in what is here, waiting for the first message up to `timeout_s`."""
        for source, _ in self._poller.poll(int(1e3 * timeout_s)):
            while True:
                try:
                    data = source.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                message = decode_to_client(data)
                if isinstance(message, Outputs):
                    self.messages += [new for item in message.items if (new := self._new_part(item))]
                else:
                    self.messages.append(message)

    def _new_part(self, item: Delta | Embedding) -> Delta | Embedding | None:
        if not self._drops_repeats:
            return item
        index = item.index if isinstance(item, Delta) else 0
        cursor = self._cursors.get((item.request_id, index))
        if cursor is None:
            cursor = DeltaCursor(is_cumulative=item.request_id in self._cumulative)
            self._cursors[item.request_id, index] = cursor
        self.num_repeats += cursor.has_ended
        if isinstance(item, Delta):
            return cursor.take(item)
        has_ended, cursor.has_ended = cursor.has_ended, True
        return None if has_ended else item

    def receive_for(self, duration_s: float) -> None:
        """Take in what comes until the time is over."""
        deadline_s = time.monotonic() + duration_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            self.receive(left_s)

    def wait_for(self, matches: Callable[[Message], bool], timeout_s: float = PATIENCE_S) -> Message:
        """The first message that matches, waiting for it if it is not here yet."""
        deadline_s = time.monotonic() + timeout_s
        seen = 0
        while True:
            for message in self.messages[seen:]:
                if matches(message):
                    return message
            seen = len(self.messages)
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"the message did not come within {timeout_s:g} s; last ones: {self.messages[-5:]}"
            self.receive(min(left_s, 0.5))

    def wait_end(self, request_id: str, timeout_s: float = PATIENCE_S) -> Message:
        """The terminal message of a request."""
        return self.wait_for(lambda m: _ends(m, request_id), timeout_s)

    def wait_ends(self, *request_ids: str, timeout_s: float = PATIENCE_S) -> None:
        """Until all of them have their terminal messages."""
        missing = set(request_ids)
        deadline_s = time.monotonic() + timeout_s
        seen = 0
        while missing:
            new, seen = self.messages[seen:], len(self.messages)
            missing -= {id_ for m in new if (id_ := getattr(m, "request_id", "")) in missing and _ends(m, id_)}
            missing.difference_update(*(m.request_ids for m in new if isinstance(m, Lost)))
            left_s = deadline_s - time.monotonic()
            assert left_s > 0, f"{len(missing)} requests did not end within {timeout_s:g} s: {sorted(missing)[:5]}"
            if missing:
                self.receive(min(left_s, 0.5))

    def rejection(self, request_id: str, timeout_s: float = PATIENCE_S) -> Rejected:
        """The refusal of a request."""
        end = self.wait_end(request_id, timeout_s)
        assert isinstance(end, Rejected), end
        return end

    def deltas(self, request_id: str) -> list[Delta]:
        """What came for a request."""
        return [m for m in self.messages if isinstance(m, Delta) and m.request_id == request_id]

    def deltas_by_index(self, request_id: str) -> dict[int, list[Delta]]:
        """The same for each choice."""
        by_index: dict[int, list[Delta]] = {}
        for delta in self.deltas(request_id):
            by_index.setdefault(delta.index, []).append(delta)
        return by_index

    def token_ids(self, request_id: str) -> list[int]:
        """All tokens that came for a request."""
        return [token_id for delta in self.deltas(request_id) for token_id in delta.token_ids]

    def num_ends(self, request_id: str) -> int:
        """Terminal messages of a request: there must be one."""
        self.receive()
        return sum(_ends(m, request_id) for m in self.messages)

    def close(self) -> None:
        """Leave without a word."""
        self._context.destroy(linger=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()


def _ends(message: Message, request_id: str) -> bool:
    if isinstance(message, Rejected):
        return message.request_id == request_id
    if isinstance(message, Lost):
        return request_id in message.request_ids
    return isinstance(message, Delta | Embedding) and message.request_id == request_id and bool(message.finish_reason)
