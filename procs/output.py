"""The output process: results of workers in, text for clients out.

Wiring only: it moves messages between sockets and the pure parts. It takes in all results that wait before it makes one
message a client of them, so that a burst costs one message and not many.

One that takes the place of a dead one first hears from the frontend all that there is (up to `Resume`). How clients are
sent what they are to get is `ClientSender`'s business.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import msgspec
import numpy as np
import uvloop
import zmq

from procengine import ipc
from procengine.child import Child, run_child, run_loop
from procengine.errors import EngineDeadError, ProtocolError
from procengine.frame_checks import read_message, read_result
from procengine.messages import (
    AdapterLoaded,
    Adapters,
    Admitted,
    ChangeAdapter,
    ChildStats,
    ClientGone,
    Delivered,
    Drain,
    Finish,
    FromFrontend,
    FrontendLost,
    Leave,
    Lost,
    OutputLost,
    Query,
    Register,
    Rejected,
    Replay,
    Resume,
    Resync,
    RetireWorker,
    Shutdown,
    StepFailed,
    TakeRecord,
    TextStop,
    WorkerLost,
    WorkerReady,
    decode_from_frontend,
    decode_from_supervisor,
    encode,
)
from procengine.numbering import epoch_of, first_number
from procengine.postprocessor import Item, NoteKey, Postprocessor, TakenItems
from procengine.procs.client_sender import ClientSender
from procengine.profiling.records import FINISH_CODES, RecordKind
from procengine.profiling.span_ring import NOBODY
from procengine.stray_frames import StrayFrames
from procengine.tokenizer import Tokenizer
from procengine.workflows import find_workflow, load_part

__all__ = ["main"]

# Plain integers: looking a member of an enum up costs more than the record.
_RESULT_TAKEN = int(RecordKind.RESULT_TAKEN)
_FLUSHED = int(RecordKind.FLUSHED)
_REQUEST_DONE = int(RecordKind.REQUEST_DONE)
_NICENESS = 10  # when cores are scarce, text may be late; the loop that feeds the device may not


class Output:
    """The sockets and what hangs between them. Everything runs on the loop's thread."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop, on_end: Callable[[], None]) -> None:
        self._child = child
        self._loop = loop
        self._on_end = on_end
        self._is_ending = False
        self._spans = child.spans.writer("loop")
        self._strays = StrayFrames("output")
        self._received_ns = 0  # the newest result
        self._num_flushes = 0
        self._tokenizer = Tokenizer.load(child.config.model.tokenizer_path)
        self._postprocessors: dict[str, Postprocessor] = {}  # of the workflows that have had a request
        self._postprocessor("generate")  # nearly every group has some
        self._first_key = 0  # smaller ones are of frontends that are gone
        # For a while after a death: a text that kills this process is found by what it was at work on (OutputSuspects).
        self._note_key: NoteKey | None = child.spans.note_key if child.epoch else None
        if child.epoch:
            loop.call_later(child.config.group.restart_window_s, self._stop_noting)
        self._last_items = TakenItems()  # of requests that were ended from outside
        context = child.context
        self._clients = ClientSender(
            child, loop, self._spans, self._strays, self._drop_client, self._waiting_clients, self._on_late_delivery
        )
        self._to_frontend = ipc.connect(context, zmq.PUSH, child.endpoint("feedback"))
        from_frontend = ipc.bind(context, zmq.PULL, child.endpoint("register"))
        self._result_socket = ipc.bind(context, zmq.PULL, child.endpoint("text"))
        self._results: ipc.SocketReader | None = None
        self._registers = ipc.SocketReader(loop, from_frontend, self._on_frontend, self._flush)
        self._control = ipc.SocketReader(loop, child.control, self._on_control)
        if not child.epoch:
            self._take_results()
        child.say_ready({})

    def _take_results(self) -> None:
        """All that was before is known: from here on results are taken in, and clients answered."""
        self._results = ipc.SocketReader(self._loop, self._result_socket, self._on_result, self._flush)

    @property
    def _num_unfinished(self) -> int:
        return sum(postprocessor.num_unfinished for postprocessor in self._postprocessors.values())

    def _postprocessor(self, workflow: str) -> Postprocessor | None:
        """That of a workflow of the model, imported when it is first asked for."""
        found = self._postprocessors.get(workflow)
        if found is None and workflow in self._child.config.model.workflows:
            found = load_part(find_workflow(workflow).postprocess)(self._tokenizer)
            self._postprocessors[workflow] = found
        return found

    def _on_frontend(self, frames: list[bytes]) -> None:
        if len(frames) > 1:  # of a worker that has died, perhaps before it could send it here too
            self._take_result(frames, "register")
            return
        try:
            message = read_message(frames, decode_from_frontend)
        except ProtocolError as error:
            self._strays.drop("register", error)
            return
        if self._note_key is None or not isinstance(message, Register | Finish | Replay):
            self._take_message(message)
            return
        self._note_key(message.key)
        self._take_message(message)
        self._note_key(NOBODY)

    def _stop_noting(self) -> None:
        self._note_key = None

    def _take_message(self, message: FromFrontend) -> None:
        match message:
            case Register():
                self._register(message)
            case Admitted():
                self._admit(message)
            case Finish() as finish:
                self._finish(finish)
            case Replay(key, position, token_ids):
                for postprocessor in self._postprocessors.values():
                    self._ask_for(postprocessor.replay(key, position, token_ids))
            case Resume(epoch):
                if epoch == self._child.epoch and self._results is None:
                    self._take_results()

    def _register(self, register: Register) -> None:
        postprocessor = self._postprocessor(register.workflow)
        if register.key < self._first_key:
            self._tell_lost(epoch_of(register.key), {register.client: [register.request_id]}, "the frontend died")
        elif postprocessor is None:
            self._strays.drop("register", f"there is no workflow {register.workflow!r:.40}")
        else:
            self._ask_for(postprocessor.register(register))

    def _admit(self, admitted: Admitted) -> None:
        keys, num_cached_tokens = admitted.keys, admitted.num_cached_tokens
        num_preemptions = admitted.num_preemptions or (0,) * len(keys)
        if not len(keys) == len(num_cached_tokens) == len(num_preemptions):
            self._strays.drop("register", "an Admitted whose lists differ in length")
            return
        for admission in zip(keys, num_cached_tokens, num_preemptions, strict=True):
            for postprocessor in self._postprocessors.values():
                postprocessor.admit(*admission, admitted.sent_ns)

    def _on_result(self, frames: list[bytes]) -> None:
        self._registers.drain()  # what the frontend said before it sent this step is here, but maybe not taken in
        self._take_result(frames, "text")

    def _take_result(self, frames: list[bytes], socket: str) -> None:
        self._received_ns = received_ns = time.monotonic_ns()
        try:
            header = read_result(frames)
        except ProtocolError as error:
            self._strays.drop(socket, error)
            return
        if isinstance(header, (StepFailed, WorkerReady, AdapterLoaded)):  # for the frontend
            return
        postprocessor = self._postprocessor(header.workflow)
        if postprocessor is None:
            self._strays.drop(socket, f"there is no workflow {header.workflow!r:.40}")
            return
        decoded_ns = time.monotonic_ns()
        gaps = postprocessor.take_result(header, np.frombuffer(frames[1], np.int32))
        self._ask_for(gaps)
        self._spans.record(
            _RESULT_TAKEN,
            header.step_id,
            header.rank,
            header.epoch,
            header.micro_step,
            received_ns,
            decoded_ns,
            time.monotonic_ns(),
            header.num_rows,
        )

    def _ask_for(self, gaps: list[tuple[int, int]]) -> None:
        for key, position in gaps:
            self._to_frontend.send(encode(Resync(key, position)))

    def _flush(self) -> None:
        """Send what is new, one message a client."""
        if self._results is None:
            return
        started_ns = time.monotonic_ns()
        items, self._last_items = self._last_items, TakenItems()
        for postprocessor in self._postprocessors.values():
            items.extend(postprocessor.take_items(self._received_ns, self._note_key))
        for key in items.text_stopped_keys:
            self._to_frontend.send(encode(TextStop(key)))
        if items.items_by_client or items.ended:
            self._deliver(items, started_ns)
        if self._is_ending and not self._num_unfinished and not self._clients.has_unsent:
            self._on_end()

    def _deliver(self, items: TakenItems, started_ns: int) -> None:
        detokenized_ns = time.monotonic_ns()
        self._clients.deliver(items.items_by_client, detokenized_ns)
        if items.ended:
            held_keys = self._clients.held_keys()
            self._report_delivered([ended.key for ended in items.ended if ended.key not in held_keys])
        delivered_ns = time.monotonic_ns()
        num_items = sum(map(len, items.items_by_client.values()))
        num_clients = len(items.items_by_client)
        self._spans.record(
            _FLUSHED, self._num_flushes, started_ns, detokenized_ns, delivered_ns, num_items, num_clients
        )
        self._num_flushes += 1
        for ended in items.ended:
            *times, num_preemptions = msgspec.structs.astuple(ended.times)
            self._spans.record(
                _REQUEST_DONE,
                ended.key,
                *times,
                detokenized_ns,
                delivered_ns,
                ended.num_prompt_tokens,
                ended.num_cached_tokens,
                ended.num_output_tokens,
                num_preemptions,
                FINISH_CODES.index(ended.finish_reason),
            )

    def _report_delivered(self, keys: Collection[int]) -> None:
        """Nobody waits for the ends of these any more."""
        if keys:
            self._to_frontend.send(encode(Delivered(list(keys))))

    def _on_late_delivery(self, keys: set[int]) -> None:
        self._report_delivered(keys)
        self._flush()  # they may have been what our end waited for

    def _finish(self, finish: Finish) -> None:
        for postprocessor in self._postprocessors.values():
            ended = postprocessor.finish(finish.key, finish.finish_reason, finish.error)
            if ended is not None and not finish.is_told:
                client, items = ended
                for item in items:
                    self._last_items.add(client, item)

    def _drop_client(self, client: bytes, ended_keys: set[int]) -> int:
        """It cannot be told anything any more, the ends of those requests included."""
        self._report_delivered(ended_keys)
        num_requests = 0
        for postprocessor in self._postprocessors.values():
            keys = postprocessor.keys_of_client(client)
            for key in keys:
                postprocessor.finish(key, "abort")
            self._report_delivered(keys)
            num_requests += len(keys)
        self._to_frontend.send(encode(ClientGone(client)))
        return num_requests

    def _waiting_clients(self) -> set[bytes]:
        waiting, started = set[bytes](), set[bytes]()
        for postprocessor in self._postprocessors.values():
            for client, has_started in postprocessor.clients():
                (started if has_started else waiting).add(client)
        return waiting - started

    def _on_frontend_lost(self, epoch: int, end: str) -> None:
        """Its requests are lost, but for those whose ends are here; their clients are told so."""
        self._registers.drain()
        if self._results is not None:
            self._results.drain()
        self._first_key = first_number(epoch + 1)
        lost: dict[bytes, dict[str, None]] = {}
        for client, items in self._end_before(self._first_key):
            for item in items:
                if item.finish_reason == "error":
                    lost.setdefault(client, {})[item.request_id] = None
                else:
                    self._last_items.add(client, item)
        self._flush()
        self._tell_lost(epoch, lost, end)

    def _end_before(self, first_key: int) -> Iterator[tuple[bytes, list[Item]]]:
        for postprocessor in self._postprocessors.values():
            for key in postprocessor.all_keys():
                if key < first_key and (ended := postprocessor.finish(key, "error")):
                    yield ended

    def _tell_lost(self, epoch: int, ids_by_client: Mapping[bytes, Iterable[str]], end: str) -> None:
        """A client that cannot be reached now hears of it from the next frontend."""
        text = f"{end}; requests that were running are lost, others can be sent again"
        for client, request_ids in ids_by_client.items():
            self._clients.say(client, Lost(epoch, list(request_ids), text))

    def _on_control(self, frames: list[bytes]) -> None:
        match decode_from_supervisor(frames[0]):
            case Query(query_id):
                self._child.control.send(encode(ChildStats(query_id, "ready", self._num_unfinished)))
                self._control.poke()
            case Shutdown(error):
                if error:
                    self._end_all(error)
                    self._on_end()
                    return
                self._is_ending = True
                self._clients.shorten()
                self._flush()  # results may still be on their way: the last one ends us
            case Drain():
                self._clients.shorten()
            case FrontendLost(epoch, end):
                self._on_frontend_lost(epoch, end)
            case Leave():
                self._registers.drain()
                if self._results is not None:
                    self._results.drain()
                self._flush()
                self._on_end()
            case WorkerLost() | OutputLost() | RetireWorker() | TakeRecord() | ChangeAdapter() | Adapters():
                pass  # these are the business of others

    def _end_all(self, error: str) -> None:
        """Tell every client that waits for something why it will not come: one message ends all it has running."""
        clients = set()
        for postprocessor in self._postprocessors.values():
            for key in postprocessor.all_keys():
                ended = postprocessor.finish(key, "error", error)
                if ended is not None:
                    clients.add(ended[0])
        for client in clients:
            self._clients.say(client, Rejected("", EngineDeadError.code, error))


def main(child: Child) -> None:
    """Serve until the supervisor says stop or is gone."""
    os.nice(_NICENESS)
    loop = uvloop.new_event_loop()
    loop.add_reader(child.death_fd, lambda: os._exit(1))
    Output(child, loop, loop.stop)
    run_loop(loop)
    child.context.destroy(linger=1000)


if __name__ == "__main__":
    run_child("output", main)
