"""Which passes count as steady decode, and what comes of them."""

from __future__ import annotations

import pytest

from procengine.bench.steady_decode import SteadyDecode, steady_decode
from procengine.errors import ProcengineError
from procengine.profiling.capture import Capture, GroupFacts, join_capture
from tests.unit.profiling.synthetic import Recorder

MS = 1_000_000


def record(recorder: Recorder, step_id: int, began_ms: float, ended_ms: float, rows: int, tokens: int) -> None:
    """A pass whose step was at the worker in time: what it waited for was the worker itself."""
    began, ended = round(began_ms * MS), round(ended_ms * MS)
    planned = [began - 10 * MS] * 5
    run = [began - 9 * MS, began - 9 * MS, began, began, began, ended]
    recorder.one_pass(step_id, [*planned, *run, *[ended] * 11], num_rows=rows, num_tokens=tokens, num_running=rows)


def figures(recorder: Recorder, batch_size: int) -> SteadyDecode:
    facts = GroupFacts("g", "m", {"worker-0": 1})
    return steady_decode(join_capture(Capture(facts, 0, 10**10, recorder.tables(), {})), batch_size)


def recorded(num_passes: int, *, gap_ms: float = 1.0) -> Recorder:
    """A prompt of two requests, then passes of 4 ms with gaps between."""
    recorder = Recorder()
    record(recorder, 0, 100, 150, rows=2, tokens=64)
    for number in range(num_passes):
        began_ms = 151 + number * (4 + gap_ms)
        record(recorder, 1 + number, began_ms, began_ms + 4, rows=2, tokens=2)
    return recorder


def test_prompts_and_the_first_passes_after_them_do_not_count() -> None:
    found = figures(recorded(14), 2)
    assert found.num_passes == 14 - 4
    assert (found.pass_ms, found.least_pass_ms) == (4.0, 4.0)
    assert found.idle_share == pytest.approx(9 / 49), "nine gaps between ten passes"
    assert found.tokens_per_s == pytest.approx(2 * 10 / 0.049)
    assert {cause: share for cause, share in found.idle_share_by_cause.items() if share} == {
        "worker queue": pytest.approx(found.idle_share)
    }


def test_a_pass_with_fewer_requests_and_the_gaps_round_it_do_not_count() -> None:
    recorder = recorded(8)
    record(recorder, 9, 1000, 1004, rows=1, tokens=1)
    record(recorder, 10, 2000, 2008, rows=2, tokens=2)
    found = figures(recorder, 2)
    assert found.num_passes == 8 - 4 + 1
    assert found.idle_share == pytest.approx(3 / (3 + 4 * 4 + 8)), "nothing of the second on either side of the other"


def test_too_few_passes_are_refused() -> None:
    with pytest.raises(ProcengineError, match="3 passes decoded 2 requests at once, 4 are needed"):
        figures(recorded(4 + 3), 2)
    with pytest.raises(ProcengineError, match="0 passes decoded 5 requests at once"):
        figures(recorded(30), 5)
