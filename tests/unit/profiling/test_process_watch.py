"""Processes from one status to the next."""

from __future__ import annotations

from procengine.messages import ProcessStatus, Status
from procengine.profiling.process_watch import ProcessWatch

S = 10**9


def status(*processes: ProcessStatus) -> Status:
    return Status("g", "m", list(processes))


def process(role: str, state: str = "ready", cpu_s: float = 1.0, pid: int = 7, queue_depth: int = 3) -> ProcessStatus:
    return ProcessStatus(role, 0, pid, state, 10.0, 1000, cpu_s, queue_depth)


def test_cpu_share_takes_two_looks_at_the_same_process() -> None:
    watch = ProcessWatch()
    watch.add(status(process("worker", cpu_s=1.0), process("output", cpu_s=5.0, pid=8)), 10 * S)
    assert watch["worker-0"].cpu_share is None
    watch.add(status(process("worker", cpu_s=2.0), process("output", cpu_s=0.5, pid=9)), 14 * S)
    assert watch["worker-0"].cpu_share == 0.25
    assert watch["output"].cpu_share is None  # another process in its place


def test_a_silent_process_was_heard_when_it_last_answered() -> None:
    watch = ProcessWatch()
    watch.add(status(process("worker")), 10 * S)
    watch.add(status(process("worker", "silent")), 11 * S)
    watch.add(status(process("worker", "silent")), 12 * S)
    assert not watch["worker-0"].is_up and watch["worker-0"].heard_ns == 10 * S
    watch.add(status(process("worker")), 13 * S)
    assert watch["worker-0"].is_up and watch["worker-0"].heard_ns == 13 * S


def test_the_frontend_says_how_many_requests_are_unfinished() -> None:
    watch = ProcessWatch()
    assert watch.num_unfinished is None
    watch.add(status(process("frontend", queue_depth=5)), S)
    assert watch.num_unfinished == 5
    watch.add(status(process("frontend", "silent", queue_depth=0)), 2 * S)
    assert watch.num_unfinished is None
