"""The frontend process: clients on one side, workers and the output process on the other, the `Engine` between them.

Wiring only: it moves messages between sockets and the pure parts, reads the clocks, and draws the seeds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
import zmq

from procengine import ipc
from procengine.admission import Admission
from procengine.chat_template import ChatTemplate
from procengine.child import Child, run_child, run_loop
from procengine.engine import Engine
from procengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    ProcengineError,
    ProtocolError,
    ShuttingDownError,
)
from procengine.messages import (
    PROTOCOL_VERSION,
    UNREADABLE,
    Abort,
    ChildStats,
    ClientGone,
    Delivered,
    Drain,
    Drained,
    GetStats,
    Hello,
    OutputLost,
    Query,
    Rejected,
    Resume,
    Resync,
    Shutdown,
    Stats,
    Submit,
    TextStop,
    Welcome,
    WorkerHung,
    WorkerLost,
    WorkerReady,
    decode_from_client,
    decode_from_output,
    decode_from_supervisor,
    decode_from_worker,
    encode,
)
from procengine.pipeline import NextPlan, Pipeline, PlannedStep
from procengine.profiling.records import RecordKind, id_words
from procengine.recent_clients import RecentClients
from procengine.recent_results import RecentResults
from procengine.scheduler.counters import SchedulerCounters
from procengine.scheduler.limits import SchedulerLimits
from procengine.step_stats import StepStats
from procengine.structured.compiler import GrammarCompiler
from procengine.tokenize_queue import TokenizeQueue
from procengine.tokenizer import Tokenizer
from procengine.trace_context import TraceContext
from procengine.workflows.parts import FrontendParts, load_frontend_parts
from procengine.workflows.prompt import ModelFacts, Prepared, PromptBody

__all__ = ["main"]

# Plain integers: looking a member of an enum up costs more than the record.
_STEP_SENT = int(RecordKind.STEP_SENT)
_RESULT_APPLIED = int(RecordKind.RESULT_APPLIED)
_REQUEST_ACCEPTED = int(RecordKind.REQUEST_ACCEPTED)
_REQUEST_ADMITTED = int(RecordKind.REQUEST_ADMITTED)
_SHOW_RESULTS_NS = 5 * 10**9  # as long as a result may take from the I/O thread of a worker to us
_REQUEST_TRACED = int(RecordKind.REQUEST_TRACED)


class Frontend:
    """The sockets and what hangs between them. Everything runs on the loop's thread but the tokenizer."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        config = child.config
        self._child = child
        self._loop = loop
        self._on_end = on_end
        self._parts = {name: load_frontend_parts(name) for name in config.model.workflows}
        self._admission = Admission(self._parts, config.limits)
        self._engine: Engine | None = None  # exists once all workers have said how many blocks they hold
        self._num_blocks_by_rank: dict[int, int] = {}
        num_workers = config.worker.num_workers
        self._progress_ns = [0] * num_workers  # when the newest result came, or the first step after a pause was sent
        self._watchdog: asyncio.TimerHandle | None = None
        self._recent_results = RecentResults()
        self._shows_results_until_ns = 0
        self._stats = StepStats()
        self._spans = child.spans.writer("loop")
        self._clients = RecentClients()
        self._tokenizing: dict[tuple[bytes, str], bool] = {}  # -> whether it was aborted meanwhile
        self._is_draining = False
        self._has_drained = False
        self._tokenize = TokenizeQueue(
            loop,
            Tokenizer.load(config.model.tokenizer_path),
            _chat_template(child),
            GrammarCompiler(
                Path(config.model.tokenizer_path).read_text(),
                config.model.eos_token_ids,
                config.limits.max_grammar_bytes,
            ),
            config.limits.grammar_timeout_s,
            config.scheduler.max_model_len,
            child.spans.writer("tokenize"),
        )
        self._open_sockets()

    def _open_sockets(self) -> None:
        child, loop, context = self._child, self._loop, self._child.context
        num_workers = child.config.worker.num_workers
        # A frame over the limit drops the connection, so the limit here is a backstop; _on_submit tells the client.
        backstop = 2 * child.config.limits.max_request_bytes + 65536
        # Whoever sends connects: a PUSH that is bound blocks as soon as its peer is dead, one that connects queues.
        self._to_workers = [self._connect_worker(rank) for rank in range(num_workers)]
        self._to_output = self._connect_output()
        self._client_socket = ipc.bind(context, zmq.ROUTER, child.endpoint("frontend"), max_message_bytes=backstop)
        results = ipc.bind(context, zmq.PULL, child.endpoint("results"))
        from_output = ipc.bind(context, zmq.PULL, child.endpoint("feedback"))
        self._results = ipc.SocketReader(loop, results, self._on_result, self._pump)
        self._feedback = ipc.SocketReader(loop, from_output, self._on_feedback, self._pump)
        self._client_reader = ipc.SocketReader(loop, self._client_socket, self._on_client, self._pump)
        self._control = ipc.SocketReader(loop, child.control, self._on_control)

    def _connect_worker(self, rank: int) -> zmq.Socket[bytes]:
        return ipc.connect(self._child.context, zmq.PUSH, self._child.endpoint(f"steps-{rank}"))

    def _connect_output(self) -> zmq.Socket[bytes]:
        return ipc.connect(self._child.context, zmq.PUSH, self._child.endpoint("register"))

    # --- steps

    def _pump(self) -> None:
        """Send every step that should be at a worker by now."""
        if self._engine is None:
            return
        for pipeline in self._engine.pipelines:
            plan_ns = time.monotonic_ns()
            while (plan := pipeline.next_plan()) is not None:
                plan_ns = self._send_step(pipeline, plan, plan_ns)
        for finish in self._engine.end_failed():
            self._to_output.send(encode(finish))
        if self._is_draining and not self._has_drained and self._is_all_delivered:
            self._has_drained = True
            self._child.control.send(encode(Drained()))

    @property
    def _is_all_delivered(self) -> bool:
        """Whether nothing runs and every client has been sent its ends."""
        engine = self._engine
        return engine is not None and not (engine.num_unfinished or engine.num_undelivered or self._tokenizing)

    def _send_step(self, pipeline: Pipeline, plan: NextPlan, plan_ns: int) -> int:
        """Build a planned step and send it. Returns when that was done: the next one begins there."""
        scheduled_ns = time.monotonic_ns()
        step = pipeline.build(plan)
        built_ns = time.monotonic_ns()
        rank, header = pipeline.rank, step.header
        frames = (encode(header), step.payload)
        encoded_ns = time.monotonic_ns()
        if step.admitted:
            self._announce_admitted(rank, step, encoded_ns)  # before the step: the output process hears of them first
        ipc.send_frames(self._to_workers[rank], frames)
        sent_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        self._stats.step_sent(rank, header.step_id, step.is_steady, cpu_ns, sent_ns)
        self._spans.record(
            _STEP_SENT,
            header.step_id,
            rank,
            header.epoch,
            plan_ns,
            scheduled_ns,
            built_ns,
            encoded_ns,
            sent_ns,
            header.num_rows,
            header.num_decode_rows,
            header.num_tokens,
            *pipeline.gauges,
            pipeline.num_in_flight,
        )
        if pipeline.num_in_flight == 1:
            self._progress_ns[rank] = sent_ns
        if self._watchdog is None:
            self._watch_workers()
        return sent_ns

    def _watch_workers(self) -> None:
        """While steps are in flight: tell the supervisor of a worker that does nothing for too long."""
        timeout_s = self._child.config.group.step_timeout_s
        pipelines = [p for p in (self._engine.pipelines if self._engine else []) if p.num_in_flight]
        for pipeline in pipelines:
            if time.monotonic_ns() - self._progress_ns[pipeline.rank] > timeout_s * 1e9:
                self._child.control.send(encode(WorkerHung(pipeline.rank, pipeline.epoch)))
                self._control.poke()
        self._watchdog = self._loop.call_later(timeout_s / 4, self._watch_workers) if pipelines else None

    def _announce_admitted(self, rank: int, step: PlannedStep, now_ns: int) -> None:
        assert self._engine is not None
        self._to_output.send(encode(self._engine.admitted(step, now_ns)))
        for request in step.admitted:
            self._spans.record(
                _REQUEST_ADMITTED,
                request.key,
                rank,
                step.header.epoch,
                step.header.step_id,
                now_ns,
                request.num_cached_tokens or 0,
            )

    def _on_result(self, frames: list[bytes]) -> None:
        received_ns = time.monotonic_ns()
        header = decode_from_worker(frames[0])
        if isinstance(header, WorkerReady):
            self._on_worker_ready(header)
            return
        decoded_ns = time.monotonic_ns()
        self._stats.result_received(header.rank, header.step_id, header.is_last, header.busy_ns, received_ns)
        self._progress_ns[header.rank] = received_ns
        assert self._engine is not None
        self._recent_results.add(header.rank, frames[0], frames[1])
        if received_ns < self._shows_results_until_ns:
            ipc.send_frames(self._to_output, (frames[0], frames[1]))
        pipeline = self._engine.pipelines[header.rank]
        num_tokens = -pipeline.num_output_tokens
        num_finished = self._engine.apply(header, np.frombuffer(frames[1], np.int32))
        num_tokens += pipeline.num_output_tokens
        self._spans.record(
            _RESULT_APPLIED,
            header.step_id,
            header.rank,
            header.epoch,
            header.micro_step,
            received_ns,
            decoded_ns,
            time.monotonic_ns(),
            header.num_rows,
            num_finished,
            num_tokens,
        )

    def _on_worker_ready(self, ready: WorkerReady) -> None:
        if self._engine is not None:
            self._engine.restore_worker(ready.rank, ready.epoch)
            return
        config = self._child.config
        rank, epoch = ready.rank, ready.epoch
        self._num_blocks_by_rank[rank] = ready.num_blocks
        if len(self._num_blocks_by_rank) < config.worker.num_workers:
            return
        pipelines = [
            _make_pipeline(self._child, self._parts, rank, epoch, count)
            for rank, count in sorted(self._num_blocks_by_rank.items())
        ]
        smallest = min(self._num_blocks_by_rank.values())
        self._engine = Engine(self._parts, pipelines, _model_facts(self._child, smallest))
        self._child.say_ready({"num_blocks": sum(self._num_blocks_by_rank.values())})

    def _on_worker_lost(self, rank: int) -> None:
        """Its requests go on elsewhere. What it had sent is taken in first, and shown to the output process again: the
        same bytes may not have got there.
        """
        self._results.drain()
        if self._engine is None:
            return
        for frames in self._recent_results.of_worker(rank):
            ipc.send_frames(self._to_output, frames)
        self._to_workers[rank].close(linger=0)  # with the steps that nobody will take
        self._to_workers[rank] = self._connect_worker(rank)
        self._stats.forget(rank)
        for finish in self._engine.lose_worker(rank):
            self._to_output.send(encode(finish))
        self._pump()

    def _on_output_lost(self, epoch: int, key: int) -> None:
        """Its successor is told everything again, from what the dead one said and the workers sent as far as that is
        here. A result that is not yet here may have been lost with the process: for a while it is shown all of them.
        """
        self._feedback.drain()
        self._results.drain()
        assert self._engine is not None  # before the group is ready, a death is its end
        self._to_output.close(linger=0)
        self._to_output = self._connect_output()
        self._engine.blame_for_output_death(key)
        for message in self._engine.resume_output(self._recent_results):
            if isinstance(message, bytes):
                self._to_output.send(message)
            else:
                ipc.send_frames(self._to_output, message)
        self._to_output.send(encode(Resume(epoch + 1)))
        self._shows_results_until_ns = time.monotonic_ns() + _SHOW_RESULTS_NS
        self._pump()

    # --- clients

    def _on_client(self, frames: list[bytes]) -> None:
        client, data = frames[0], frames[-1]
        try:
            message = decode_from_client(data)
        except UNREADABLE as error:
            self._reject(client, "", ProtocolError(f"message: not a message of this protocol: {error}"))
            return
        match message:
            case Hello(version):
                self._welcome(client, version)
            case Submit():
                self._on_submit(client, message, len(data))
            case Abort(request_id):
                self._on_abort(client, request_id)
            case GetStats(reset):
                self._send(client, Stats(self._stats_values()))
                if reset:
                    self._reset_stats()

    def _welcome(self, client: bytes, version: int) -> None:
        if version != PROTOCOL_VERSION:
            text = f"version: this group speaks protocol {PROTOCOL_VERSION}, the client {version}"
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
            ),
        )

    def _on_submit(self, client: bytes, message: Submit, num_bytes: int) -> None:
        received_ns = time.monotonic_ns()
        owner = (client, message.request_id)
        self._clients.add(client)
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
        if self._engine is None:
            raise OverloadedError("the group is still starting; try again later")
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
            self._to_output.send(self._engine.registered(register.key))
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
        elif self._engine is not None:
            for finish in self._engine.abort(client, request_id):
                self._to_output.send(encode(finish))

    def _reject(self, client: bytes, request_id: str, error: ProcengineError) -> None:
        self._send(client, Rejected(request_id, error.code, str(error)))

    def _send(self, client: bytes, message: Welcome | Rejected | Stats) -> None:
        if not ipc.send_routed(self._client_socket, client, encode(message)):
            self._clients.discard(client)
        self._client_reader.poke()

    # --- output process

    def _on_feedback(self, frames: list[bytes]) -> None:
        assert self._engine is not None
        match decode_from_output(frames[0]):
            case TextStop(key):
                self._engine.end(key, "stop")
            case ClientGone(client):
                self._clients.discard(client)
                for finish in self._engine.abort_client(client):
                    self._to_output.send(encode(finish))
            case Delivered(keys):
                self._engine.deliver(keys)
            case Resync(key, position):
                self._results.drain()  # what was lost on its way there is here, and brings more than tokens
                self._to_output.send(encode(self._engine.resync(key, position)))

    # --- supervisor

    def _on_control(self, frames: list[bytes]) -> None:
        match decode_from_supervisor(frames[0]):
            case Query(query_id):
                state = "draining" if self._is_draining else "ready" if self._engine else "starting"
                depth = (self._engine.num_unfinished if self._engine else 0) + len(self._tokenizing)
                self._child.control.send(encode(ChildStats(query_id, state, depth)))
                self._control.poke()
            case WorkerLost(rank):
                self._on_worker_lost(rank)
            case OutputLost(epoch, key):
                self._on_output_lost(epoch, key)
            case Drain(timeout_s):
                self._is_draining = True
                self._loop.call_later(timeout_s, self._abort_all)
                self._pump()
            case Shutdown(error):
                self._tell_clients(error or "the group was shut down")
                self._on_end()

    def _abort_all(self) -> None:
        if self._engine is not None:
            for finish in self._engine.abort_all():
                self._to_output.send(encode(finish))
        self._pump()

    def _tell_clients(self, error: str) -> None:
        """End every request whose output cannot come any more, and say why to everybody."""
        for client in self._clients:
            ipc.send_routed(self._client_socket, client, encode(Rejected("", EngineDeadError.code, error)))

    # --- counters

    def _stats_values(self) -> dict[str, Any]:
        values = self._stats.values(self._child.config.worker.num_workers)
        values["num_unfinished"] = self._engine.num_unfinished if self._engine else 0
        for name in (field.name for field in dataclasses.fields(SchedulerCounters)):
            values[name] = sum(getattr(counters, name) for counters in self._counters())
        return values

    def _reset_stats(self) -> None:
        self._stats.reset()
        for counters in self._counters():
            counters.reset()

    def _counters(self) -> list[Any]:
        pipelines = self._engine.pipelines if self._engine else []
        return [planner.counters for pipeline in pipelines for planner in pipeline.planners.values()]


