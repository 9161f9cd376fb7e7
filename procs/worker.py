"""The worker process: a receive thread, a device loop and a send thread around one device.

Wiring only. The device loop does nothing but take a step, run it and hand its outputs on; it touches no socket, and it
never waits for whoever reads the results.
"""

from __future__ import annotations

import os
import queue
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import zmq
from numpy.typing import NDArray

from procengine import ipc
from procengine.child import Child, run_child
from procengine.config import EngineConfig
from procengine.errors import ModelError, ProtocolError
from procengine.frame_checks import read_step
from procengine.layer_groups import layer_groups
from procengine.messages import (
    AdapterLoaded,
    Begin,
    ChildStats,
    EmbedInput,
    LoadAdapter,
    Query,
    Shutdown,
    StepFailed,
    StepInput,
    WorkerReady,
    decode_from_supervisor,
    encode,
)
from procengine.numbering import epoch_of
from procengine.profiling.records import RecordKind
from procengine.profiling.span_ring import SpanWriter
from procengine.step_memory import StepMemoryError
from procengine.step_output import EmbedOutput, StepOutput, WorkerIdentity
from procengine.stray_frames import StrayFrames

__all__ = ["main"]

Output = StepOutput | EmbedOutput

# Plain integers: looking a member of an enum up costs more than the record.
_STEP_RUN = int(RecordKind.STEP_RUN)
_RESULT_SENT = int(RecordKind.RESULT_SENT)


class Step(NamedTuple):
    """A step on its way to the device loop, and when it came."""

    header: StepInput | EmbedInput
    payload: NDArray[np.int32]
    received_ns: int
    decoded_ns: int


class ReadAdapter(NamedTuple):
    """An adapter on its way to the device loop; what was read of it, or why it cannot be."""

    message: LoadAdapter
    weights: Any
    error: str | None


# What the device loop is told, and what it has to say.
Task = Step | ReadAdapter | Begin | None
Report = Output | StepFailed | AdapterLoaded | WorkerReady | None


def _read_nothing(_path: str) -> None:
    """Of a device to which adapters make no difference."""


def _place_nothing(_place: int, _weights: None) -> None:
    """The same."""


@dataclass(frozen=True, slots=True)
class _Device:
    """A device that is ready for steps."""

    run: Callable[[StepInput | EmbedInput, NDArray[np.int32]], Iterator[Output]]
    forget_slots: Callable[[], None]
    num_blocks: int
    facts: dict[str, int | float | str]
    read_adapter: Callable[[str], Any] = _read_nothing  # not on the device loop
    place_adapter: Callable[[int, Any], None] = _place_nothing


def main(child: Child) -> None:
    """Load the model, say so, run steps until told to stop."""
    identity = WorkerIdentity(child.rank, child.epoch)
    steps: queue.SimpleQueue[Task] = queue.SimpleQueue()
    outputs: queue.SimpleQueue[Report] = queue.SimpleQueue()
    step_socket = ipc.bind(child.context, zmq.PULL, child.endpoint(f"steps-{child.rank}"))
    device = _open_device(child)

    result_context = ipc.make_context()  # of its own, so that it can be flushed while other sockets are in use
    to_frontend = ipc.connect(result_context, zmq.PUSH, child.endpoint("results"))
    to_output = ipc.connect(result_context, zmq.PUSH, child.endpoint("text"))
    to_frontend.send(encode(WorkerReady(child.rank, identity.epoch, device.num_blocks)))
    child.say_ready({"num_blocks": device.num_blocks, **device.facts})

    sender = threading.Thread(
        target=_send_outputs,
        args=(outputs, identity, to_frontend, to_output, child.spans.writer("send")),
        name="send",
    )
    sender.start()
    model = child.config.model
    num_groups = layer_groups(model, child.config.scheduler.max_model_len).num_groups
    to_load: queue.SimpleQueue[LoadAdapter] = queue.SimpleQueue()
    receive_args = (step_socket, steps, to_load, identity.epoch, model.workflows, num_groups)
    threading.Thread(target=_receive_steps, args=receive_args, name="receive", daemon=True).start()
    if child.config.lora.is_on:
        load_args = (device, to_load, steps)
        threading.Thread(target=_read_adapters, args=load_args, name="load", daemon=True).start()
    threading.Thread(target=_obey_supervisor, args=(child, steps), name="control", daemon=True).start()
    try:
        _device_loop(device, identity, steps, outputs, child.spans.writer("device"))
    finally:
        outputs.put(None)
        sender.join()
        result_context.destroy(linger=1000)


def _device_loop(
    device: _Device,
    identity: WorkerIdentity,
    steps: queue.SimpleQueue[Task],
    outputs: queue.SimpleQueue[Report],
    spans: SpanWriter,
) -> None:
    rank, epoch = identity.rank, identity.epoch
    has_failed = False  # in a step; those behind it go on from what it did not do
    while (step := steps.get()) is not None:
        if isinstance(step, Begin):
            device.forget_slots()
            outputs.put(WorkerReady(rank, epoch, device.num_blocks))
            has_failed = False
        elif isinstance(step, ReadAdapter):
            if step.error is None:
                device.place_adapter(step.message.place, step.weights)
            outputs.put(AdapterLoaded(rank, epoch, step.message.number, step.error))
        elif not has_failed:
            try:
                _run_step(device, identity, step, outputs, spans)
            except StepMemoryError as error:
                outputs.put(StepFailed(rank, epoch, step.header.step_id, list(error.keys), str(error)))
                has_failed = True


