"""Which groups cannot be recorded, and what is said of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from procengine.errors import ConfigError, GroupNotFoundError
from procengine.groups import GroupInfo
from procengine.profiling.recording import Recording
from procengine.profiling.snapshot import SpanReader


def info(pid: int) -> GroupInfo:
    return GroupInfo(name="g", endpoint="ipc:///nowhere", pids={"supervisor": pid})


def test_a_group_elsewhere() -> None:
    with pytest.raises(ConfigError, match="group tcp://h:1: only a group on this machine can be read"):
        Recording(GroupInfo(name="tcp://h:1", endpoint="tcp://h:1"))


def test_a_process_without_spans() -> None:
    with pytest.raises(ConfigError, match="group g keeps no spans: it was started with --span-records 0"):
        Recording(info(os.getpid()))


def test_a_group_that_is_gone() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(GroupNotFoundError, match="group g has just ended"):
        Recording(info(gone.pid))


def test_a_group_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: SpanReader) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(SpanReader, "read", refuse)  # root may read all: it cannot be made to happen there
    with pytest.raises(ConfigError, match="group g: it belongs to another user"):
        Recording(info(1))
