"""The planner of workflows without generation: what shares a step, and what its header says."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.messages import EmbedInput, EmbedResult
from procengine.pipeline import PlannedStep
from procengine.scheduler.limits import SchedulerLimits
from procengine.step_payload import EMBED_SECTIONS, cut_sections
from procengine.workflows.prefill_only import PrefillRequest
from procengine.workflows.score import ScorePlanner

LIMITS = SchedulerLimits(8, 64, 64, 16, 0)


def request(
    key: int, length: int, options: tuple[int, ...] = (1,), *, types: bool = False, in_pieces: bool = False
) -> PrefillRequest:
    token_types = np.ones(length, np.int32) if types else None
    own = {"token_types": token_types, "options": options, "in_pieces": in_pieces}
    return PrefillRequest(key, b"c", str(key), np.full(length, key, np.int32), **own)  # type: ignore[arg-type]


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


def test_a_sequence_that_is_not_cut_goes_alone_if_it_is_longer_than_the_budget() -> None:
    """A group may take longer ones than a step of many: they are not cut (`max_embed_tokens`)."""
    assert planned(request(0, 10), request(1, 150), request(2, 10)) == [[0], [1], [2]]


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


def pieces_of(planner: ScorePlanner, count: int) -> list[PlannedStep]:
    steps = []
    for step_id in range(count):
        plan = planner.plan()
        assert plan is not None
        steps.append(planner.build(plan, step_id, 0))
    return steps


def test_one_that_can_be_cut_comes_in_pieces() -> None:
    planner = ScorePlanner(LIMITS)
    long, short = request(1, 150, in_pieces=True), request(2, 5)
    planner.add(long)
    planner.add(short)
    assert planner.num_unfinished == 2
    steps = pieces_of(planner, 4)
    assert planner.plan() is None
    headers = [step.header for step in steps if isinstance(step.header, EmbedInput)]
    assert [(one.num_tokens, one.num_rows, one.num_sequence_tokens) for one in headers] == [
        *((64, 1, 150), (64, 1, 150), (22, 1, 150)),
        (5, 1, 0),
    ]
    positions = [cut_sections(EMBED_SECTIONS, step.header.sizes, step.payload)["positions"] for step in steps]
    assert [(one[0], one[-1]) for one in positions] == [(0, 63), (64, 127), (128, 149), (0, 4)]
    assert [step.admitted for step in steps] == [[long], [], [], [short]]
    assert [step.sent for step in steps] == [[], [], [long], [short]]
    assert planner.num_unfinished == 2
    result = EmbedResult(0, 0, 0, 0, 0, (0, 0, 0), "score")
    none = np.empty(0, np.int32)
    assert [planner.apply(step.sent, result, none) for step in steps] == [[], [], [(long, "stop")], [(short, "stop")]]
    assert planner.num_unfinished == 0


def test_a_sequence_whose_worker_died_between_its_pieces_begins_again() -> None:
    planner, successor = ScorePlanner(LIMITS), ScorePlanner(LIMITS)
    long, waiting = request(1, 150, in_pieces=True), request(2, 5)
    planner.add(long)
    planner.add(waiting)
    pieces_of(planner, 2)
    assert planner.take_all() == [long, waiting]
    assert (long.num_worker_deaths, waiting.num_worker_deaths) == (1, 0)
    successor.add(long)
    assert cut_sections(EMBED_SECTIONS, *sizes_and_payload(pieces_of(successor, 1)[0]))["positions"][0] == 0


def test_a_sequence_given_up_between_its_pieces_makes_room_for_the_next() -> None:
    planner = ScorePlanner(LIMITS)
    long, short = request(1, 150, in_pieces=True), request(2, 5)
    planner.add(long)
    planner.add(short)
    pieces_of(planner, 2)
    planner.finish(long)
    assert planner.num_unfinished == 1
    assert pieces_of(planner, 1)[0].sent == [short]
    assert planner.plan() is None


def sizes_and_payload(step: PlannedStep) -> tuple[tuple[int, ...], NDArray[np.int32]]:
    return step.header.sizes, step.payload
