"""`StepPump`: the frontend's side towards the workers: steps out, results in.

Wiring only: `Engine` and its pipelines decide what a step holds and what a result means.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from procengine.child import Child
from procengine.engine import Engine
from procengine.messages import EmbedResult, RetireWorker, StepFailed, StepResult, WorkerHung, WorkerRetired, encode
from procengine.pipeline import NextPlan, Pipeline, PlannedStep
from procengine.procs.output_link import OutputLink
from procengine.procs.pause_timers import PauseTimers
from procengine.procs.worker_links import WorkerLinks
from procengine.profiling.records import RecordKind
from procengine.profiling.span_ring import SpanWriter
from procengine.recent_results import RecentResults
from procengine.scheduler.counters import SchedulerCounters
from procengine.step_stats import StepStats

__all__ = ["StepPump"]

# Plain integers: looking a member of an enum up costs more than the record.
_STEP_SENT = int(RecordKind.STEP_SENT)
_RESULT_APPLIED = int(RecordKind.RESULT_APPLIED)
_REQUEST_ADMITTED = int(RecordKind.REQUEST_ADMITTED)
_SHOW_RESULTS_NS = 5 * 10**9  # as long as a result may take from the I/O thread of a worker to us


class StepPump:
    """There is one from the moment all workers have said how many blocks they hold."""

    def __init__(
        self,
        child: Child,
        loop: asyncio.AbstractEventLoop,
        engine: Engine,
        to_workers: WorkerLinks,
        to_output: OutputLink,
        spans: SpanWriter,
        say_hung: Callable[[WorkerHung], None],
    ) -> None:
        self._child = child
        self._loop = loop
        self._engine = engine
        self._to_workers = to_workers
        self._to_output = to_output
        self._spans = spans
        self._say_hung = say_hung
        num_workers = child.config.worker.num_workers
        self._progress_ns = [0] * num_workers  # when the newest result came, or the first step after a pause was sent
        self._watchdog: asyncio.TimerHandle | None = None
        self._pauses = PauseTimers(loop, self.pump)
        self._retiring: list[RetireWorker] = []
        self._recent_results = RecentResults()
        self._shows_results_until_ns = 0
        self._stats = StepStats()

    def pump(self) -> None:
        """Send every step that should be at a worker by now."""
        for pipeline in self._engine.pipelines:
            plan_ns = time.monotonic_ns()
            while (plan := pipeline.next_plan(may_pause=True)) is not None:
                plan_ns = self._send_step(pipeline, plan, plan_ns)
            self._pauses.settle(pipeline)
        for finish in self._engine.end_failed():
            self._to_output.send(finish)

    def expects(self, header: StepResult | EmbedResult) -> bool:
        """Whether this is the next result of its worker, or one of a worker that is gone, which does no harm."""
        return self._engine.pipelines[header.rank].expects(header)

    def take_result(self, header: StepResult | EmbedResult, frames: list[bytes], received_ns: int) -> None:
        """What a worker sent, received then."""
        decoded_ns = time.monotonic_ns()
        self._stats.result_received(header.rank, header.step_id, header.is_last, header.busy_ns, received_ns)
        self._progress_ns[header.rank] = received_ns
        self._recent_results.add(header.rank, frames[0], frames[1])
        if received_ns < self._shows_results_until_ns:
            self._to_output.send_result((frames[0], frames[1]))
        applied = self._engine.apply(header, np.frombuffer(frames[1], np.int32))
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
            len(applied.ended),
            applied.num_tokens,
        )

    def lose_worker(self, rank: int, epoch: int) -> None:
        """Its requests go on elsewhere. What it had sent has been taken in; it is shown to the output process again, as
        the same bytes may not have got there. Nothing happens for an epoch whose end is known.
        """
        if self._engine.pipelines[rank].epoch > epoch:
            return
        for frames in self._recent_results.of_worker(rank):
            self._to_output.send_result(frames)
        self._to_workers.connect_again(rank)
        self._stats.forget(rank)
        for finish in self._engine.lose_worker(rank, epoch):
            self._to_output.send(finish)

    def fail_step(self, failed: StepFailed) -> None:
        """A worker had not the memory for a step: that costs the step's requests, and the others a new beginning."""
        if self._engine.pipelines[failed.rank].epoch != failed.epoch:
            return
        self._stats.forget(failed.rank)
        for finish in self._engine.fail_step(failed):
            self._to_output.send(finish)
        self._to_workers.begin_again(failed.rank, self._child.epoch)

    def retire_worker(self, message: RetireWorker) -> None:
        """Send it no more steps; `take_retired` says when what it has is back."""
        pipeline = self._engine.pipelines[message.rank]
        if pipeline.epoch == message.epoch and pipeline.is_up:
            pipeline.is_up = False
            self._retiring.append(message)

    def take_retired(self) -> list[WorkerRetired]:
        """The workers that have nothing left to do; their requests have gone to others."""
        retired = []
        for message in self._retiring:
            pipeline = self._engine.pipelines[message.rank]
            if pipeline.epoch == message.epoch and not pipeline.num_in_flight:
                self._engine.lose_worker(message.rank, message.epoch, has_died=False)
                retired.append(WorkerRetired(message.rank, message.epoch))
        if retired:
            self._retiring = [m for m in self._retiring if self._engine.pipelines[m.rank].epoch == m.epoch]
        return retired

    def waits_s(self) -> tuple[float, ...]:
        """For how long each worker has owed a result, by rank."""
        now_ns = time.monotonic_ns()
        return tuple(
            (now_ns - self._progress_ns[pipeline.rank]) / 1e9 if pipeline.num_in_flight else 0.0
            for pipeline in self._engine.pipelines
        )

    def retell(self) -> None:
        """A new output process is told everything again, from what the dead one said and the workers sent as far as
        that is here. A result that is not may have been lost with the process: for a while it is shown all of them.
        """
        for message in self._engine.resume_output(self._recent_results):
            if isinstance(message, bytes):
                self._to_output.send_encoded(message)
            else:
                self._to_output.send_result(message)
        self._shows_results_until_ns = time.monotonic_ns() + _SHOW_RESULTS_NS

    # --- counters

    def stats(self) -> dict[str, Any]:
        """Counters and percentiles since the last reset, by name."""
        values = self._stats.values(self._child.config.worker.num_workers)
        values["num_unfinished"] = self._engine.num_unfinished
        for name in (field.name for field in dataclasses.fields(SchedulerCounters)):
            values[name] = sum(getattr(counters, name) for counters in self._counters())
        return values

    def reset_stats(self) -> None:
        """Count from zero."""
        self._stats.reset()
        for counters in self._counters():
            counters.reset()

    def _counters(self) -> list[SchedulerCounters]:
        return [planner.counters for pipeline in self._engine.pipelines for planner in pipeline.planners.values()]

    # --- steps

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
        self._to_workers.send(rank, frames)
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

    def _announce_admitted(self, rank: int, step: PlannedStep, now_ns: int) -> None:
        self._to_output.send(self._engine.admitted(step, now_ns))
        for request in step.admitted:
            self._spans.record(
                _REQUEST_ADMITTED,
                request.key,
                rank,
                step.header.epoch,
                step.header.step_id,
                now_ns,
                request.num_cached_tokens or 0,
                request.num_preemptions,
            )

    def _watch_workers(self) -> None:
        """While steps are in flight: tell the supervisor of a worker that does nothing for too long."""
        timeout_s = self._child.config.group.step_timeout_s
        pipelines = [pipeline for pipeline in self._engine.pipelines if pipeline.num_in_flight]
        for pipeline in pipelines:
            if time.monotonic_ns() - self._progress_ns[pipeline.rank] > timeout_s * 1e9:
                self._say_hung(WorkerHung(pipeline.rank, pipeline.epoch))
        self._watchdog = self._loop.call_later(timeout_s / 4, self._watch_workers) if pipelines else None
