"""`procengine ps`: every process of the running groups, in a table.

Owns: the table. Never does: measure; each group's supervisor tells.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from procengine.cli.examples import add_examples
from procengine.groups import GroupInfo, running_groups

if TYPE_CHECKING:
    from procengine.messages import ProcessStatus, Status

__all__ = ["add_arguments", "ask_groups", "duration", "render", "run"]

_WAIT_S: Final = 2.0
_HEADINGS: Final = (
    "GROUP",
    "MODEL",
    "ROLE",
    "RANK",
    "PID",
    "STATE",
    "LIVE",
    "READY",
    "MOVES",
    "UPTIME",
    "RSS",
    "CPU",
    "QUEUE",
)
_LEFT: Final = frozenset(
    {"GROUP", "MODEL", "ROLE", "STATE", "LIVE", "READY", "MOVES"}
)  # text; numbers stand to the right
_SILENT: Final = "no answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show every process of the running groups. LIVE: it answers; READY: it serves; MOVES: it has nothing to do, or "
        "gets on\nwith it. RSS is resident memory, shared pages included; CPU is the time used "
        "so far;\nQUEUE is requests waiting or running (frontend), not ended (output) or steps not done (worker)."
    )
    add_examples(
        parser,
        ("procengine ps", "a table"),
        ("procengine ps --json", "for programs"),
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of groups")


def run(args: argparse.Namespace) -> int:
    """Ask all supervisors at once, print what they say."""
    groups = running_groups()
    statuses = ask_groups(groups, _WAIT_S)
    if args.json:
        print(msgspec.json.encode([_as_object(group, statuses.get(group.name)) for group in groups]).decode())
    elif groups:
        print(render(groups, statuses))
    else:
        print("no group is running; start one with `procengine serve MODEL`")
    return 0


def ask_groups(groups: Sequence[GroupInfo], wait_s: float) -> dict[str, Status]:
    """The status of each group that answers within `wait_s`, by name."""
    import zmq

    from procengine import ipc
    from procengine.messages import GetStatus, decode_status, encode

    context = ipc.make_context()
    poller = zmq.Poller()
    name_by_socket: dict[Any, str] = {}
    statuses: dict[str, Status] = {}
    try:
        for group in groups:
            socket = ipc.connect(context, zmq.DEALER, group.control)
            socket.send(encode(GetStatus()))
            poller.register(socket, zmq.POLLIN)
            name_by_socket[socket] = group.name
        deadline = time.monotonic() + wait_s
        while len(statuses) < len(groups) and (left := deadline - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(1e3 * left) + 1):
                statuses[name_by_socket[socket]] = decode_status(socket.recv())
    finally:
        context.destroy(linger=0)  # a supervisor that does not answer must not hold us up either
    return statuses


def render(groups: Sequence[GroupInfo], statuses: Mapping[str, Status]) -> str:
    """The table. A group whose supervisor did not answer is one line, made from what it wrote when it became ready."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for group in groups:
        status = statuses.get(group.name)
        if status is None:
            rows.append(_silent_row(group))
        else:
            rows += [(group.name, status.model, *_cells(process)) for process in status.processes]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_line(row, widths) for row in rows)


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = [
        cell.ljust(width) if heading in _LEFT else cell.rjust(width)
        for heading, cell, width in zip(_HEADINGS, row, widths, strict=True)
    ]
    return "  ".join(cells).rstrip()


def _cells(process: ProcessStatus) -> tuple[str, ...]:
    return (
        process.role,
        str(process.rank),
        str(process.pid),
        process.state,
        *("yes" if value else "NO" for value in (process.live, process.ready, process.progressing)),
        duration(process.uptime_s),
        f"{process.rss_bytes / 2**20:.0f} MB",
        f"{process.cpu_s:.1f} s",
        str(process.queue_depth),
    )


def _silent_row(group: GroupInfo) -> tuple[str, ...]:
    pid = str(group.pids.get("supervisor", "-"))
    return (group.name, group.model, "supervisor", "0", pid, _SILENT, "NO", "NO", "NO", "-", "-", "-", "-")


def duration(seconds: float) -> str:
    """Two units are enough: 12s, 3m04s, 2h05m, 4d03h."""
    whole = int(seconds)
    for unit, next_unit, size, next_size in (("d", "h", 86400, 3600), ("h", "m", 3600, 60), ("m", "s", 60, 1)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // next_size:02d}{next_unit}"
    return f"{whole}s"


def _as_object(group: GroupInfo, status: Status | None) -> dict[str, Any]:
    named = {"group": group.name, "model": group.model, "endpoint": group.endpoint}
    if status is None:
        return {**named, "error": f"the supervisor did not answer within {_WAIT_S:g} s", "processes": []}
    processes = [{name: getattr(p, name) for name in p.__struct_fields__} for p in status.processes]
    return {**named, "processes": processes}
