"""What the states of processes say about their group."""

from __future__ import annotations

import msgspec
import pytest

from procengine.health import group_health, health_object, silent_health
from procengine.messages import ProcessStatus, Status


def process(name: str, state: str = "ready", **fields: object) -> ProcessStatus:
    role, _, rank = name.partition("-")
    return msgspec.structs.replace(ProcessStatus(role, int(rank or 0), 7, state, 1.0, 1000, 0.1, 0), **fields)


DEAD = {"state": "dead", "live": False, "ready": False, "progressing": False}
STARTING = {"state": "starting", "ready": False}
SILENT = {"state": "silent", "live": False, "ready": False, "progressing": False}
STUCK = {"state": "stuck 12 s", "progressing": False, "waited_s": 12.0}
DRAINING = {"state": "draining", "ready": False}


@pytest.mark.parametrize(
    ("sick", "ready", "progressing"),
    [
        ({}, True, True),
        ({"worker-0": DEAD}, True, True),  # the other one serves
        ({"worker-0": DEAD, "worker-1": STARTING}, False, True),
        ({"worker-0": STUCK}, True, False),
        ({"worker-1": SILENT}, True, False),
        ({"frontend": DEAD}, False, True),
        ({"frontend": STARTING}, False, True),
        ({"output": SILENT}, False, False),
        ({"supervisor": DRAINING, "frontend": DRAINING}, False, True),
        ({"metrics": DEAD}, True, True),
        ({"metrics": SILENT}, True, True),  # nobody who sends requests needs it
    ],
    ids=str,
)
def test_health_is_that_of_those_who_are_needed(
    sick: dict[str, dict[str, object]], ready: bool, progressing: bool
) -> None:
    names = ("supervisor", "worker-0", "worker-1", "frontend", "output", "metrics")
    status = Status("g", "m", [process(name, **sick.get(name, {})) for name in names])  # type: ignore[arg-type]
    health = group_health(status)
    assert (health.live, health.ready, health.progressing) == (True, ready, progressing)
    assert health.is_healthy == (ready and progressing)
    assert [line.split(" ")[0] for line in health.problems] == [name for name in names if name in sick]
    shown = health_object("g", health, status)
    assert shown["healthy"] == health.is_healthy
    assert list(shown["processes"]) == list(names)  # type: ignore[call-overload]


def test_a_supervisor_that_does_not_answer_is_not_live() -> None:
    health = silent_health(3)
    assert not (health.live or health.ready or health.progressing or health.is_healthy)
    assert health_object("g", health, None)["problems"] == ["supervisor: no answer within 3 s"]
