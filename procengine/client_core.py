"""`ClientCore`: the protocol as a client sees it, without a socket. `Client` and `AsyncClient` both drive one.

Owns: the table of requests and questions under way, and which of them each incoming message belongs to or ends.
A request of n choices ends when the last of them has, or with the first error. One that is lost with its frontend is
sent again, if nobody has seen anything of it; else it ends with a `RequestLostError`.
Never does: send, receive, wait or look at a clock. Methods that start something return the frame to send, and `receive`
may leave some to `take_frames`.

Adding and looking up requests from several threads is safe (each is one dictionary operation); `receive` must be
called by one thread at a time.
"""

from __future__ import annotations

import itertools
from collections import deque
from copy import copy
from typing import Any

import msgspec

from procengine.client_bodies import Body, encode_body, is_cumulative, num_choices
from procengine.delta_cursor import DeltaCursor, EndCursor
from procengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    ProcengineError,
    ProtocolError,
    RequestFailedError,
    RequestLostError,
    error_from_code,
)
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
from procengine.numbering import first_number
from procengine.pending import OnEnd, OnItem, Pending

__all__ = ["ClientCore", "OnEnd", "OnItem", "Pending", "dead_group_error"]


class ClientCore:
    """All that one client has under way. One that `sees_ends_only` is not shown the messages that end nothing; one that
    `resubmits` sends lost requests again."""

    def __init__(self, *, sees_ends_only: bool = False, resubmits: bool = True) -> None:
        self._resubmits = resubmits
        self._epoch = 0  # of the newest frontend we know of
        self._instance: int | None = None  # of the group
        self._numbers = itertools.count(1)  # of all that is sent, in order
        self._frames: list[bytes] = []
        self._make_cursor = EndCursor if sees_ends_only else DeltaCursor
        self._next_key = 0  # larger than the key of anything that has ended
        self._requests: dict[str, Pending] = {}
        # Nobody waits for these any more, but ends of their choices are still to come: their ids are not free.
        self._abandoned: dict[str, Pending] = {}
        self._questions: deque[tuple[type, Pending]] = deque()  # those of a kind are answered in order
        self._ids = itertools.count()
        self._max_request_bytes = 0
        self._death: ProcengineError | None = None

    @property
    def has_pending(self) -> bool:
        """Whether anything is awaited."""
        return bool(self._requests or self._questions)

    def running_ids(self) -> list[str]:
        """Ids of the requests under way."""
        return list(self._requests)

    def hello(self, on_end: OnEnd | None = None) -> tuple[Pending, bytes]:
        """Introduce the client to the frontend; the answer is a Welcome."""
        return self._ask(Welcome, on_end), encode(Hello(PROTOCOL_VERSION))

    def hello_again(self) -> bytes:
        """The frame to send when the connection to the frontend was lost: it may be another one now, and the answer
        tells what became of all that was sent before."""
        return encode(Hello(PROTOCOL_VERSION, next(self._numbers)))

    def take_frames(self) -> list[bytes]:
        """What is to be sent because of what came."""
        frames, self._frames = self._frames, []
        return frames

    def attach(self, on_end: OnEnd | None = None) -> tuple[Pending, bytes]:
        """Introduce the client to the output process; the answer is an Attached."""
        return self._ask(Attached, on_end), self.attach_again()

    def attach_again(self) -> bytes:
        """The frame that introduces it once more: the process that took the first one may have died with it."""
        return encode(Attach(PROTOCOL_VERSION))

    def get_stats(self, *, reset: bool, on_end: OnEnd | None = None) -> tuple[Pending, bytes]:
        """Ask for the counters; the answer is a Stats."""
        self._raise_if_dead()
        return self._ask(Stats, on_end), encode(GetStats(reset))

    def submit(
        self,
        workflow: str,
        body: Body,
        request_id: str | None = None,
        on_end: OnEnd | None = None,
        on_item: OnItem | None = None,
        sent_ns: int = 0,
        traceparent: str = "",
        *,
        is_collected: bool = False,
    ) -> tuple[Pending, bytes]:
        """Enter a request into the table and encode it, with when it is sent (CLOCK_MONOTONIC) and for which span.

        `is_collected` says that the caller looks at nothing before the end. Frames are to be sent in the order of these
        calls and those of `hello_again`. `receive` calls `on_item` for each item but the last.

        Raises:
            InvalidRequestError: it cannot be sent, is too large, or its id is in use.
            EngineDeadError: the group has died.
        """
        self._raise_if_dead()
        request_id = self._new_id() if request_id is None else self._check_id(request_id)
        message = Submit(request_id, workflow, msgspec.Raw(encode_body(body)), sent_ns, traceparent, self._epoch)
        frame = encode(message)
        if len(frame) > self._max_request_bytes:
            raise InvalidRequestError(_too_large(body, len(frame), self._max_request_bytes))
        pending = self._requests[request_id] = Pending(
            request_id,
            on_end,
            on_item,
            num_choices(body),
            is_cumulative=is_cumulative(body),
            is_collected=is_collected,
            first_key=self._next_key,
            submit=message,
        )
        pending.number = next(self._numbers)
        return pending, frame

    def abort(self, request_id: str) -> bytes | None:
        """The frame that stops a running request (it still gets its terminal message); None if there is none."""
        pending = self._requests.get(request_id)
        if pending is None:
            return None
        pending.is_aborted = True
        return encode(Abort(request_id))

    def abandon(self, pending: Pending) -> bytes | None:
        """Forget a request: what still comes for it is dropped. Returns the frame that stops what still runs of it."""
        if not pending.num_open:
            return None
        self._abandoned[pending.request_id] = pending
        if not pending.num_open:  # looked at again: another thread may have just taken in its last end
            self._abandoned.pop(pending.request_id, None)
            return None
        if not pending.is_done:  # else an error of one choice ended it, and others may run on
            self._end(pending)
        return encode(Abort(pending.request_id))

    def receive(self, frame: bytes, arrived_ns: int = 0) -> None:
        """Sort one incoming message, which came at `arrived_ns` (CLOCK_MONOTONIC)."""
        try:
            message = decode_to_client(frame)
        except msgspec.DecodeError as error:
            self.fail_all(ProtocolError(f"a message from the group cannot be read: {error}"))
            return
        if type(message) is Outputs:
            self._take_items(message, arrived_ns)
        else:
            self._take_control(message)

    def fail_all(self, error: ProcengineError) -> None:
        """End everything under way with an error."""
        questions = [question for _, question in self._questions]
        for pending in [*self._requests.values(), *self._abandoned.values(), *questions]:
            pending.num_open = 0
            if not pending.is_done:
                self._end(pending, error)
        self._questions.clear()
        self._abandoned.clear()

    def die(self, error: ProcengineError) -> None:
        """The group is gone: end everything, and refuse whatever comes after."""
        self._death = error
        self.fail_all(error)

    def _take_items(self, message: Outputs, arrived_ns: int) -> None:
        """The hot path: two dictionary lookups, one call, a few comparisons and one append an item."""
        requests = self._requests
        for item in message.items:
            pending = requests.get(item.request_id)
            if pending is None:
                if item.finish_reason is not None:
                    self._take_late_end(item)
                continue
            if 0 <= item.key < pending.first_key:
                continue  # of a request that had this id before, sent again
            new: Delta | Embedding | None = item
            if type(item) is Delta:
                cursor = pending.cursors.get(item.index) or self._add_cursor(pending, item.index)
                try:
                    new = cursor.take(item)
                except ProtocolError as error:
                    self._abandoned[pending.request_id] = pending
                    self._end(pending, error)
                    continue
            if new is None:
                continue
            pending.items.append(new)
            if new.finish_reason is not None:
                pending.delivered_ns, pending.arrived_ns = message.sent_ns, arrived_ns
                if self._is_over(pending, new):
                    continue
            if pending.on_item is not None:
                pending.on_item()

    def _add_cursor(self, pending: Pending, index: int) -> DeltaCursor:
        cursor = pending.cursors[index] = self._make_cursor(is_cumulative=pending.is_cumulative)
        return cursor

    def _is_over(self, pending: Pending, item: Delta | Embedding) -> bool:
        """Take in the end of a choice; whether it ends the request: the last one does, and so does an error."""
        error = _item_error(item)
        self._next_key = max(self._next_key, item.key + 1)
        pending.num_open -= 1
        if not pending.num_open:
            self._end(pending, error)
            self._abandoned.pop(pending.request_id, None)
        elif error is not None:
            self._abandoned[pending.request_id] = pending  # its other choices run on
            self._end(pending, error)
        return pending.is_done

    def _take_late_end(self, item: Delta | Embedding) -> None:
        """The end of a choice for which nobody waits."""
        pending = self._abandoned.get(item.request_id)
        if pending is None or 0 <= item.key < pending.first_key:
            return
        if isinstance(item, Delta):
            cursor = pending.cursors.get(item.index) or self._add_cursor(pending, item.index)
            if cursor.has_ended:
                return  # sent again
            cursor.has_ended = True
        self._next_key = max(self._next_key, item.key + 1)
        pending.num_open -= 1
        if not pending.num_open:
            self._abandoned.pop(item.request_id, None)

    def _take_control(self, message: Welcome | Received | Rejected | Stats | Attached | Lost | Outputs) -> None:
        assert not isinstance(message, Outputs)
        if isinstance(message, Rejected):
            self._take_rejection(message)
        elif isinstance(message, Received):
            self._take_received(message)
        elif isinstance(message, Lost):
            self._take_lost(message)
        else:
            if isinstance(message, Welcome):
                self._take_welcome(message)
            self._take_answer(message)

    def _take_answer(self, message: Welcome | Stats | Attached) -> None:
        """It answers the oldest question of its kind; without one it was said twice, because it was asked twice."""
        for kind, question in self._questions:
            if kind is type(message):
                self._questions.remove((kind, question))
                question.items.append(message)
                self._end(question, _version_error(message))
                return

    def _take_received(self, message: Received) -> None:
        self._epoch = max(self._epoch, message.epoch)
        pending = self._requests.get(message.request_id) or self._abandoned.get(message.request_id)
        if pending is not None:
            pending.epoch = message.epoch

    def _take_lost(self, message: Lost) -> None:
        """What has begun anew since is another matter."""
        error, next_key = RequestLostError(message.message), first_number(message.epoch + 1)
        for request_id in message.request_ids:
            for pending in (self._requests.get(request_id), self._abandoned.get(request_id)):
                if pending is not None and pending.epoch <= message.epoch and pending.first_key < next_key:
                    self._lose(pending, next_key, error)

    def _take_welcome(self, message: Welcome) -> None:
        """All that was sent before the question and is not known to this frontend is lost: see docs/PROTOCOL.md."""
        if message.instance != (self._instance if self._instance is not None else message.instance):
            self.die(EngineDeadError(f"group {message.group!r} is gone: another one has taken its place"))
            return
        self._instance = message.instance
        self._max_request_bytes = message.max_request_bytes
        self._epoch = max(self._epoch, message.epoch)
        error = RequestLostError(f"the frontend of group {message.group!r} died while this request was running")
        for pending in [*self._requests.values(), *self._abandoned.values()]:
            if pending.epoch < message.epoch and pending.number < message.mark:
                self._lose(pending, first_number(message.epoch), error)
        if message.mark:
            self._frames += [encode(GetStats()) for kind, _ in self._questions if kind is Stats]

    def _lose(self, pending: Pending, next_key: int, error: RequestLostError) -> None:
        """It has died with its frontend; keys of later ones begin with `next_key`. What is sent again names the newest
        frontend that has spoken to us, not the one it will meet: that one is to say that it has it."""
        request_id = pending.request_id
        if self._resubmits and pending.can_restart and request_id in self._requests:
            assert pending.submit is not None
            pending.restart(self._epoch, max(self._next_key, next_key))
            pending.number = next(self._numbers)
            self._frames.append(encode(msgspec.structs.replace(pending.submit, epoch=self._epoch)))
            return
        pending.num_open = 0
        self._abandoned.pop(request_id, None)
        if not pending.is_done:
            self._end(pending, error)

    def _take_rejection(self, message: Rejected) -> None:
        error = error_from_code(message.code, message.message, message.retry_after_s)
        if not message.request_id:
            self.fail_all(error)
            return
        abandoned = self._abandoned.pop(message.request_id, None)
        pending = self._requests.get(message.request_id)
        for one in (abandoned, pending):
            if one is not None:
                one.num_open = 0
        if pending is not None:
            self._end(pending, error)

    def _end(self, pending: Pending, error: ProcengineError | None = None) -> None:
        self._requests.pop(pending.request_id, None)
        pending.error = error
        pending.is_done = True
        if pending.on_end is not None:
            pending.on_end(pending)

    def _ask(self, kind: type, on_end: OnEnd | None) -> Pending:
        question = Pending("", on_end)
        self._questions.append((kind, question))
        return question

    def _new_id(self) -> str:
        """The next id that no running request has: callers may choose ids of their own."""
        return next(text for number in self._ids if not self._is_taken(text := f"r{number}"))

    def _is_taken(self, request_id: str) -> bool:
        return request_id in self._requests or request_id in self._abandoned

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            raise copy(self._death)

    def _check_id(self, request_id: str) -> str:
        if self._is_taken(request_id):
            raise InvalidRequestError(f"request_id: {request_id!r} is in use by a request that has not ended")
        if not request_id or not request_id.isprintable():
            raise InvalidRequestError(f"request_id: must be a non-empty, printable text, got {request_id!r}")
        return request_id


def dead_group_error(name: str) -> EngineDeadError:
    """What callers see when the supervisor has vanished."""
    return EngineDeadError(f"group {name!r} is gone: its supervisor is not running any more")


def _item_error(item: Delta | Embedding) -> RequestFailedError | None:
    """The error in a terminal message. Of a vector that was aborted there is nothing to return, so that is one too."""
    if item.finish_reason == "error" or (isinstance(item, Embedding) and item.finish_reason != "stop"):
        return RequestFailedError(item.error or f"request {item.request_id} ended by {item.finish_reason}")
    return None


def _version_error(message: Any) -> ProtocolError | None:
    version = getattr(message, "version", PROTOCOL_VERSION)
    if version == PROTOCOL_VERSION:
        return None
    return ProtocolError(f"the group speaks protocol version {version}, this client speaks {PROTOCOL_VERSION}")


def _too_large(body: Body, num_bytes: int, limit: int) -> str:
    field = next((name for name in ("prompt", "prompt_token_ids", "messages") if name in body), "request")
    return f"{field}: the request has {num_bytes} bytes, the limit (max_request_bytes) is {limit}"
