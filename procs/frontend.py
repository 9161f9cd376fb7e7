"""The frontend process: clients on one side (`ClientDoor`), workers on the other (`StepPump`), `Engine` in between.

Wiring only: it puts these together and hears the supervisor, the output process and the workers.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable

import uvloop
import zmq

from procengine import ipc
from procengine.child import Child, run_child, run_loop
from procengine.config import EngineConfig
from procengine.crash.kept import recorded_request
from procengine.crash.record import encode_requests
from procengine.engine import Engine
from procengine.errors import ProtocolError
from procengine.frame_checks import read_message, read_result
from procengine.layer_groups import layer_groups
from procengine.messages import (
    AdapterLoaded,
    Adapters,
    ChangeAdapter,
    ChildStats,
    ClientGone,
    Delivered,
    Drain,
    Drained,
    FromChild,
    FrontendLost,
    Leave,
    OutputLost,
    Query,
    RecordedRequests,
    Resume,
    Resync,
    RetireWorker,
    Shutdown,
    Stays,
    StepFailed,
    TakeRecord,
    TextStop,
    WorkerLost,
    WorkerReady,
    decode_from_output,
    decode_from_supervisor,
    encode,
)
from procengine.numbering import epoch_of, first_number
from procengine.pipeline import Pipeline, PlannersOnDemand
from procengine.procs.adapter_desk import AdapterDesk
from procengine.procs.client_door import ClientDoor
from procengine.procs.output_link import OutputLink
from procengine.procs.step_pump import StepPump
from procengine.procs.worker_links import WorkerLinks
from procengine.scheduler.limits import SchedulerLimits
from procengine.stray_frames import StrayFrames
from procengine.workflows.parts import WorkflowParts
from procengine.workflows.prompt import ModelFacts

__all__ = ["main"]


class Frontend:
    """The sockets and what hangs between them. Everything runs on the loop's thread but the tokenizer."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self._child = child
        self._loop = loop
        self._on_end = on_end
        self._parts = WorkflowParts(child.config.model.workflows)
        self._spans = child.spans.writer("loop")
        self._strays = StrayFrames("frontend")
        self._ready_by_rank: dict[int, WorkerReady] = {}
        self._engine: Engine | None = None  # these two exist once all workers have said how many blocks they hold
        self._steps: StepPump | None = None
        self._has_drained = False
        self._num_aborted = self._num_to_finish = 0
        self._stay: asyncio.TimerHandle | None = None  # while it is to leave: when it gives up
        self._to_workers = WorkerLinks(child)
        self._to_output = OutputLink(child)
        self._adapters = AdapterDesk(child, self._to_workers, self._to_output, self._tell_supervisor)
        self._returning: dict[int, int] = {}  # workers that are back, and wait for their adapters: rank -> epoch
        self._door = ClientDoor(child, loop, self._parts, self._to_output, self._spans, self._pump, self._strays)
        results = ipc.bind(child.context, zmq.PULL, child.endpoint("results"))
        from_output = ipc.bind(child.context, zmq.PULL, child.endpoint("feedback"))
        self._results = ipc.SocketReader(loop, results, self._on_result, self._pump)
        self._feedback = ipc.SocketReader(loop, from_output, self._on_feedback, self._pump)
        if child.epoch:
            self._to_workers.begin(child.epoch)
        self._control = ipc.SocketReader(loop, child.control, self._on_control)

    def _pump(self) -> None:
        if self._steps is None:
            return
        for retired in self._steps.take_retired():
            self._tell_supervisor(retired)
        self._steps.pump()
        self._door.settle()
        self._adapters.settle()
        if self._is_all_delivered:
            self._on_all_delivered()

    def _on_all_delivered(self) -> None:
        if self._door.is_draining and not self._has_drained:
            self._has_drained = True
            self._tell_supervisor(Drained(self._num_to_finish - self._num_aborted, self._num_aborted))
        elif self._stay is not None:
            self._door.turn_away()
            self._on_end()

    @property
    def _num_unfinished(self) -> int:
        return (self._engine.num_unfinished if self._engine else 0) + self._door.num_tokenizing

    @property
    def _is_all_delivered(self) -> bool:
        """Whether nothing runs and every client has been sent its ends."""
        engine = self._engine
        return engine is not None and not (engine.num_unfinished or engine.num_undelivered or self._door.num_tokenizing)

    # --- workers

    def _on_result(self, frames: list[bytes]) -> None:
        received_ns = time.monotonic_ns()
        try:
            header = read_result(frames)
        except ProtocolError as error:
            self._strays.drop("results", error)
            return
        if not 0 <= header.rank < self._child.config.worker.num_workers:
            self._strays.drop("results", f"there is no worker {header.rank}")
        elif isinstance(header, WorkerReady):
            self._on_worker_ready(header)
        elif isinstance(header, AdapterLoaded):
            self._on_adapter_loaded(header)
        elif isinstance(header, StepFailed):
            if self._steps is not None and epoch_of(header.step_id) == self._child.epoch:
                self._steps.fail_step(header)
        elif epoch_of(header.step_id) == self._child.epoch:  # else of a step that our predecessor sent
            if self._steps is None or not self._steps.expects(header):
                self._strays.drop("results", f"nobody waits for a result of step {header.step_id}")
                return
            self._steps.take_result(header, frames, received_ns)

    def _on_worker_ready(self, ready: WorkerReady) -> None:
        if self._engine is not None:
            self._on_worker_lost(ready.rank, ready.epoch - 1)  # nobody may have said so yet
            self._returning[ready.rank] = ready.epoch
            self._adapters.send_all(ready.rank)
            self._restore_workers()
            return
        known = self._ready_by_rank.get(ready.rank, ready)
        self._ready_by_rank[ready.rank] = max(known, ready, key=lambda one: one.epoch)
        self._adapters.send_all(ready.rank)
        self._open_if_complete()

    def _on_adapter_loaded(self, loaded: AdapterLoaded) -> None:
        rank = loaded.rank
        if self._engine is None:
            if rank in self._ready_by_rank and self._ready_by_rank[rank].epoch == loaded.epoch:
                self._adapters.take(loaded)
                self._open_if_complete()
        elif self._returning.get(rank, self._engine.pipelines[rank].epoch) == loaded.epoch:
            self._adapters.take(loaded)
            self._restore_workers()
            self._pump()

    def _restore_workers(self) -> None:
        """Those that are back, and have all adapters, get steps."""
        assert self._engine is not None
        for rank, epoch in list(self._returning.items()):
            if self._adapters.are_at(rank):
                del self._returning[rank]
                self._engine.restore_worker(rank, epoch)

    def _open_if_complete(self) -> None:
        if len(self._ready_by_rank) == self._child.config.worker.num_workers and self._adapters.all_loaded:
            self._open_engine([one for _, one in sorted(self._ready_by_rank.items())])

    def _open_engine(self, workers: list[WorkerReady]) -> None:
        """All workers have said how many blocks they hold: clients are served from here on."""
        child, counts = self._child, [worker.num_blocks for worker in workers]
        pipelines = [_make_pipeline(child, self._parts, worker) for worker in workers]
        self._engine = Engine(self._parts, pipelines, _model_facts(child, min(counts)), first_number(child.epoch))
        self._steps = StepPump(
            child, self._loop, self._engine, self._to_workers, self._to_output, self._spans, self._tell_supervisor
        )
        self._adapters.open(self._engine)
        self._door.open(self._engine, self._steps)
        child.say_ready({"num_blocks": sum(counts)})
        self._control.poke()  # a send may swallow the wake-up

    def _on_worker_lost(self, rank: int, epoch: int) -> None:
        self._results.drain()
        self._returning.pop(rank, None)
        if self._steps is not None:
            self._steps.lose_worker(rank, epoch)
            self._pump()
        elif rank in self._ready_by_rank and self._ready_by_rank[rank].epoch <= epoch:
            del self._ready_by_rank[rank]

    # --- output process

    def _on_feedback(self, frames: list[bytes]) -> None:
        if self._engine is None:
            return  # about requests of our predecessor
        try:
            message = read_message(frames, decode_from_output)
        except ProtocolError as error:
            self._strays.drop("feedback", error)
            return
        match message:
            case TextStop(key):
                self._engine.end(key, "stop")
            case ClientGone(client):
                self._door.forget(client)
                for finish in self._engine.abort_client(client):
                    self._to_output.send(finish)
            case Delivered(keys):
                self._engine.deliver(keys)
            case Resync(key, position):
                self._results.drain()  # what was lost on its way there is here, and brings more than tokens
                self._to_output.send(self._engine.resync(key, position))

    def _on_output_lost(self, epoch: int, key: int) -> None:
        self._feedback.drain()
        self._results.drain()
        if self._engine is None or self._steps is None:
            return  # it is said again when there is an engine
        self._engine.blame_for_output_death(key)
        self._to_output.connect_again()
        self._steps.retell()
        self._to_output.send(Resume(epoch + 1))
        self._pump()

    # --- supervisor

    def _on_control(self, frames: list[bytes]) -> None:
        match decode_from_supervisor(frames[0]):
            case Query(query_id):
                state = "draining" if self._door.is_draining else "ready" if self._engine else "starting"
                waits_s = self._steps.waits_s() if self._steps else ()
                self._tell_supervisor(ChildStats(query_id, state, self._num_unfinished, waits_s))
            case WorkerLost(rank, epoch):
                self._on_worker_lost(rank, epoch)
            case OutputLost(epoch, key):
                self._on_output_lost(epoch, key)
            case FrontendLost() | Adapters():
                pass  # before us; for others
            case ChangeAdapter() as message:
                self._adapters.change(message)
                self._pump()
            case TakeRecord(record_id):
                self._tell_supervisor(RecordedRequests(record_id, self._recorded_requests()))
            case RetireWorker() as message:
                if self._steps is not None:
                    self._steps.retire_worker(message)
                    self._pump()
            case Leave(timeout_s):
                self._door.pause()
                self._stay = self._loop.call_later(timeout_s, self._stay_after_all)
                self._pump()
            case Drain(timeout_s):
                self._stay_after_all()
                self._door.start_drain()
                self._num_to_finish = self._num_unfinished
                self._loop.call_later(timeout_s, self._abort_all)
                self._pump()
            case Shutdown(error):
                self._door.tell_all(error or "the group was shut down")
                self._on_end()

    def _stay_after_all(self) -> None:
        """What runs takes too long for us to leave."""
        if self._stay is not None:
            self._stay.cancel()
            self._stay = None
            self._tell_supervisor(Stays(self._num_unfinished))
            self._door.go_on()
            self._pump()

    def _tell_supervisor(self, message: FromChild) -> None:
        self._child.control.send(encode(message))
        self._control.poke()

    def _recorded_requests(self) -> bytes:
        key = secrets.token_bytes(32) if self._child.config.crash.redact_prompts else None
        kept = self._engine.kept_requests() if self._engine is not None else iter(())
        return encode_requests((recorded_request(*one) for one in kept if one[1].body is not None), key)

    def _abort_all(self) -> None:
        if self._engine is not None:
            for finish in self._engine.abort_all():
                self._num_aborted += 1
                self._to_output.send(finish)
        self._pump()


