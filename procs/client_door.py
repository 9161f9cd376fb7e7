"""`ClientDoor`: the frontend's side towards clients: who they are, what they ask for, and what is refused.

Wiring only: `Admission` says what may come in, `Engine` takes it on; this reads the clock and draws the seeds.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zmq

from procengine import ipc
from procengine.admission import Admission
from procengine.chat_template import ChatTemplate
from procengine.child import Child
from procengine.engine import Engine
from procengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    ProcengineError,
    ProtocolError,
    RequestFailedError,
    ShuttingDownError,
)
from procengine.messages import (
    PROTOCOL_VERSION,
    UNREADABLE,
    Abort,
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
from procengine.procs.output_link import OutputLink
from procengine.procs.step_pump import StepPump
from procengine.profiling.records import RecordKind, id_words
from procengine.profiling.span_ring import SpanWriter
from procengine.recent_clients import RecentClients
from procengine.structured.compiler import GrammarCompiler
from procengine.tokenize_queue import TokenizeQueue
from procengine.tokenizer import Tokenizer
from procengine.trace_context import TraceContext
from procengine.workflows.parts import FrontendParts
from procengine.workflows.prompt import Prepared, PromptBody

__all__ = ["ClientDoor"]

_REQUEST_ACCEPTED = int(RecordKind.REQUEST_ACCEPTED)
_REQUEST_TRACED = int(RecordKind.REQUEST_TRACED)


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
    ) -> None:
        self._child = child
        self._loop = loop
        self._to_output = to_output
        self._spans = spans
        self._pump = pump
        self._admission = Admission(parts, child.config.limits)
        self._clients = RecentClients()
        self._tokenizing: dict[tuple[bytes, str], bool] = {}  # -> whether it was aborted meanwhile
        self._engine: Engine | None = None
        self._steps: StepPump | None = None
        self._is_draining = False
        self._paused: list[tuple[bytes, Submit | Abort, int]] | None = None  # what came while nothing is taken
        self._tokenize = _tokenize_queue(child, loop)
        # A frame over the limit drops the connection, so the limit here is a backstop; _on_submit tells the client.
        backstop = 2 * child.config.limits.max_request_bytes + 65536
        self._socket = ipc.bind(child.context, zmq.ROUTER, child.endpoint("frontend"), max_message_bytes=backstop)
        self._reader: ipc.SocketReader | None = None  # they wait until there is somebody to run requests

    def open(self, engine: Engine, steps: StepPump) -> None:
        """From here on there is somebody to run requests."""
        self._engine, self._steps = engine, steps
        self._reader = ipc.SocketReader(self._loop, self._socket, self._on_message, self._pump)

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
        return len(self._tokenizing)

    def forget(self, client: bytes) -> None:
        """It is gone."""
        self._clients.discard(client)

    def tell_all(self, error: str) -> None:
        """End every request whose output cannot come any more, and say why to everybody."""
        for client in self._clients:
            ipc.send_routed(self._socket, client, encode(Rejected("", EngineDeadError.code, error)))

    def _on_message(self, frames: list[bytes]) -> None:
        client, data = frames[0], frames[-1]
        try:
            message = decode_from_client(data)
        except UNREADABLE as error:
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
        self._clients.add(client)
        max_model_len = engine.facts.max_model_len if engine else config.scheduler.max_model_len
        self._send(
            client,
            Welcome(
                PROTOCOL_VERSION,
                config.group.name,
                config.model.name,
                self._child.endpoint("output"),
                max_model_len,
                config.model.vocab_size,
                config.model.workflows,
                config.limits.max_request_bytes,
                config.model.tool_call_parser,
                self._child.epoch,
                hello.mark,
            ),
        )

    def _on_get_stats(self, client: bytes, *, reset: bool) -> None:
        self._send(client, Stats(self._steps.stats() if self._steps else {"num_unfinished": 0}))
        if reset and self._steps:
            self._steps.reset_stats()

    def _on_submit(self, client: bytes, message: Submit, num_bytes: int) -> None:
        received_ns = time.monotonic_ns()
        owner = (client, message.request_id)
        self._clients.add(client)
        if self._paused is not None:
            self._paused.append((client, message, num_bytes))
            return
        if message.epoch not in (-1, self._child.epoch):
            self._send(client, Received(message.request_id, self._child.epoch))
        try:
            body = self._check(owner, message, num_bytes)
        except ProcengineError as error:
            self._reject(client, message.request_id, error)
            return
        if body.is_prepared:
            self._accept(client, message, body, Prepared(body.prompt_token_ids), received_ns)
            return
        self._tokenizing[owner] = False
        self._tokenize.submit(body, lambda prepared: self._on_prepared(client, message, body, prepared, received_ns))

    def _check(self, owner: tuple[bytes, str], message: Submit, num_bytes: int) -> Any:
        assert self._engine is not None
        if self._is_draining:
            raise ShuttingDownError("the group is shutting down and takes no new requests")
        return self._admission.check(
            message,
            num_bytes=num_bytes,
            num_unfinished=self._engine.num_unfinished + len(self._tokenizing),
            is_running=owner in self._tokenizing or self._engine.is_running(*owner),
        )

    def _on_prepared(
        self,
        client: bytes,
        message: Submit,
        body: PromptBody,
        prepared: Prepared | ProcengineError,
        received_ns: int,
    ) -> None:
        was_aborted = self._tokenizing.pop((client, message.request_id))
        if isinstance(prepared, ProcengineError):
            self._reject(client, message.request_id, prepared)
        else:
            self._accept(client, message, body, prepared, received_ns)
            if was_aborted:
                self._on_abort(client, message.request_id)
        self._loop.call_soon(self._pump)  # soon, not now: the rest of the batch joins the same step

    def _accept(self, client: bytes, message: Submit, body: PromptBody, prepared: Prepared, received_ns: int) -> None:
        assert self._engine is not None
        times = {"client_sent_ns": message.sent_ns, "received_ns": received_ns, "prepared_ns": time.monotonic_ns()}
        try:
            registers = self._engine.accept(
                message.workflow, body, prepared, client, message.request_id, secrets.randbits(63), times
            )
        except InvalidRequestError as error:
            self._reject(client, message.request_id, error)
            return
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
        if (client, request_id) in self._tokenizing:
            self._tokenizing[client, request_id] = True
        elif self._paused is not None and any(m.request_id == request_id and c == client for c, m, _ in self._paused):
            self._paused.append((client, Abort(request_id), 0))
        elif self._engine is not None:
            for finish in self._engine.abort(client, request_id):
                self._to_output.send(finish)

    def _reject(self, client: bytes, request_id: str, error: ProcengineError) -> None:
        self._send(client, Rejected(request_id, error.code, str(error)))

    def _send(self, client: bytes, message: Welcome | Received | Rejected | Lost | Stats) -> None:
        if not ipc.send_routed(self._socket, client, encode(message)):
            self._clients.discard(client)
        if self._reader is not None:
            self._reader.poke()


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
    )


def _chat_template(child: Child) -> ChatTemplate | None:
    model = child.config.model
    if model.chat_template is None:
        return None
    return ChatTemplate(model.chat_template, model.chat_bos_token, model.chat_eos_token)
