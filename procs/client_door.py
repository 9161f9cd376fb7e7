"""`ClientDoor`: the frontend's side towards clients: who they are, what they ask for, and what is refused.

Wiring only: `Admission` says what may come in, `Engine` takes it on; this reads the clock and draws the seeds.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from procengine import ipc
from procengine.admission import Admission
from procengine.chat_template import ChatTemplate
from procengine.child import Child
from procengine.completion_rate import CompletionRate
from procengine.engine import Engine
from procengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    ProcengineError,
    ProtocolError,
    RequestFailedError,
    ShuttingDownError,
)
from procengine.messages import (
    PROTOCOL_VERSION,
    UNREADABLE,
    Abort,
    Finish,
    GetStats,
    Hello,
    Lost,
    Received,
    Rejected,
    Stats,
    Submit,
    Welcome,
    decode_from_client,
    encode,
)
from procengine.procs.client_sockets import ClientSockets
from procengine.procs.output_link import OutputLink
from procengine.procs.request_deadlines import RequestDeadlines
from procengine.procs.step_pump import StepPump
from procengine.profiling.records import RecordKind, id_words, reject_number
from procengine.profiling.span_ring import SpanWriter
from procengine.recent_clients import RecentClients
from procengine.stray_frames import StrayFrames
from procengine.structured.compiler import GrammarCompiler
from procengine.submission import Submission
from procengine.tokenize_queue import TokenizeQueue
from procengine.tokenizer import Tokenizer
from procengine.trace_context import TraceContext
from procengine.workflows.parts import FrontendParts
from procengine.workflows.prompt import Prepared

__all__ = ["ClientDoor"]

_REQUEST_ACCEPTED = int(RecordKind.REQUEST_ACCEPTED)
_REQUEST_TRACED = int(RecordKind.REQUEST_TRACED)
_REQUEST_REJECTED = int(RecordKind.REQUEST_REJECTED)
_MAX_UNSENT = 1 << 14  # answers that one client has not read; all its requests may be refused at once
_MAX_UNREAD = 256  # messages of one client that wait for us; the others wait at the client
_NO_ROOM_RETRY_S = 1.0  # clients stay as long as they like: nobody can tell when one leaves


class ClientDoor:
    """It takes requests from `open` to `start_drain`; what comes before waits. `pump` is called when some came."""

    def __init__(
        self,
        child: Child,
        loop: asyncio.AbstractEventLoop,
        parts: Mapping[str, FrontendParts],
        to_output: OutputLink,
        spans: SpanWriter,
        pump: Callable[[], None],
        strays: StrayFrames,
    ) -> None:
        self._child = child
        self._loop = loop
        self._to_output = to_output
        self._spans = spans
        self._pump = pump
        self._strays = strays
        self._admission = Admission(parts, child.config.limits)
        limits = child.config.limits
        self._clients = RecentClients(max(4096, limits.max_clients))
        self._preparing: dict[tuple[bytes, str], Submission] = {}
        self._num_preparing_by_client: Counter[bytes] = Counter()
        self._deadlines = RequestDeadlines(loop, limits, self._is_preparing, self._refuse, self._end)
        self._rate = CompletionRate(time.monotonic_ns())
        self._num_ended = 0  # that the rate knows of
        self._num_rejected = 0
        self._engine: Engine | None = None
        self._steps: StepPump | None = None
        self._is_draining = False
        self._paused: list[tuple[bytes, Submit | Abort, int]] | None = None  # what came while nothing is taken
        self._tokenize = _tokenize_queue(child, loop)
        # A frame over the limit drops the connection, so the limit here is a backstop; _on_submit tells the client.
        self._sockets = ClientSockets(  # they wait until there is somebody to run requests
            child,
            loop,
            max_message_bytes=2 * limits.max_request_bytes + 65536,
            max_unsent=_MAX_UNSENT,
            max_unread=_MAX_UNREAD,
        )

    def open(self, engine: Engine, steps: StepPump) -> None:
        """From here on there is somebody to run requests."""
        self._engine, self._steps = engine, steps
        self._deadlines.open(engine)
        self._sockets.start(self._on_message, self._pump)

    def settle(self) -> None:
        """To be called after each change: what has ended makes room, and needs no deadline."""
        if self._engine is not None and self._engine.num_ended != self._num_ended:
            self._rate.add(self._engine.num_ended - self._num_ended, time.monotonic_ns())
            self._num_ended = self._engine.num_ended
        self._deadlines.settle()

    def start_drain(self) -> None:
        """From here on they are refused."""
        self._is_draining = True

    def pause(self) -> None:
        """Requests wait from here on, until `go_on` or `turn_away`."""
        self._paused = self._paused or []

    def go_on(self) -> None:
        """Take those that have waited, and all others."""
        paused, self._paused = self._paused or [], None
        for client, message, num_bytes in paused:
            if isinstance(message, Submit):
                self._on_submit(client, message, num_bytes)
            else:
                self._on_abort(client, message.request_id)

    def turn_away(self) -> None:
        """Those that have waited are for our successor: their clients send them again."""
        paused = self._paused or []
        aborted = {(client, message.request_id) for client, message, _ in paused if isinstance(message, Abort)}
        for client, message, _ in paused:
            if (client, message.request_id) in aborted:
                if isinstance(message, Submit):
                    self._reject(client, message.request_id, RequestFailedError("aborted before it was accepted"))
            else:
                text = "the frontend was restarted before it had taken this request"
                self._send(client, Lost(self._child.epoch, [message.request_id], text))

    @property
    def is_draining(self) -> bool:
        """Whether no new requests are taken, because the group is going."""
        return self._is_draining

    @property
    def num_tokenizing(self) -> int:
        """Requests that may be accepted when their text has become tokens."""
        return len(self._preparing)

    def forget(self, client: bytes) -> None:
        """It is gone."""
        self._clients.discard(client)

    def tell_all(self, error: str) -> None:
        """End every request whose output cannot come any more, and say why to everybody."""
        for client in self._clients:
            self._sockets.try_send(client, encode(Rejected("", EngineDeadError.code, error)))

    def _on_message(self, frames: list[bytes]) -> None:
        client, data = frames[0], frames[-1]
        try:
            message = decode_from_client(data)
        except UNREADABLE as error:
            self._strays.drop("frontend", error, client)
            self._reject(client, "", ProtocolError(f"message: not a message of this protocol: {error}"))
            return
        match message:
            case Hello():
                self._welcome(client, message)
            case Submit():
                self._on_submit(client, message, len(data))
            case Abort(request_id):
                self._on_abort(client, request_id)
            case GetStats(reset):
                self._on_get_stats(client, reset=reset)

    def _welcome(self, client: bytes, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            text = f"version: this group speaks protocol {PROTOCOL_VERSION}, the client {hello.version}"
            self._reject(client, "", ProtocolError(text))
            return
        config, engine = self._child.config, self._engine
        try:
            self._check_client(client)
        except OverloadedError as error:
            self._reject(client, "", error)
            return
        max_model_len = engine.facts.max_model_len if engine else config.scheduler.max_model_len
        self._send(
            client,
            Welcome(
                PROTOCOL_VERSION,
                config.group.name,
                config.model.name,
                self._sockets.output_endpoint(client),
                max_model_len,
                config.model.vocab_size,
                config.model.workflows,
                config.limits.max_request_bytes,
                config.model.tool_call_parser,
                self._child.epoch,
                hello.mark,
                config.model.head.labels if config.model.head else (),
                config.group.instance,
            ),
        )

    def _on_get_stats(self, client: bytes, *, reset: bool) -> None:
        values = self._steps.stats() if self._steps else {"num_unfinished": 0}
        self._send(client, Stats(values | {"num_stray_frames": self._strays.count}))
        if reset and self._steps:
            self._steps.reset_stats()

    def _check_client(self, client: bytes) -> None:
        """One that is new finds room, or an error. Those that are there already are not asked to leave.

        Of those heard of some may have left, and of those connected some may not be clients: both must be too many.
        """
        limit, count = self._child.config.limits.max_clients, self._sockets.num_connections
        if count > limit <= len(self._clients) and client not in self._clients:
            text = f"the group has {count} connections, the limit (max_clients) is {limit}; try again later"
            raise OverloadedError(text, _NO_ROOM_RETRY_S)
        self._clients.add(client)

    def _on_submit(self, client: bytes, message: Submit, num_bytes: int) -> None:
        received_ns = time.monotonic_ns()
        if self._paused is not None:
            self._paused.append((client, message, num_bytes))
            return
        if message.epoch not in (-1, self._child.epoch):
            self._send(client, Received(message.request_id, self._child.epoch))
        try:
            self._check_client(client)
            body = self._check(client, message, num_bytes)
        except ProcengineError as error:
            self._reject(client, message.request_id, error)
            return
        submission = Submission(client, message, body, received_ns)
        if body.is_prepared:
            self._accept(submission, Prepared(body.prompt_token_ids))
        else:
            self._preparing[submission.owner] = submission
            self._num_preparing_by_client[client] += 1
            self._tokenize.submit(body, lambda prepared: self._on_prepared(submission, prepared))
        self._deadlines.watch(submission)

    def _check(self, client: bytes, message: Submit, num_bytes: int) -> Any:
        engine, owner = self._engine, (client, message.request_id)
        assert engine is not None
        if self._is_draining:
            raise ShuttingDownError("the group is shutting down and takes no new requests")
        return self._admission.check(
            message,
            num_bytes=num_bytes,
            num_unfinished=engine.num_unfinished + len(self._preparing),
            num_of_client=engine.num_of_client(client) + self._num_preparing_by_client[client],
            is_running=owner in self._preparing or engine.is_running(*owner),
        )

    def _is_preparing(self, submission: Submission) -> bool:
        return self._preparing.get(submission.owner) is submission

    def _on_prepared(self, submission: Submission, prepared: Prepared | ProcengineError) -> None:
        if not self._stop_preparing(submission):
            return  # refused meanwhile, as it took too long
        if isinstance(prepared, ProcengineError):
            self._reject(*submission.owner, prepared)
        else:
            self._accept(submission, prepared)
            if submission.was_aborted:
                self._on_abort(*submission.owner)
        self._loop.call_soon(self._pump)  # soon, not now: the rest of the batch joins the same step

    def _stop_preparing(self, submission: Submission) -> bool:
        if not self._is_preparing(submission):
            return False
        del self._preparing[submission.owner]
        self._num_preparing_by_client[submission.client] -= 1
        if not self._num_preparing_by_client[submission.client]:
            del self._num_preparing_by_client[submission.client]
        return True

    def _accept(self, submission: Submission, prepared: Prepared) -> None:
        assert self._engine is not None
        client, message = submission.client, submission.message
        times = {
            "client_sent_ns": message.sent_ns,
            "received_ns": submission.received_ns,
            "prepared_ns": time.monotonic_ns(),
        }
        try:
            registers = self._engine.accept(
                message.workflow, submission.body, prepared, client, message.request_id, secrets.randbits(63), times
            )
        except (InvalidRequestError, OverloadedError) as error:
            self._reject(client, message.request_id, error)
            return
        submission.keys = [register.key for register in registers]
        trace = TraceContext.parse(message.traceparent) if message.traceparent else None
        for register in registers:
            self._to_output.send_encoded(self._engine.registered(register.key))
            if trace is not None:  # first: who has read that it was accepted knows its trace
                self._spans.record(_REQUEST_TRACED, register.key, time.monotonic_ns(), *trace.to_words())
            self._spans.record(
                _REQUEST_ACCEPTED,
                register.key,
                *times.values(),
                time.monotonic_ns(),
                len(register.prompt_token_ids),
                self._engine.rank_of(register.key),
                *id_words(message.request_id),
            )

    def _on_abort(self, client: bytes, request_id: str) -> None:
        preparing = self._preparing.get((client, request_id))
        if preparing is not None:
            preparing.was_aborted = True
        elif self._paused is not None and any(m.request_id == request_id and c == client for c, m, _ in self._paused):
            self._paused.append((client, Abort(request_id), 0))
        elif self._engine is not None:
            for finish in self._engine.abort(client, request_id):
                self._to_output.send(finish)

    def _refuse(self, submission: Submission, error: OverloadedError) -> None:
        """Its time is over before it began."""
        self._stop_preparing(submission)
        self._reject(*submission.owner, error)
        self._loop.call_soon(self._pump)

    def _end(self, finish: Finish) -> None:
        """It took too long."""
        self._to_output.send(finish)
        self._loop.call_soon(self._pump)

    def _reject(self, client: bytes, request_id: str, error: ProcengineError) -> None:
        now_ns = time.monotonic_ns()
        self._spans.record(_REQUEST_REJECTED, self._num_rejected, now_ns, reject_number(error.code))
        self._num_rejected += 1
        retry_after_s = 0.0
        if isinstance(error, OverloadedError):
            retry_after_s = error.retry_after_s or self._rate.seconds_for(1, now_ns)
        self._send(client, Rejected(request_id, error.code, str(error), round(retry_after_s, 3)))

    def _send(self, client: bytes, message: Welcome | Received | Rejected | Lost | Stats) -> None:
        sending = self._sockets.try_send(client, encode(message))
        if sending is not ipc.Sending.SENT:
            self._clients.discard(client)
        if sending is ipc.Sending.FULL and self._engine is not None:  # it asks and asks, and reads no answer
            for finish in self._engine.abort_client(client):
                self._to_output.send(finish)
        self._sockets.poke()


def _tokenize_queue(child: Child, loop: asyncio.AbstractEventLoop) -> TokenizeQueue:
    config = child.config
    return TokenizeQueue(
        loop,
        Tokenizer.load(config.model.tokenizer_path),
        _chat_template(child),
        GrammarCompiler(
            Path(config.model.tokenizer_path).read_text(), config.model.eos_token_ids, config.limits.max_grammar_bytes
        ),
        config.limits.grammar_timeout_s,
        config.scheduler.max_model_len,
        child.spans.writer("tokenize"),
        config.limits.template_timeout_s,
        config.model.prompts,
        config.model.default_prompt,
        config.model.pair_template,
    )


def _chat_template(child: Child) -> ChatTemplate | None:
    model = child.config.model
    if model.chat_template is None:
        return None
    return ChatTemplate(model.chat_template, model.chat_bos_token, model.chat_eos_token)