def _limits(config: EngineConfig, num_blocks: int) -> SchedulerLimits:
    """Of a worker with so many blocks."""
    scheduler, cache = config.scheduler, config.cache
    return SchedulerLimits(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        max_mixed_tokens=scheduler.max_mixed_tokens,
        max_overtaken_tokens=scheduler.max_overtaken_tokens,
        max_model_len=scheduler.max_model_len,
        block_size=cache.block_size,
        num_blocks=num_blocks,
        enable_chunked_prefill=scheduler.enable_chunked_prefill,
        enable_prefix_caching=cache.enable_prefix_caching,
        is_priority_policy=scheduler.policy == "priority",
        decode_steps=scheduler.decode_steps,
        num_speculative_tokens=scheduler.num_speculative_tokens,
        windows=layer_groups(config.model, scheduler.max_model_len).windows,
    )


def _make_pipeline(child: Child, parts: WorkflowParts, worker: WorkerReady) -> Pipeline:
    limits, scheduler = _limits(child.config, worker.num_blocks), child.config.scheduler

    def make_planners() -> PlannersOnDemand:
        planners = PlannersOnDemand(lambda name: parts[name].planner(limits))
        if "generate" in parts:
            planners["generate"]  # from the start: it has the KV pool
        return planners

    return Pipeline(
        worker.rank,
        make_planners,
        scheduler.async_depth,
        worker.epoch,
        first_number(child.epoch),
    )


def _model_facts(child: Child, num_blocks: int) -> ModelFacts:
    config = child.config
    return ModelFacts(
        vocab_size=config.model.vocab_size,
        max_model_len=config.scheduler.max_model_len,
        pool_tokens=_limits(config, num_blocks).pool_tokens,
        max_embed_tokens=config.scheduler.max_embed_tokens,
        eos_token_ids=config.model.eos_token_ids,
        limits=config.limits,
        hidden_size=config.model.hidden_size,
        num_layers=config.model.num_layers,
        num_token_types=config.model.encoder.num_token_types if config.model.encoder else 0,
        is_causal=config.model.encoder is None and config.model.decoder.is_causal,
        pooling=config.model.pooling,
    )


def main(child: Child) -> None:
    """Serve until the supervisor says stop or is gone."""
    loop = uvloop.new_event_loop()
    loop.add_reader(child.death_fd, lambda: os._exit(1))
    Frontend(child, loop, loop.stop)
    run_loop(loop)
    child.context.destroy(linger=1000)


if __name__ == "__main__":
    run_child("frontend", main)
