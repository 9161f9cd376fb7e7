"""The table of `procengine ps`, and supervisors that do not answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from procengine import ipc
from procengine.cli.ps import _as_object, ask_groups, duration, render
from procengine.groups import GroupInfo
from procengine.messages import GetStatus, ProcessStatus, Status, decode_from_control_peer, encode

STATUS = Status(
    "small",
    "m",
    [
        ProcessStatus("supervisor", 0, 10, "ready", 61.0, 20 << 20, 0.25, 0),
        ProcessStatus("worker", 1, 1234, "stuck 12 s", 60.0, 300 << 20, 12.5, 3, progressing=False, waited_s=12.0),
    ],
)


def group(name: str, directory: Path | str = "/run") -> GroupInfo:
    return GroupInfo(
        name=name, endpoint="ipc://f", control=f"ipc://{directory}/{name}.sock", model="m", pids={"supervisor": 7}
    )


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[GroupInfo]:
    """A control socket that answers one question."""
    info = group("small", tmp_path)
    context = ipc.make_context()
    socket = ipc.bind(context, zmq.ROUTER, info.control)

    def answer() -> None:
        identity, data = socket.recv_multipart()
        assert decode_from_control_peer(data) == GetStatus()
        socket.send_multipart((identity, encode(STATUS)))

    thread = threading.Thread(target=answer)
    thread.start()
    yield info
    thread.join()
    context.destroy(linger=0)


def test_supervisor_that_answers_is_waited_for_no_longer(supervisor: GroupInfo) -> None:
    assert ask_groups([supervisor], 60.0) == {"small": STATUS}


def test_supervisor_that_does_not_answer_is_left_out(supervisor: GroupInfo, tmp_path: Path) -> None:
    statuses = ask_groups([group("dead", tmp_path), supervisor], 0.3)
    assert set(statuses) == {"small"}


def test_table_has_a_row_a_process() -> None:
    lines = render([group("small"), group("stuck")], {"small": STATUS}).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "GROUP MODEL ROLE RANK PID STATE LIVE READY MOVES UPTIME RSS CPU QUEUE",
        "small m supervisor 0 10 ready yes yes yes 1m01s 20 MB 0.2 s 0",
        "small m worker 1 1234 stuck 12 s yes yes NO 1m00s 300 MB 12.5 s 3",
        "stuck m supervisor 0 7 no answer NO NO NO - - - -",
    ]
    assert len({line.index("MB") for line in lines[1:3]}) == 1  # columns stand in line


def test_json_object_says_which_group_is_silent() -> None:
    answered, silent = _as_object(group("small"), STATUS), _as_object(group("stuck"), None)
    assert answered["processes"][1]["rss_bytes"] == 300 << 20
    assert "did not answer" in silent["error"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.9, "59s"), (184, "3m04s"), (7500, "2h05m"), (86400 * 4 + 3600 * 3, "4d03h")],
)
def testdurations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