def _make_pipeline(child: Child, parts: dict[str, FrontendParts], rank: int, epoch: int, num_blocks: int) -> Pipeline:
    scheduler, cache = child.config.scheduler, child.config.cache
    limits = SchedulerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_model_len=scheduler.max_model_len,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        enable_prefix_caching=cache.enable_prefix_caching,
        is_priority_policy=scheduler.policy == "priority",
        decode_steps=scheduler.decode_steps,
        num_speculative_tokens=scheduler.num_speculative_tokens,
    )
    return Pipeline(
        rank, lambda: {name: part.planner(limits) for name, part in parts.items()}, scheduler.async_depth, epoch
    )


def _model_facts(child: Child, num_blocks: int) -> ModelFacts:
    config = child.config
    return ModelFacts(
        vocab_size=config.model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        pool_tokens=num_blocks * config.cache.block_size,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        eos_token_ids=config.model.eos_token_ids,
        limits=config.limits,
    )


def _chat_template(child: Child) -> ChatTemplate | None:
    model = child.config.model
    if model.chat_template is None:
        return None
    return ChatTemplate(model.chat_template, model.chat_bos_token, model.chat_eos_token)


def main(child: Child) -> None:
    """Serve until the supervisor says stop or is gone."""
    loop = uvloop.new_event_loop()
    loop.add_reader(child.death_fd, lambda: os._exit(1))
    Frontend(child, loop, loop.stop)
    run_loop(loop)
    child.context.destroy(linger=1000)


if __name__ == "__main__":
    run_child("frontend", main)
