"""The supervisor process: starts the group, watches it, ends it.

Wiring and life cycle only; no request ever passes through here. It sleeps in one poll on the control socket, the
children's pidfds and logs, signals, and the death pipe of whoever launched it.

Life: starting (all children report Ready within the deadline) -> ready -> draining (SIGTERM, SIGINT or the launcher is
gone: no new requests, the running ones may finish) -> stopping -> gone. A child that dies ends the group: every client
hears why, and the exit status is 1. Workers, the output process and those that serve HTTP are restarted first, up to a
limit; so is the metrics process, and after that the group goes on without it.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from procengine import ipc
from procengine.child_process import ChildProcess, child_name, cpu_seconds, rss_bytes, write_log
from procengine.config import EngineConfig
from procengine.errors import ProcengineError
from procengine.http_listener import close_listener, listen, listen_unix, url_of
from procengine.messages import (
    UNREADABLE,
    ChildStats,
    Drain,
    Drained,
    Failed,
    GetStatus,
    OutputLost,
    ProcessStatus,
    Query,
    Ready,
    Shutdown,
    Status,
    WorkerHung,
    WorkerLost,
    decode_from_control_peer,
    encode,
)
from procengine.paths import socket_path
from procengine.profiling.span_ring import make_arena
from procengine.restart_policy import RestartPolicy
from procengine.run_dir import claim_run_dir, remove_run_dir, sweep_stale_dirs, write_description

__all__ = ["main", "run_group"]

_STOP_GRACE_S = 5.0
_STATUS_WAIT_S = 1.0
_LAST_WORDS_S = 0.3
_DUMP_S = 0.5  # for a hung child to write its stacks
_RESTARTED_ROLES = ("worker", "output", "metrics", "api")
_OPTIONAL_ROLES = ("metrics",)  # a group goes on without them
_LAST_ROLES = ("frontend", "worker", "metrics", "api")  # to end when the output process has sent its last texts


class Supervisor:
    """One group, from the first child to the last."""

    def __init__(self, config: EngineConfig, run_dir: Path, launcher_fd: int | None, signal_fd: int) -> None:
        self._config = config
        self._run_dir = run_dir
        self._launcher_fd = launcher_fd
        self._signal_fd = signal_fd
        self._state = "starting"
        self._started_s = time.monotonic()
        self._deadline_s: float | None = self._started_s + config.group.start_timeout_s
        self._error: str | None = None
        self._facts: dict[str, dict[str, int | float | str]] = {}
        self._stats_by_child: dict[bytes, ChildStats] = {}
        self._status_peers: list[bytes] = []
        self._status_deadline_s: float | None = None
        self._query_id = 0
        self._restart_limits = (config.group.max_restarts, config.group.restart_window_s)
        self._restart_policies: dict[str, RestartPolicy] = {}
        self._restarts_due: list[tuple[float, ChildProcess]] = []
        self._kills_due: list[tuple[float, ChildProcess]] = []
        self._listeners, self._urls = _open_listeners(config)
        self._context = ipc.make_context()
        self._control = ipc.bind(self._context, zmq.ROUTER, socket_path(run_dir, "control"))
        self._death_pipe = os.pipe()  # its write end is never written: children see it close
        self._children = self._spawn_children()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self._poller = zmq.Poller()
        self._watch_everything()

    def run(self) -> int:
        """Until the group is gone. Returns the exit status."""
        try:
            while self._state != "gone":
                for source, _event in self._poller.poll(self._poll_ms()):
                    handler = self._handlers.get(source)
                    if handler is not None:
                        handler()
                self._check_deadlines()
        finally:
            for listener in self._listeners.values():
                close_listener(listener)
            for child in self._children:
                child.kill()
            self._context.destroy(linger=100)
        return 1 if self._error else 0

    # --- start

    def _spawn_children(self) -> list[ChildProcess]:
        ranks = [("worker", rank) for rank in range(self._config.worker.num_workers)]
        roles = [*ranks, ("frontend", 0), ("output", 0)]  # workers first: they take longest
        children = [
            ChildProcess(role, rank, 0, self._config, self._death_pipe[0], self._make_spans(child_name(role, rank)))
            for role, rank in roles
        ]
        optional = [("metrics", 0)] if self._config.metrics.is_on else []
        optional += [("api", rank) for rank in range(self._config.api.num_workers) if self._config.api.is_on]
        for role, rank in optional:
            listen_fd = self._listeners[role].fileno() if role in self._listeners else None
            children.append(ChildProcess(role, rank, 0, self._config, self._death_pipe[0], None, listen_fd))
        return children

    def _make_spans(self, name: str) -> int | None:
        """Memory for a child's spans. It is ours, so that it is there when the child is not."""
        capacity = self._config.profiling.span_records
        return make_arena(name, capacity) if capacity else None

    def _watch_everything(self) -> None:
        self._watch(self._control, self._on_control)
        self._watch(self._signal_fd, self._on_signal)
        if self._launcher_fd is not None:
            self._watch(self._launcher_fd, self._on_launcher_gone)
        for child in self._children:
            self._watch_child(child)

    def _watch_child(self, child: ChildProcess) -> None:
        self._watch(child.pidfd, lambda: self._on_death(child))
        self._watch(child.log_fd, lambda: self._on_log(child))

    def _watch(self, source: int | zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        self._handlers[source] = handler
        self._poller.register(source, zmq.POLLIN if isinstance(source, zmq.Socket) else select.POLLIN)

    def _unwatch(self, source: int) -> None:
        if self._handlers.pop(source, None):
            self._poller.unregister(source)

    def _child(self, role: str, rank: int) -> ChildProcess | None:
        return next((c for c in self._children if (c.role, c.rank) == (role, rank)), None)

    def _on_ready(self, child: ChildProcess, message: Ready) -> None:
        child.is_ready = True
        self._facts[child.name] = message.facts
        if self._state == "starting" and all(c.is_ready for c in self._children):
            self._state, self._deadline_s = "ready", None
            description = self._describe()
            write_description(self._run_dir, description)
            _say({"event": "ready", **description})
        elif child.epoch:
            write_description(self._run_dir, self._describe())
            _say({"event": "restarted", "process": child.name, "pid": child.pid})

    def _describe(self) -> dict[str, Any]:
        return {
            "name": self._config.group.name,
            "endpoint": socket_path(self._run_dir, "frontend"),
            "control": socket_path(self._run_dir, "control"),
            "model": self._config.model.name,
            "pids": {"supervisor": os.getpid(), **{child.name: child.pid for child in self._children}},
            "num_blocks": self._facts["frontend"]["num_blocks"],
            **self._urls,
            "worker": {key: value for key, value in self._facts["worker-0"].items() if key != "num_blocks"},
            "is_private": self._launcher_fd is not None,
            "ready_s": round(time.monotonic() - self._started_s, 2),
        }

    # --- events

    def _on_control(self) -> None:
        while ipc.has_message(self._control):
            frames = self._control.recv_multipart()
            identity, data = frames[0], frames[-1]
            try:
                message = decode_from_control_peer(data)
            except UNREADABLE:
                continue  # not of this protocol; no child of ours sends such a thing
            match message:
                case Ready(role, rank) if child := self._child(role, rank):
                    self._on_ready(child, message)
                case Failed(role, rank, text, _) if child := self._child(role, rank):
                    child.failure = text
                case Ready() | Failed():
                    pass  # of nobody we know
                case Drained():
                    self._stop()
                case WorkerHung(rank, epoch):
                    self._on_hang(rank, epoch)
                case GetStatus():
                    self._ask_children(identity)
                case ChildStats():
                    self._on_child_stats(identity, message)

    def _on_signal(self) -> None:
        os.read(self._signal_fd, 4096)
        if self._state in ("starting", "draining", "stopping"):
            self._error = None if self._state == "starting" else "interrupted while shutting down"
            self._state = "gone"  # `run` kills what is left
        else:
            self._drain(self._config.group.drain_timeout_s)

    def _on_launcher_gone(self) -> None:
        assert self._launcher_fd is not None
        self._unwatch(self._launcher_fd)
        if self._state == "starting":
            self._state = "gone"
        elif self._state == "ready":
            self._drain(0.0)  # nobody is left to read the answers

    def _on_log(self, child: ChildProcess) -> None:
        if not child.forward_log():
            self._unwatch(child.log_fd)

    def _on_death(self, child: ChildProcess) -> None:
        if child.is_alive:
            return
        self._unwatch(child.pidfd)
        if self._state in ("starting", "ready", "draining"):
            self._hear_last_words(child)
            if self._state == "starting" or child.role not in _RESTARTED_ROLES:
                self._fail(child.describe_end())
            else:
                self._plan_restart(child)
        elif not any(c.is_alive for c in self._children):
            self._state = "gone"
        elif child.role == "output" and not self._error:
            self._shut_down(*_LAST_ROLES)

    def _hear_last_words(self, child: ChildProcess) -> None:
        """One that gave up has said why, but its death may be known a moment before its message is here."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while child.gave_up and child.failure is None and (left_s := deadline_s - time.monotonic()) > 0:
            if self._control.poll(int(1e3 * left_s)):
                self._on_control()

    # --- restarts

    def _on_hang(self, rank: int, epoch: int) -> None:
        """It is asked where it hangs, and then killed: what follows is a death like any other."""
        child = self._child("worker", rank)
        if child is None or child.epoch != epoch or not child.is_alive:
            return
        timeout_s = self._config.group.step_timeout_s
        write_log(
            f"procengine: {child.name} (pid {child.pid}) has made no progress for {timeout_s:g} s; its threads:\n"
        )
        child.dump_stacks()
        self._kills_due.append((time.monotonic() + _DUMP_S, child))

    def _kill_hung_children(self, now_s: float) -> None:
        for _, child in [entry for entry in self._kills_due if entry[0] <= now_s]:
            child.kill()  # its pidfd says so to `_on_death`
        self._kills_due = [entry for entry in self._kills_due if entry[0] > now_s]

    def _plan_restart(self, child: ChildProcess) -> None:
        """It died; the group goes on without it until its successor is ready."""
        now_s = time.monotonic()
        policy = self._restart_policies.setdefault(child.name, RestartPolicy(*self._restart_limits))
        delay_s = policy.delay_s(now_s)
        if delay_s is None:
            end = child.describe_end()
            if policy.max_restarts:
                limit = (
                    f"{policy.num_recent} times within {policy.window_s:g} s (max_restarts is {policy.max_restarts})"
                )
                end = f"{child.name} died {limit}; the last time: {end}"
            self._give_up(child, end)
            return
        what = "no request notices" if child.role in _OPTIONAL_ROLES else "its requests go on"
        write_log(f"procengine: {child.describe_end()}\nprocengine: {child.name} is restarted, {what}\n")
        if child.role == "worker":
            self._send_to("frontend", WorkerLost(child.rank, child.epoch))
        elif child.role == "output":
            self._send_to("frontend", OutputLost(child.epoch))
        self._restarts_due.append((now_s + delay_s, child))
        self._start_due_children()

    def _give_up(self, child: ChildProcess, end: str) -> None:
        if child.role not in _OPTIONAL_ROLES:
            self._fail(end)
            return
        write_log(f"procengine: {end}\nprocengine: the group goes on without {child.name}\n")
        if child.role in self._listeners:
            close_listener(self._listeners[child.role])  # who asks shall hear at once that nobody answers

    def _start_due_children(self) -> None:
        now_s = time.monotonic()
        due = [child for at_s, child in self._restarts_due if at_s <= now_s]
        self._restarts_due = [entry for entry in self._restarts_due if entry[0] > now_s]
        for dead in due:
            self._replace(dead)

    def _replace(self, dead: ChildProcess) -> None:
        self._unwatch(dead.log_fd)
        dead.close()
        epoch, death_fd = dead.epoch + 1, self._death_pipe[0]
        child = ChildProcess(dead.role, dead.rank, epoch, self._config, death_fd, dead.spans_fd, dead.listen_fd)
        self._children[self._children.index(dead)] = child
        self._watch_child(child)

    # --- end

    def _drain(self, timeout_s: float) -> None:
        self._state = "draining"
        self._deadline_s = time.monotonic() + timeout_s + _STOP_GRACE_S
        for role in ("frontend", "output", "api"):
            self._send_to(role, Drain(timeout_s))

    def _stop(self, error: str | None = None) -> None:
        """Tell everybody to end; what does not within the grace time is killed."""
        self._state = "stopping"
        self._restarts_due.clear()
        self._deadline_s = time.monotonic() + _STOP_GRACE_S
        output = self._child("output", 0)
        if error:
            self._shut_down("output", *_LAST_ROLES, error=error)
        elif output is not None and output.is_alive:
            self._shut_down("output")  # alone: while its last texts are under way, nobody may say "gone"
        else:
            self._shut_down(*_LAST_ROLES)

    def _shut_down(self, *roles: str, error: str | None = None) -> None:
        for role in roles:
            self._send_to(role, Shutdown(error))

    def _fail(self, error: str) -> None:
        self._error = error
        write_log(f"procengine: {error}\n")
        if self._state == "starting":
            self._state = "gone"
            _say({"event": "failed", "error": error})
        else:
            self._stop(error.split("\n", 1)[0])

    def _check_deadlines(self) -> None:
        now_s = time.monotonic()
        if self._status_deadline_s is not None and now_s >= self._status_deadline_s:
            self._answer_status()
        if self._restarts_due:
            self._start_due_children()
        if self._kills_due:
            self._kill_hung_children(now_s)
        if self._deadline_s is None or now_s < self._deadline_s:
            return
        if self._state == "starting":
            late = ", ".join(child.name for child in self._children if not child.is_ready)
            self._fail(f"{late} did not become ready within {self._config.group.start_timeout_s:g} s")
        elif self._state == "draining":
            self._stop()
        elif self._state == "stopping":
            self._state = "gone"

    def _poll_ms(self) -> int | None:
        deadlines = [d for d in (self._deadline_s, self._status_deadline_s) if d is not None]
        deadlines += [at_s for at_s, _ in self._restarts_due + self._kills_due]
        return max(0, int(1e3 * (min(deadlines) - time.monotonic())) + 1) if deadlines else None

    def _send_to(self, role: str, message: Drain | Shutdown | Query | WorkerLost | OutputLost) -> None:
        for child in self._children:
            if child.role == role and child.is_alive:
                ipc.send_routed(self._control, child.identity, encode(message))

    # --- status

    def _ask_children(self, peer: bytes) -> None:
        self._status_peers.append(peer)
        if self._status_deadline_s is not None:
            return
        self._query_id += 1
        self._stats_by_child.clear()
        self._status_deadline_s = time.monotonic() + _STATUS_WAIT_S
        for role in ("output", *_LAST_ROLES):
            self._send_to(role, Query(self._query_id))

    def _on_child_stats(self, identity: bytes, stats: ChildStats) -> None:
        if stats.query_id == self._query_id and self._status_deadline_s is not None:
            self._stats_by_child[identity] = stats
            if len(self._stats_by_child) == sum(child.is_alive for child in self._children):
                self._answer_status()

    def _answer_status(self) -> None:
        own = ProcessStatus(
            "supervisor", 0, os.getpid(), self._state, *self._resources(os.getpid(), self._started_s), queue_depth=0
        )
        status = Status(self._config.group.name, self._config.model.name, [own, *map(self._status_of, self._children)])
        for peer in self._status_peers:
            ipc.send_routed(self._control, peer, encode(status))
        self._status_peers.clear()
        self._status_deadline_s = None

    def _status_of(self, child: ChildProcess) -> ProcessStatus:
        stats = self._stats_by_child.get(child.identity)
        state = stats.state if stats else "silent" if child.is_alive else "dead"
        resources = self._resources(child.pid, child.started_s)
        depth = stats.queue_depth if stats else 0
        return ProcessStatus(child.role, child.rank, child.pid, state, *resources, depth, num_restarts=child.epoch)

    @staticmethod
    def _resources(pid: int, started_s: float) -> tuple[float, int, float]:
        return time.monotonic() - started_s, rss_bytes(pid), cpu_seconds(pid)


def _open_listeners(config: EngineConfig) -> tuple[dict[str, socket.socket], dict[str, str]]:
    """What the processes that serve HTTP accept on, by role, and the URLs of it for the ready line."""
    listeners: dict[str, socket.socket] = {}
    urls: dict[str, str] = {}
    metrics, api = config.metrics, config.api
    if metrics.port is not None:
        listeners["metrics"] = listen(metrics.host, metrics.port, "metrics_port")
        urls["metrics"] = f"{url_of(listeners['metrics'])}/metrics"
    elif metrics.uds is not None:
        listeners["metrics"] = listen_unix(metrics.uds, "metrics")
    if api.port is not None:
        listeners["api"] = listen(api.host, api.port, "port")
        scheme = "http" if api.ssl_certfile is None else "https"
        urls["http"] = url_of(listeners["api"]).replace("http", scheme, 1)
    elif api.uds is not None:
        listeners["api"] = listen_unix(api.uds, "uds")
        urls["http"] = f"unix:{api.uds}"
    return listeners, urls


def run_group(config: EngineConfig, launcher_fd: int | None = None) -> int:
    """Run a group in this process as its supervisor, until it ends. Returns the exit status.

    Raises:
        ConfigError: a group of that name is running.
    """
    run_dir = Path(config.group.run_dir)
    sweep_stale_dirs(run_dir.parent)
    lock_fd = claim_run_dir(run_dir)
    signal_fd = _signals_as_descriptor()
    try:
        return Supervisor(config, run_dir, launcher_fd, signal_fd).run()
    finally:
        remove_run_dir(run_dir)
        os.close(lock_fd)


def _signals_as_descriptor() -> int:
    """SIGTERM, SIGINT and SIGHUP make this descriptor readable."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP, and means it
            signal.signal(number, lambda *_: None)
    return reader


def _say(event: dict[str, Any]) -> None:
    """One JSON line on stdout."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Entry of a launched supervisor: the configuration and the launcher's death pipe come as descriptors."""
    parser = argparse.ArgumentParser(prog="procengine supervisor")
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--launcher-fd", type=int, required=True)
    args = parser.parse_args()
    with os.fdopen(args.config_fd, "rb") as file:
        config = msgspec.json.decode(file.read(), type=EngineConfig)
    try:
        return run_group(config, args.launcher_fd)
    except ProcengineError as error:
        _say({"event": "failed", "error": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main())
