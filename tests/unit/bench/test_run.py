"""When the measuring client sends what. Its run against a group is in tests/procs/test_bench.py."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.bench.arrivals import Pace
from procengine.bench.run import PacedRun, _body
from procengine.bench.workload import BenchRequest
from procengine.client_core import Pending

FAR_S = 3600.0


def prepared(count: int) -> list[tuple[Pending, bytes]]:
    return [(Pending(f"r{at}"), f"frame {at}".encode()) for at in range(count)]


def frames_now(run: PacedRun) -> list[bytes]:
    frames = []
    while (frame := run.next_frame()) is not None:
        frames.append(frame)
    return frames


def end(pending: Pending) -> None:
    assert pending.on_end is not None
    pending.on_end(pending)


def test_without_a_pace_everything_goes_at_once_and_counts_from_sending() -> None:
    run = PacedRun(prepared(3), Pace())
    assert frames_now(run) == [b"frame 0", b"frame 1", b"frame 2"]
    assert run.record.intended_ns == run.record.submitted_ns and list(run.record.submitted_ns) == ["r0", "r1", "r2"]
    assert run.poll_ms() == 500, "nothing left to send: wait for messages"


def test_closed_loop_sends_one_for_each_that_ends() -> None:
    requests = prepared(4)
    run = PacedRun(requests, Pace(max_concurrency=2))
    assert frames_now(run) == [b"frame 0", b"frame 1"] and run.poll_ms() == 500
    end(requests[1][0])
    assert frames_now(run) == [b"frame 2"]
    end(requests[0][0])
    end(requests[2][0])
    assert frames_now(run) == [b"frame 3"]


def test_open_loop_waits_for_the_arrival_whatever_has_ended() -> None:
    requests = prepared(3)
    run = PacedRun(requests, Pace(np.array([0.0, 0.0, FAR_S])))
    assert frames_now(run) == [b"frame 0", b"frame 1"]
    end(requests[0][0])
    assert run.next_frame() is None and run.poll_ms() == 500, "a poll is never longer: a dead group is noticed"


def test_request_that_is_sent_late_keeps_its_time() -> None:
    requests = prepared(3)
    run = PacedRun(requests, Pace(np.array([0.0, 1e-6, 2e-6]), max_concurrency=1))
    assert frames_now(run) == [b"frame 0"]
    end(requests[0][0])
    assert frames_now(run) == [b"frame 1"], "held back by the limit, not by its arrival"
    end(requests[1][0])
    assert frames_now(run) == [b"frame 2"]
    intended = list(run.record.intended_ns.values())
    assert np.diff(intended).tolist() == [1000, 1000], "as planned"
    assert all(run.record.submitted_ns[name] > at for name, at in run.record.intended_ns.items())


def test_poll_ends_before_the_next_arrival_and_sleep_covers_the_rest() -> None:
    run = PacedRun(prepared(2), Pace(np.array([0.0, 0.05])))
    assert frames_now(run) == [b"frame 0"]
    assert run.poll_ms() <= 50
    while run.poll_ms() > 0:  # what a poll would do
        pass
    run.sleep_if_nearly_due()
    assert run.next_frame() == b"frame 1"


@pytest.mark.parametrize(
    ("prompt", "body"),
    [
        ("text", {"prompt": "text"}),
        ([1, 2], {"prompt_token_ids": [1, 2]}),
        ([{"role": "user", "content": "x"}], {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_prompt_of_each_kind_has_its_field(prompt: object, body: dict[str, object]) -> None:
    assert _body(BenchRequest(prompt, 1, "here")) == body  # type: ignore[arg-type]