def _run_step(
    device: _Device,
    identity: WorkerIdentity,
    step: Step,
    outputs: queue.SimpleQueue[Report],
    spans: SpanWriter,
) -> None:
    rank, epoch = identity.rank, identity.epoch
    header, payload, received_ns, decoded_ns = step
    num_tokens = header.num_tokens
    for output in device.run(header, payload):
        outputs.put(output)
        num_rows, micro_step, times = output.keys.size, output.micro_step, output.times
        spans.record(
            _STEP_RUN,
            header.step_id,
            rank,
            epoch,
            micro_step,
            received_ns,
            decoded_ns,
            *times,
            num_rows,
            num_tokens,
        )
        received_ns = decoded_ns = times.done_ns
        num_tokens = num_rows  # of the next pass, if there is one: it may have fewer


def _read_adapters(device: _Device, to_load: queue.SimpleQueue[LoadAdapter], steps: queue.SimpleQueue[Task]) -> None:
    """One after the other, so that the last one that was told of a place is the one that has it."""
    while True:
        message = to_load.get()
        try:
            steps.put(ReadAdapter(message, device.read_adapter(message.path), None))
        except (ModelError, OSError, MemoryError) as error:
            steps.put(ReadAdapter(message, None, str(error) or type(error).__name__))


def _receive_steps(
    socket: zmq.Socket[bytes],
    steps: queue.SimpleQueue[Task],
    to_load: queue.SimpleQueue[LoadAdapter],
    epoch: int,
    workflows: Collection[str],
    num_groups: int,
) -> None:
    """What was sent to a worker that is gone, or by a frontend that is, goes no further: it may come late."""
    frontend_epoch, next_id = 0, -1  # of steps; -1 is any
    strays = StrayFrames("worker")
    while True:
        frames = socket.recv_multipart()
        received_ns = time.monotonic_ns()
        try:
            header = read_step(frames, num_groups)
        except ProtocolError as error:
            strays.drop("steps", error)
            continue
        if isinstance(header, Begin):
            if header.epoch >= frontend_epoch:
                frontend_epoch, next_id = header.epoch, -1
                steps.put(header)
            continue
        if isinstance(header, LoadAdapter):
            if epoch_of(header.number) >= frontend_epoch:
                to_load.put(header)
            continue
        if header.workflow not in workflows:
            strays.drop("steps", f"there is no workflow {header.workflow!r:.40}")
            continue
        if header.epoch != epoch or epoch_of(header.step_id) < frontend_epoch:
            continue
        if header.step_id != next_id and next_id != -1:
            strays.drop("steps", f"step {header.step_id} where {next_id} is next")
            continue
        next_id = header.step_id + 1
        steps.put(Step(header, np.frombuffer(frames[1], np.int32), received_ns, time.monotonic_ns()))


def _send_outputs(
    outputs: queue.SimpleQueue[Report],
    identity: WorkerIdentity,
    to_frontend: zmq.Socket[bytes],
    to_output: zmq.Socket[bytes],
    spans: SpanWriter,
) -> None:
    clock = time.monotonic_ns
    while (output := outputs.get()) is not None:
        woken_ns = clock()
        if isinstance(output, (StepFailed, WorkerReady, AdapterLoaded)):
            to_frontend.send(encode(output))
            continue
        values: Any = output.wait()  # of the output's own kind
        on_host_ns = clock()
        header, payload = output.to_message(identity, values)
        frames = (encode(header), payload)
        encoded_ns = clock()
        ipc.send_frames(to_frontend, frames)  # first: it is the one that feeds the device
        sent_ns = clock()
        ipc.send_frames(to_output, frames)
        spans.record(
            _RESULT_SENT,
            output.step_id,
            identity.rank,
            identity.epoch,
            output.micro_step,
            woken_ns,
            on_host_ns,
            encoded_ns,
            sent_ns,
            clock(),
        )


def _obey_supervisor(child: Child, steps: queue.SimpleQueue[Task]) -> None:
    poller = zmq.Poller()
    poller.register(child.control, zmq.POLLIN)
    poller.register(child.death_fd, select.POLLIN)
    while True:
        ready = dict(poller.poll())
        if child.death_fd in ready:
            os._exit(1)
        match decode_from_supervisor(child.control.recv()):
            case Query(query_id):
                child.control.send(encode(ChildStats(query_id, "ready", steps.qsize())))
            case Shutdown():
                steps.put(None)
            case _:  # draining is the frontend's business
                pass


def _open_device(child: Child) -> _Device:
    return _open_mock(child.config) if child.config.worker.device == "mock" else _open_real(child)


def _open_mock(config: EngineConfig) -> _Device:
    from procengine.mock_runner import MockRunner

    scheduler, cache = config.scheduler, config.cache
    num_groups = layer_groups(config.model, scheduler.max_model_len).num_groups
    runner = MockRunner(
        config.model.vocab_size,
        scheduler.max_num_seqs,
        scheduler.max_model_len,
        cache.block_size,
        config.worker.mock_step_ms / 1e3,
        num_groups,
    )
    most = scheduler.max_num_seqs * -(-scheduler.max_model_len // cache.block_size) * num_groups
    return _Device(runner.run, runner.forget_slots, cache.num_blocks or min(most, 1 << 17), {"device": "mock"})


def _open_real(child: Child) -> _Device:
    """The kernels are imported here, and only those that the model needs."""
    device: Any
    config, progress = child.config, child.shows_progress
    if config.model.encoder is not None:
        from procengine.encoder_device import open_device as open_encoder_device

        device = open_encoder_device(config, shows_progress=progress)
        return _Device(device.run, device.forget_slots, device.num_blocks, device.facts)
    from procengine.device import open_device

    device = open_device(config, shows_progress=progress)
    takes_adapters = (device.read_adapter, device.place_adapter)
    return _Device(device.run, device.forget_slots, device.num_blocks, device.facts, *takes_adapters)


if __name__ == "__main__":
    run_child("worker", main)
