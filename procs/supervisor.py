"""The supervisor process: starts the group, watches it, ends it.

Wiring and life cycle only; no request ever passes through here. It sleeps in one poll on the control socket, the
children's pidfds and logs, signals, and the death pipe of whoever launched it.

Life: starting (all children report Ready within the deadline) -> ready -> draining (SIGTERM, SIGINT or the launcher is
gone: no new requests, the running ones may finish) -> stopping -> gone. A child that dies is replaced (`Succession`).
One that dies too often ends the group: every client hears why, and the exit status is 1. Only without its metrics
process the group goes on.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from pathlib import Path

import msgspec
import zmq

from procengine import ipc
from procengine.adapter_changes import AdapterChanges
from procengine.announcements import Announcements, announce
from procengine.child_process import ChildProcess, write_log
from procengine.children import Children
from procengine.client_listeners import ClientListeners
from procengine.config import EngineConfig
from procengine.crash.writer import CrashWriter
from procengine.errors import ConfigError, ProcengineError
from procengine.group_listeners import GroupListeners
from procengine.group_status import GroupStatus
from procengine.hung_children import HungChildren
from procengine.liveness import LIVENESS_QUERY
from procengine.messages import (
    UNREADABLE,
    AdapterChanged,
    ChildStats,
    Drain,
    Drained,
    Ended,
    EndGroup,
    Failed,
    FromAsker,
    FromChild,
    GetStatus,
    LoadLora,
    Ready,
    RecordedRequests,
    Restart,
    Shutdown,
    Stays,
    UnloadLora,
    WorkerHung,
    WorkerRetired,
    WriteRecord,
    decode_from_control_peer,
    encode,
)
from procengine.paths import socket_path
from procengine.poll_loop import PollLoop, signals_as_descriptor
from procengine.restarts import Restarts
from procengine.run_dir import claim_run_dir, remove_run_dir, sweep_stale_dirs
from procengine.stray_frames import StrayFrames
from procengine.succession import Succession

__all__ = ["main", "run_group"]

_STOP_GRACE_S = 5.0
_LAST_WORDS_S = 0.3
_LAST_ROLES = ("frontend", "worker", "metrics", "api")  # to end when the output process has sent its last texts


class Supervisor:
    """One group, from the first child to the last."""

    def __init__(self, config: EngineConfig, run_dir: Path, launcher_fd: int | None, signal_fd: int) -> None:
        self._config = config
        self._launcher_fd = launcher_fd
        self._signal_fd = signal_fd
        self._strays = StrayFrames("supervisor")
        self._state = "starting"
        self._started_s = time.monotonic()
        self._error: str | None = None
        self._drained = Drained()
        self._end_askers: list[bytes] = []
        self._clients = ClientListeners(config)
        config = self._config = self._clients.config
        self._listeners = GroupListeners(config)
        self._context = ipc.make_context()
        self._control = ipc.bind(self._context, zmq.ROUTER, socket_path(run_dir, "control"))
        self._children = Children(config, self._control, self._clients.fds | self._listeners.fds)
        self._restarts = Restarts(config.group, self._children, self._control)
        self._adapters = AdapterChanges(config, self._children, self._control)
        self._announcements = Announcements(
            config, self._children, self._urls, self._started_s, is_private=launcher_fd is not None
        )
        self._loop = PollLoop()
        self._status = GroupStatus(
            config, self._children, self._control, self._loop, lambda: self._state, self._started_s
        )
        self._hung = HungChildren(self._children, self._loop, config.group.step_timeout_s)
        self._crashes = CrashWriter(config, self._children, self._control, self._loop)
        self._succession = Succession(
            self._children,
            self._restarts,
            self._crashes,
            self._loop,
            config.group.start_timeout_s,
            watch=self._watch_child,
            close_listener=self._listeners.close,
        )
        self._deadline = self._loop.call_at(self._started_s + config.group.start_timeout_s, self._on_deadline)
        self._watch_everything()

    def run(self) -> int:
        """Until the group is gone. Returns the exit status."""
        try:
            while self._state != "gone":
                self._loop.run_once()
        finally:
            self._listeners.close_all()
            self._clients.close()
            self._children.kill_all()
            self._crashes.close()
            error = self._error and self._error.split("\n", 1)[0]
            ended = Ended(self._drained.num_finished, self._drained.num_aborted, error)
            for asker in self._end_askers:
                ipc.send_routed(self._control, asker, encode(ended))
            self._context.destroy(linger=100)
        return 1 if self._error else 0

    # --- start

    def _watch_everything(self) -> None:
        self._loop.watch(self._control, self._on_control)
        self._loop.watch(self._signal_fd, self._on_signal)
        if self._launcher_fd is not None:
            self._loop.watch(self._launcher_fd, self._on_launcher_gone)
        for child in self._children:
            self._watch_child(child)

    def _watch_child(self, child: ChildProcess) -> None:
        self._loop.watch(child.pidfd, lambda: self._on_death(child))
        self._loop.watch(child.log_fd, lambda: self._on_log(child))

    def _on_ready(self, child: ChildProcess, message: Ready) -> None:
        child.is_ready = True
        self._announcements.note(child, message.facts)
        self._adapters.tell(child)
        if self._state == "starting" and self._children.all_ready:
            self._become_ready()
        elif child.epoch:
            self._restarts.tell_news(child)
            self._announcements.changed()
            self._restarts.finish(child)
            announce({"event": "restarted", "process": child.name, "pid": child.pid})

    def _become_ready(self) -> None:
        try:
            self._announcements.ready()
        except ConfigError as error:
            self._fail(str(error))
            return
        self._state = "ready"
        self._deadline.cancel()
        self._hung.watch()

    def _urls(self) -> dict[str, str]:
        tcp = {"tcp": self._clients.endpoint} if self._clients.endpoint else {}
        return {**tcp, **self._listeners.urls}

    # --- events

    def _on_control(self) -> None:
        while ipc.has_message(self._control):
            frames = self._control.recv_multipart()
            identity, data = frames[0], frames[-1]
            try:
                message = decode_from_control_peer(data)
            except UNREADABLE as error:
                self._strays.drop("control", error, identity)
                continue
            if isinstance(message, FromAsker):
                self._on_asked(identity, message)
            else:
                self._on_child(identity, message)

    def _on_asked(self, asker: bytes, message: FromAsker) -> None:
        match message:
            case WriteRecord():
                self._crashes.on_demand(asker)
            case GetStatus():
                self._status.ask(asker)
            case Restart(name, timeout_s):
                self._restarts.ask(asker, name, timeout_s)
                if self._state != "ready":
                    self._restarts.refuse_all(f"the group is {self._state}")
            case LoadLora() | UnloadLora():
                self._adapters.ask(asker, message)
            case EndGroup(timeout_s):
                self._end_askers.append(asker)
                self._end_by_request(timeout_s)

    def _on_child(self, identity: bytes, message: FromChild) -> None:
        sender = next((child for child in self._children if child.identity == identity), None)
        match message:
            case Failed(role, rank, text, _):  # over a socket without a name, see `child`
                if child := self._children.find(role, rank):
                    child.failure = text
            case _ if sender is None:
                self._strays.drop("control", f"a {type(message).__name__} of no child", identity)
            case Ready():
                self._on_ready(sender, message)
            case Drained():
                self._drained = message
                self._stop()
            case WorkerHung(rank, epoch):
                self._hung.end_worker(rank, epoch)
            case WorkerRetired(rank, epoch):
                self._restarts.end_worker(rank, epoch)
            case Stays(num_unfinished):
                self._restarts.refuse("frontend", f"{num_unfinished} requests did not finish in time")
            case AdapterChanged():
                self._adapters.take(message)
            case RecordedRequests():
                self._crashes.take(message)
            case ChildStats():
                self._on_stats(identity, message)

    def _on_stats(self, identity: bytes, stats: ChildStats) -> None:
        if stats.query_id == LIVENESS_QUERY:
            self._hung.take_answer(identity)
        else:
            self._status.take(identity, stats)

    def _on_signal(self) -> None:
        os.read(self._signal_fd, 4096)
        if self._state in ("draining", "stopping"):
            self._error = "interrupted while shutting down"
            self._state = "gone"  # `run` kills what is left
        else:
            self._end_by_request(None)

    def _end_by_request(self, timeout_s: float | None) -> None:
        if self._state == "starting":
            self._state = "gone"
        elif self._state == "ready":
            self._drain(self._config.group.drain_timeout_s if timeout_s is None else timeout_s)

    def _on_launcher_gone(self) -> None:
        assert self._launcher_fd is not None
        self._loop.unwatch(self._launcher_fd)
        if self._state == "starting":
            self._state = "gone"
        elif self._state == "ready":
            self._drain(0.0)  # nobody is left to read the answers

    def _on_log(self, child: ChildProcess) -> None:
        if not child.forward_log():
            self._loop.unwatch(child.log_fd)

    def _on_death(self, child: ChildProcess) -> None:
        if child.is_alive:
            return
        self._loop.unwatch(child.pidfd)
        if self._state in ("starting", "ready", "draining"):
            self._hear_last_words(child)
            has_nothing_to_finish = child.role == "frontend" and self._state == "draining"
            if self._state == "starting" or has_nothing_to_finish:
                self._fail(child.describe_end())
            else:
                self._adapters.lose(child)
                if end := self._succession.succeed(child):
                    self._fail(end)
        elif not self._children.any_alive:
            self._state = "gone"
        elif child.role == "output" and not self._error:
            self._children.send(Shutdown(), *_LAST_ROLES)

    def _hear_last_words(self, child: ChildProcess) -> None:
        """One that gave up has said why, but its death may be known a moment before its message is here."""
        deadline_s = time.monotonic() + _LAST_WORDS_S
        while child.gave_up and child.failure is None and (left_s := deadline_s - time.monotonic()) > 0:
            if self._control.poll(int(1e3 * left_s)):
                self._on_control()

    # --- end

    def _drain(self, timeout_s: float) -> None:
        self._state = "draining"
        self._restarts.refuse_all("the group is draining")
        self._set_deadline(timeout_s + _STOP_GRACE_S)
        self._children.send(Drain(timeout_s), "frontend", "output", "api")

    def _stop(self, error: str | None = None) -> None:
        """Tell everybody to end; what does not within the grace time is killed."""
        self._state = "stopping"
        self._hung.stop()
        self._succession.end()
        self._set_deadline(_STOP_GRACE_S)
        output = self._children.find("output")
        if error:
            self._children.send(Shutdown(error), "output", *_LAST_ROLES)
        elif output is not None and output.is_alive:
            # Alone: while its last texts are under way, nobody may say "gone".
            self._children.send(Shutdown(), "output")
        else:
            self._children.send(Shutdown(), *_LAST_ROLES)

    def _fail(self, error: str) -> None:
        self._error = error
        write_log(f"procengine: {error}\n")
        if self._state == "starting":
            self._state = "gone"
            announce({"event": "failed", "error": error})
        else:
            self._stop(error.split("\n", 1)[0])

    def _set_deadline(self, in_s: float) -> None:
        self._deadline.cancel()
        self._deadline = self._loop.call_at(time.monotonic() + in_s, self._on_deadline)

    def _on_deadline(self) -> None:
        if self._state == "starting":
            late = ", ".join(child.name for child in self._children if not child.is_ready)
            self._fail(f"{late} did not become ready within {self._config.group.start_timeout_s:g} s")
        elif self._state == "draining":
            self._stop()
        elif self._state == "stopping":
            self._state = "gone"


def run_group(config: EngineConfig, launcher_fd: int | None = None) -> int:
    """Run a group in this process as its supervisor, until it ends. Returns the exit status.

    Raises:
        ConfigError: a group of that name is running.
    """
    group = msgspec.structs.replace(config.group, instance=secrets.randbits(52) + 1)
    config = msgspec.structs.replace(config, group=group)
    run_dir = Path(config.group.run_dir)
    sweep_stale_dirs(run_dir.parent)
    lock_fd = claim_run_dir(run_dir)
    signal_fd = signals_as_descriptor()
    try:
        return Supervisor(config, run_dir, launcher_fd, signal_fd).run()
    finally:
        remove_run_dir(run_dir)
        os.close(lock_fd)


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
        announce({"event": "failed", "error": str(error)})
        return 1


if __name__ == "__main__":
    sys.exit(main())
