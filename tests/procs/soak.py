"""A long run of requests of all kinds against a group whose processes are killed: what came is checked as it comes.

Owns: the course of a run: who is killed when, what is sampled. Never does: check a request (`soak_requests`).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import zmq

from procengine import ipc
from procengine.child_process import rss_bytes
from procengine.groups import find_group
from procengine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Hello,
    Outputs,
    Rejected,
    Welcome,
    decode_to_client,
    encode,
)
from tests.procs.harness import Served, children_of, num_open_fds
from tests.procs.soak_requests import SoakRequest, TextOf, make_request

__all__ = ["Soak", "SoakReport"]

_STEADY_ROLES: Final = ("supervisor", "frontend")  # those that are the same process from beginning to end
_SAMPLE_S: Final = 0.5
_STUCK_S: Final = 60.0
_POLL_MS: Final = 20


@dataclass
class SoakReport:
    """What a run was like. `rss` and `fds`: by role, one number a sample; `ended`: requests that had ended by then."""

    counts: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    ended: list[int] = field(default_factory=list)
    rss: dict[str, list[int]] = field(default_factory=lambda: {role: [] for role in _STEADY_ROLES})
    fds: dict[str, list[int]] = field(default_factory=lambda: {role: [] for role in _STEADY_ROLES})
    files: list[int] = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    duration_s: float = 0.0

    def bytes_per_request(self, role: str) -> float:
        """Slope of the resident memory in the second half of the run; 0 if it has one sample only.

        By least squares through the least of each eighth: what a crash record takes while it is written comes and
        goes in steps of 16 MB and more, and a leak lifts what lies below.
        """
        half = len(self.ended) // 2
        parts = np.array_split(np.arange(half, len(self.ended)), min(4, len(self.ended) - half))
        ended = np.array([np.mean([self.ended[i] for i in part]) for part in parts])
        floor = np.array([min(self.rss[role][i] for i in part) for part in parts], np.float64)
        ended -= ended.mean()
        return float(ended @ (floor - floor.mean()) / (ended @ ended or 1.0))

    def __str__(self) -> str:
        lines = [f"{self.duration_s:.0f} s: {dict(self.counts)}", f"kills: {dict(self.kills)}"]
        for role in _STEADY_ROLES:
            memory, fds = self.rss[role], self.fds[role]
            slope = self.bytes_per_request(role)
            lines.append(f"{role}: {memory[-1] >> 20} MiB, {slope:+.0f} bytes a request; {fds[0]} to {max(fds)} fds")
        return "\n".join(lines)


class Soak:
    """One run on a group that is ready. `text_of` turns token ids into the text that a client must see."""

    def __init__(self, group: Served, text_of: TextOf, seed: int, concurrency: int = 96) -> None:
        self._group = group
        self._text_of = text_of
        self._random = random.Random(seed)
        self._concurrency = concurrency
        self._context = ipc.make_context()
        self._clients = [_Connection(self._context, group.endpoint) for _ in range(4)]
        self._poller = zmq.Poller()
        for client in self._clients:
            self._poller.register(client.to_frontend, zmq.POLLIN)
            self._poller.register(client.from_output, zmq.POLLIN)
        self._requests: dict[str, tuple[SoakRequest, _Connection]] = {}
        self._num_submitted = 0
        self._num_ended = 0
        self._num_ended_at_kill = 0
        self._progress_s = time.monotonic()
        self.report = SoakReport()

    def run(self, duration_s: float, min_requests: int, kill_every_s: float) -> SoakReport:
        """For so long, and until so many requests have ended; then until all have."""
        started_s = time.monotonic()
        next_kill_s, next_sample_s = started_s + kill_every_s, started_s
        while (now_s := time.monotonic()) < started_s + duration_s or self._num_ended < min_requests:
            self._submit_some()
            self._receive()
            if now_s >= next_sample_s:
                self._sample()
                next_sample_s = now_s + _SAMPLE_S
            if now_s >= next_kill_s and self._num_ended > self._num_ended_at_kill + 2 * self._concurrency:
                self._kill_somebody()
                next_kill_s = now_s + kill_every_s * self._random.uniform(0.5, 1.5)
        while self._requests:
            self._receive()
        self.report.duration_s = time.monotonic() - started_s
        self._context.destroy(linger=0)
        return self.report

    def _submit_some(self) -> None:
        while len(self._requests) < self._concurrency:
            name = f"q{self._num_submitted}"
            self._num_submitted += 1
            request = make_request(name, self._random)
            client = self._random.choice(self._clients)
            self._requests[name] = request, client
            client.to_frontend.send(request.frame)
            if request.aborts_after == 0:
                client.to_frontend.send(encode(Abort(name)))
            self.report.counts[request.kind] += 1

    def _receive(self) -> None:
        ready = self._poller.poll(_POLL_MS)
        for socket, _ in ready:
            while ipc.has_message(socket):
                self._take(socket.recv())
        if ready:
            self._progress_s = time.monotonic()
            return
        waited_s = time.monotonic() - self._progress_s
        lost = [(name, request.describe()) for name, (request, _) in list(self._requests.items())[:5]]
        assert waited_s < _STUCK_S, f"nothing came for {waited_s:.0f} s; {len(self._requests)} are lost: {lost}"

    def _take(self, frame: bytes) -> None:
        message = decode_to_client(frame)
        if isinstance(message, Rejected):
            raise AssertionError(f"rejected: {message}")
        for item in message.items if isinstance(message, Outputs) else ():
            known = self._requests.get(item.request_id)
            if known is None:  # told again by a new output process
                assert int(item.request_id[1:]) < self._num_submitted
                assert self.report.kills["output"], f"said twice, though no output process has died: {item}"
                self.report.counts["said again behind the end"] += 1
                continue
            request, client = known
            request.take(item)
            if request.is_over:
                request.check(self._text_of)
                del self._requests[item.request_id]
                self._num_ended += 1
                self.report.counts["tokens"] += request.num_tokens
                self.report.counts.update(f"ended by {reason}" for reason in request.finish_reasons)
            elif request.is_abort_due:
                client.to_frontend.send(encode(Abort(item.request_id)))

    def _kill_somebody(self) -> None:
        """One of those that are restarted; now and then two at once, or one that only hangs."""
        pids = find_group(self._group.name).pids
        workers = [name for name in pids if name.startswith("worker")]
        victims = self._random.choice([["output"], [self._random.choice(workers)], [self._random.choice(workers)]])
        if self._random.random() < 0.1:
            victims = ["output", *workers]
        alive = set(children_of(self._group.pid))
        for victim in victims:
            if pids[victim] in alive:
                hangs = victim != "output" and self._random.random() < 0.1
                os.kill(pids[victim], signal.SIGSTOP if hangs else signal.SIGKILL)
                self.report.kills[f"{victim} hangs" if hangs else victim] += 1
        self._num_ended_at_kill = self._num_ended

    def _sample(self) -> None:
        report = self.report
        report.ended.append(self._num_ended)
        for role in _STEADY_ROLES:
            report.rss[role].append(rss_bytes(self._group.pids[role]))
            report.fds[role].append(num_open_fds(self._group.pids[role]))
        report.files.append(len(list(Path(self._group.endpoint.removeprefix("ipc://")).parent.iterdir())))
        report.children.append(len(children_of(self._group.pid)))


class _Connection:
    """A client's two sockets."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        identity = b"s" + os.urandom(8)
        self.to_frontend = ipc.connect(context, zmq.DEALER, endpoint, identity=identity)
        self.to_frontend.send(encode(Hello(PROTOCOL_VERSION)))
        assert self.to_frontend.poll(30_000), "the group does not answer"
        welcome = decode_to_client(self.to_frontend.recv())
        assert isinstance(welcome, Welcome)
        self.from_output = ipc.connect(context, zmq.DEALER, welcome.output_endpoint, identity=identity)
        self.from_output.send(encode(Attach(PROTOCOL_VERSION)))
        assert self.from_output.poll(30_000), "the output process does not answer"
        self.from_output.recv()
