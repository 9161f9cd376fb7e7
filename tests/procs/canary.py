"""The CANARY of shared/cases.md: whatever was done to a group, it must be as good as before."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import zmq

from procengine import ipc
from procengine.messages import GetStatus, Status, decode_status, encode
from tests.procs.harness import PATIENCE_S, Served, as_ids, is_running, key_of, num_open_fds, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body

# What is said once of each peer that sends what is no message: tests do little else.
_STRAY = re.compile(r"procengine: [a-z]+: dropped a message ")

__all__ = ["Canary", "ask_status", "expect_idle"]


def ask_status(group: Served) -> Status:
    """What the supervisor says of all processes, over its control socket."""
    context = ipc.make_context()
    try:
        socket = ipc.connect(context, zmq.DEALER, str(group.ready["control"]))
        socket.send(encode(GetStatus()))
        assert socket.poll(5000), "the supervisor does not answer"
        return decode_status(socket.recv())
    finally:
        context.destroy(linger=0)


def expect_idle(group: Served, timeout_s: float = PATIENCE_S) -> None:
    """No process has anything to do any more."""
    wait_until(
        lambda: all(process.queue_depth == 0 for process in ask_status(group).processes),
        "no process has a request left",
        timeout_s,
    )


@dataclass(frozen=True, slots=True)
class Canary:
    """How a group was. `pool_tokens` is what its KV pool holds: a prompt that fills it proves that no block is lost."""

    group: Served
    pool_tokens: int
    fds: dict[str, int]
    log: str

    @classmethod
    def of(cls, group: Served, pool_tokens: int) -> Canary:
        """Remember how it is, after a first request (some descriptors are opened by it)."""
        canary = cls(group, pool_tokens, {}, "")
        canary._try_requests()
        return cls(group, pool_tokens, _settled_fds(group), group.log)

    def with_log(self) -> Canary:
        """The same, with the log as it is now: one test's traceback is not the next one's failure."""
        return replace(self, log=self.group.log)

    def check(self) -> None:
        """A request works, one that needs all blocks works, and nothing else has changed."""
        group = self.group
        assert group.process.poll() is None, f"the group has ended:\n{group.log}"
        assert all(map(is_running, group.pids.values())), f"a process is gone:\n{group.log}"
        expect_idle(group)
        self._try_requests()
        new = [line for line in group.log.removeprefix(self.log).splitlines() if not _STRAY.match(line)]
        assert not new, "new in the log:\n" + "\n".join(new)
        for role, pid in group.pids.items():
            wait_until(
                lambda pid=pid, role=role: num_open_fds(pid) <= self.fds[role],  # type: ignore[misc]
                lambda pid=pid, role=role: f"{role} has {self.fds[role]} descriptors again, not {num_open_fds(pid)}",  # type: ignore[misc]
                5.0,
            )

    def _try_requests(self) -> None:
        with RawClient(self.group.endpoint) as client:
            for request_id, length, count in (("small", 5, 4), ("whole pool", self.pool_tokens, 1)):
                client.submit(request_id, body([*as_ids(length, 77)], max_tokens=count))
                client.wait_end(request_id, 5.0)
                token_ids = client.token_ids(request_id)
                assert token_ids == tokens_of(key_of(token_ids[0], length), length, count)


def _settled_fds(group: Served) -> dict[str, int]:
    """How many descriptors each process has open, once that has stopped changing.

    The group's own connections are tried every 100 ms until they stand; one that no request needs may come later.
    """
    fds: dict[str, int] = {}
    for _ in range(20):
        before, fds = fds, {role: num_open_fds(pid) for role, pid in group.pids.items()}
        if fds == before:
            break
        time.sleep(0.25)
    return fds
