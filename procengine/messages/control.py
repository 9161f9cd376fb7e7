"""What the supervisor, its children and the command line tell each other about the life of the group."""

from __future__ import annotations

from procengine.messages.base import Message

__all__ = [
    "AdapterChanged",
    "Adapters",
    "ChangeAdapter",
    "ChildStats",
    "Drain",
    "Drained",
    "EndGroup",
    "Ended",
    "Failed",
    "FrontendLost",
    "GetStatus",
    "Leave",
    "LoadLora",
    "LoraChanged",
    "OutputLost",
    "ProcessStatus",
    "Query",
    "Ready",
    "RecordWritten",
    "RecordedRequests",
    "Restart",
    "Restarted",
    "RetireWorker",
    "Shutdown",
    "Status",
    "Stays",
    "TakeRecord",
    "UnloadLora",
    "WorkerHung",
    "WorkerLost",
    "WorkerRetired",
    "WriteRecord",
]


class Ready(Message, tag="ready"):
    """A child is up. `facts` are for the ready line and the log."""

    role: str
    rank: int
    pid: int
    facts: dict[str, int | float | str]


class Failed(Message, tag="failed"):
    """A child cannot start or go on; it exits after this."""

    role: str
    rank: int
    message: str
    traceback: str


class Query(Message, tag="query"):
    """Supervisor asks a child for ChildStats."""

    query_id: int


class ChildStats(Message, tag="child_stats"):
    """A child's answer to Query."""

    query_id: int
    state: str
    queue_depth: int
    waits_s: tuple[float, ...] = ()  # the frontend's: for how long it has waited for a result of each worker, by rank


class Drain(Message, tag="drain"):
    """Supervisor to frontend: take no new requests, finish the running ones within this time, abort the rest."""

    timeout_s: float


class Drained(Message, tag="drained"):
    """Frontend to supervisor: nothing is running any more."""

    num_finished: int = 0  # requests that ended since it began to drain
    num_aborted: int = 0  # those that took too long


class WorkerHung(Message, tag="worker_hung"):
    """Frontend to supervisor: this worker has steps to run, and no result of it has come for too long."""

    rank: int
    epoch: int


class WorkerLost(Message, tag="worker_lost"):
    """Supervisor to frontend: this worker is gone, and another one, of the next epoch, takes its place."""

    rank: int
    epoch: int  # of the one that is gone


class OutputLost(Message, tag="output_lost"):
    """Supervisor to frontend: the output process is gone, and another one, of the next epoch, takes its place."""

    epoch: int  # of the one that is gone
    key: int = -1  # the request that it was at work on, if that is known


class FrontendLost(Message, tag="frontend_lost"):
    """Supervisor to output process: this frontend is gone with all it had accepted; another one takes its place."""

    epoch: int  # of the one that is gone
    end: str  # how it ended, for those who wait


class RetireWorker(Message, tag="retire_worker"):
    """Supervisor to frontend: send no more steps to this worker; its requests go to the others, or to its successor."""

    rank: int
    epoch: int


class WorkerRetired(Message, tag="worker_retired"):
    """Frontend to supervisor: all that was sent to this worker is back."""

    rank: int
    epoch: int


class Leave(Message, tag="leave"):
    """Supervisor to frontend or output process: a successor takes over; end when nothing is lost by it."""

    timeout_s: float  # after which everything is to stay as it is


class Stays(Message, tag="stays"):
    """Frontend to supervisor: it could not leave in time."""

    num_unfinished: int


class Shutdown(Message, tag="shutdown"):
    """Supervisor to a child: end now. With an `error`, tell every client with unfinished requests why."""

    error: str | None = None


class Restart(Message, tag="restart"):
    """Command line to supervisor: replace this process, and lose nothing."""

    process: str  # worker-0, output, ...
    timeout_s: float | None = None  # for the frontend to finish what runs; None: as for a drain


class Restarted(Message, tag="restarted"):
    """Answer to Restart, when the new process is ready."""

    process: str
    pid: int
    error: str | None = None  # why the old one stays


class EndGroup(Message, tag="end_group"):
    """Command line to supervisor: take no new requests, finish the running ones, end."""

    timeout_s: float | None = None  # after which the rest is aborted; None: as the group was told when it was started


class Ended(Message, tag="ended"):
    """Answer to EndGroup, the last that is heard of the group."""

    num_finished: int
    num_aborted: int
    error: str | None = None  # why it ended otherwise


class WriteRecord(Message, tag="write_record"):
    """Command line to supervisor: write a crash record now, though nothing has crashed."""


class RecordWritten(Message, tag="record_written"):
    """Answer to WriteRecord."""

    path: str
    error: str = ""  # why there is none


class LoadLora(Message, tag="load_lora"):
    """Command line or HTTP process to supervisor: serve a LoRA adapter of the model under this name."""

    ask_id: int
    name: str
    path: str  # of its folder


class UnloadLora(Message, tag="unload_lora"):
    """The same: requests name this one no more; answered when those that do have ended."""

    ask_id: int
    name: str


class LoraChanged(Message, tag="lora_changed"):
    """Answer to these."""

    ask_id: int
    code: str = ""  # of `error`, see procengine.errors; "": it is done
    error: str = ""


class ChangeAdapter(Message, tag="change_adapter"):
    """Supervisor to frontend: load an adapter, or unload it."""

    ask_id: int
    name: str
    path: str | None  # None: unload it


class AdapterChanged(Message, tag="adapter_changed"):
    """Answer to ChangeAdapter; or, with the `ask_id` -1, a loaded adapter is gone by itself, and why."""

    ask_id: int
    name: str
    code: str = ""
    error: str = ""


class Adapters(Message, tag="adapters"):
    """Supervisor to HTTP processes: all adapters that requests may name."""

    modules: list[tuple[str, str]]  # name and path


class TakeRecord(Message, tag="take_record"):
    """Supervisor to frontend: say what requests there are, for a crash record."""

    record_id: int


class RecordedRequests(Message, tag="recorded_requests"):
    """Answer to TakeRecord."""

    record_id: int
    data: bytes  # a MessagePack list of `crash.record.RecordedRequest`


class GetStatus(Message, tag="get_status"):
    """Command line to supervisor: the state of every process."""


class ProcessStatus(Message):
    """One line of `procengine ps`."""

    role: str
    rank: int
    pid: int
    state: str
    uptime_s: float
    rss_bytes: int
    cpu_s: float
    queue_depth: int
    num_restarts: int = 0
    live: bool = True  # it runs and answers, or is being started
    ready: bool = True  # it serves
    progressing: bool = True  # it has nothing to do, or gets on with it
    waited_s: float = 0.0  # for how long others have waited for its next result


class Status(Message, tag="status"):
    """Answer to GetStatus."""

    group: str
    model: str
    processes: list[ProcessStatus]
