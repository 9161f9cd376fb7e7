"""What the supervisor, its children and the command line tell each other about the life of the group."""

from __future__ import annotations

from procengine.messages.base import Message

__all__ = [
    "ChildStats",
    "Drain",
    "Drained",
    "Failed",
    "FrontendLost",
    "GetStatus",
    "OutputLost",
    "ProcessStatus",
    "Query",
    "Ready",
    "Shutdown",
    "Status",
    "WorkerHung",
    "WorkerLost",
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


class Drain(Message, tag="drain"):
    """Supervisor to frontend: take no new requests, finish the running ones within this time, abort the rest."""

    timeout_s: float


class Drained(Message, tag="drained"):
    """Frontend to supervisor: nothing is running any more."""


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


class Shutdown(Message, tag="shutdown"):
    """Supervisor to a child: end now. With an `error`, tell every client with unfinished requests why."""

    error: str | None = None


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


class Status(Message, tag="status"):
    """Answer to GetStatus."""

    group: str
    model: str
    processes: list[ProcessStatus]
