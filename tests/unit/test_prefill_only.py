"""The planner of workflows without generation: what shares a step, and what its header says."""

from __future__ import annotations

import numpy as np

from procengine.messages import EmbedInput
from procengine.scheduler.limits import SchedulerLimits
from procengine.step_payload import EMBED_SECTIONS, cut_sections
from procengine.workflows.prefill_only import PrefillRequest
from procengine.workflows.score import ScorePlanner

LIMITS = SchedulerLimits(8, 64, 64, 16, 0)


def request(key: int, length: int, options: tuple[int, ...] = (1,), *, types: bool = False) -> PrefillRequest:
    token_types = np.ones(length, np.int32) if types else None
    return PrefillRequest(key, b"c", str(key), np.full(length, key, np.int32), token_types=token_types, options=options)


def planned(*requests: PrefillRequest) -> list[list[int]]:
    planner = ScorePlanner(LIMITS)
    for one in requests:
        planner.add(one)
    steps = []
    while (rows := planner.plan()) is not None:
        assert isinstance(rows, list)
        steps.append([row.key for row in rows])
    return steps


def test_steps_hold_whole_sequences_up_to_the_budget() -> None:
    assert planned(*(request(key, 30) for key in range(5))) == [[0, 1], [2, 3], [4]]
    assert planned(request(0, 64), request(1, 1)) == [[0], [1]]


def test_only_requests_of_the_same_options_share_a_step() -> None:
    assert planned(request(0, 5), request(1, 5, (0,)), request(2, 5, (0,)), request(3, 5)) == [[0], [1, 2], [3]]


def test_token_types_are_sent_where_any_row_has_them() -> None:
    planner = ScorePlanner(LIMITS)
    step = planner.build([request(1, 2), request(2, 3, types=True)], 7, 0)
    sections = cut_sections(EMBED_SECTIONS, step.header.sizes, step.payload)
    assert sections["token_types"].tolist() == [0, 0, 1, 1, 1]
    assert sections["positions"].tolist() == [0, 1, 0, 1, 2]
    assert isinstance(step.header, EmbedInput)
    assert (step.header.workflow, step.header.options) == ("score", (1,))
    alone = planner.build([request(3, 2)], 8, 0)
    assert cut_sections(EMBED_SECTIONS, alone.header.sizes, alone.payload)["token_types"].size == 0
