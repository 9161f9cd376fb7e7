"""The window of steps in flight, and workflows that take turns in it."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from procengine.messages import EmbedInput, EmbedResult, StepInput, StepResult
from procengine.pipeline import Gauges, Pipeline, PlannedStep, PlannersOnDemand
from procengine.scheduler.counters import SchedulerCounters

NONE = np.zeros(0, np.int32)


class FakePlanner:
    """Has `num_steps` steps to give; `wants_late_plan` as it is told."""

    def __init__(self, name: str, num_steps: int, passes: int = 1) -> None:
        self.name = name
        self.num_steps = num_steps
        self.passes = passes
        self.wants_late_plan = False
        self.counters = SchedulerCounters()
        self.applied: list[tuple[object, int]] = []

    @property
    def num_unfinished(self) -> int:
        return self.num_steps

    def add(self, request: Any) -> None: ...
    def finish(self, request: Any) -> None: ...

    def take_all(self, *, has_died: bool = True) -> list[Any]:
        return []

    def take_failed(self) -> list[tuple[Any, str]]:
        return []

    @property
    def gauges(self) -> Gauges:
        return Gauges(self.num_steps, 2, 3)

    def plan(self) -> str | None:
        if not self.num_steps:
            return None
        self.num_steps -= 1
        return self.name

    def build(self, plan: str, step_id: int, epoch: int) -> PlannedStep:
        assert plan == self.name
        if self.name == "embed":
            return PlannedStep(EmbedInput(step_id, epoch, 1, 1, 1, ()), NONE, f"embed-{step_id}", [], False)
        header = StepInput(step_id, epoch, 1, 1, 1, 1, self.passes, 1, 1, 0, -1, ())
        return PlannedStep(header, NONE, f"{self.name}-{step_id}", [], True)

    def apply(self, sent: object, header: Any, payload: Any) -> list[tuple[Any, str]]:
        self.applied.append((sent, header.step_id))
        return [(sent, "stop")]


def pipeline(*planners: FakePlanner, depth: int = 2, epoch: int = 0) -> Pipeline:
    return Pipeline(0, lambda: {planner.name: planner for planner in planners}, depth, epoch)


def names(pipe: Pipeline) -> list[str]:
    sent = []
    while (step := pipe.next_step()) is not None:
        sent.append(str(step.sent))
    return sent


def result(step_id: int, *, micro_step: int = 0, is_last: bool = True, epoch: int = 0) -> StepResult:
    return StepResult(0, epoch, step_id, micro_step, is_last, 0, 0, ())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_window_holds_as_many_steps_as_its_depth(depth: int) -> None:
    pipe = pipeline(FakePlanner("generate", 10), depth=depth)
    assert names(pipe) == [f"generate-{i}" for i in range(depth)]
    pipe.apply(result(0), NONE)
    assert names(pipe) == [f"generate-{depth}"]
    assert pipe.num_in_flight == depth
    assert pipe.num_steps == depth + 1


def test_window_shrinks_to_one_while_a_prompt_waits_and_opens_again() -> None:
    planner = FakePlanner("generate", 10)
    pipe = pipeline(planner, depth=3)
    planner.wants_late_plan = True
    assert len(names(pipe)) == 1
    planner.wants_late_plan = False
    assert len(names(pipe)) == 2
    planner.wants_late_plan = True
    for step_id in range(2):
        pipe.apply(result(step_id), NONE)
        assert names(pipe) == []
    pipe.apply(result(2), NONE)
    assert len(names(pipe)) == 1


def test_step_with_several_results_leaves_the_window_with_the_last() -> None:
    planner = FakePlanner("generate", 2, passes=3)
    pipe = pipeline(planner, depth=1)
    names(pipe)
    for micro_step in range(3):
        assert pipe.num_in_flight == 1
        pipe.apply(result(0, micro_step=micro_step, is_last=micro_step == 2), NONE)
    assert pipe.num_in_flight == 0
    assert planner.applied == [("generate-0", 0)] * 3


def test_workflows_take_turns_and_results_go_to_who_planned_the_step() -> None:
    generate, embed = FakePlanner("generate", 3), FakePlanner("embed", 3)
    pipe = pipeline(generate, embed, depth=6)
    assert names(pipe) == ["generate-0", "embed-1", "generate-2", "embed-3", "generate-4", "embed-5"]
    for step_id in range(6):
        is_embed = step_id % 2
        pipe.apply(EmbedResult(0, 0, step_id, 0, 0, ()) if is_embed else result(step_id), NONE)
    assert [sent for sent, _ in embed.applied] == ["embed-1", "embed-3", "embed-5"]
    assert [sent for sent, _ in generate.applied] == ["generate-0", "generate-2", "generate-4"]
    assert pipe.num_in_flight == 0


@pytest.mark.parametrize("idle", ["generate", "embed"])
def test_workflow_with_nothing_to_do_does_not_hold_up_the_other(idle: str) -> None:
    generate = FakePlanner("generate", 0 if idle == "generate" else 4)
    embed = FakePlanner("embed", 0 if idle == "embed" else 4)
    pipe = pipeline(generate, embed, depth=2)
    assert len(names(pipe)) == 2
    pipe.apply(result(0) if idle == "embed" else EmbedResult(0, 0, 0, 0, 0, ()), NONE)
    assert len(names(pipe)) == 1
    assert pipe.num_unfinished == 1


def test_both_workflows_go_on_while_prompts_keep_coming() -> None:
    generate, embed = FakePlanner("generate", 5), FakePlanner("embed", 5)
    generate.wants_late_plan = True
    pipe = pipeline(generate, embed, depth=2)
    under_way: deque[str] = deque()
    order: list[str] = []
    for step_id in range(10):
        new = names(pipe)
        under_way.extend(new)
        order += new
        is_embed = under_way.popleft().startswith("embed")
        pipe.apply(EmbedResult(0, 0, step_id, 0, 0, ()) if is_embed else result(step_id), NONE)
    assert sum(name.startswith("generate") for name in order) == 5
    assert sum(name.startswith("embed") for name in order) == 5


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_workflows_get_the_same_time_whatever_their_steps_take(depth: int) -> None:
    """Embedding steps of 200 ms beside generating ones of 20, both always with work."""
    took_ns = {"generate": 20_000_000, "embed": 200_000_000}
    pipe = pipeline(FakePlanner("generate", 10_000), FakePlanner("embed", 10_000), depth=depth)
    under_way: deque[str] = deque()
    used_ns = dict.fromkeys(took_ns, 0)
    for step_id in range(500):
        under_way.extend(names(pipe))
        name = under_way.popleft().split("-")[0]
        used_ns[name] += took_ns[name]
        step = (0, 0, step_id)
        if name == "embed":
            pipe.apply(EmbedResult(*step, 0, took_ns[name], ()), NONE)
        else:
            pipe.apply(StepResult(*step, 0, True, 0, took_ns[name], ()), NONE)
    assert abs(used_ns["embed"] - used_ns["generate"]) <= (depth + 1) * sum(took_ns.values())
    assert min(used_ns.values()) > 4_000_000_000


def test_a_workflow_that_comes_late_gets_its_share_and_no_more() -> None:
    """Steps of 20 ms have had the device for 2 s when those of 200 ms come."""
    took_ns = {"generate": 20_000_000, "embed": 200_000_000}
    steps = {"generate": 10_000, "embed": 0}
    pipe = Pipeline(0, lambda: PlannersOnDemand(lambda name: FakePlanner(name, steps[name])), 1)
    used_ns = dict.fromkeys(took_ns, 0)
    pipe.planners["generate"]
    for step_id in range(300):
        if step_id == 100:
            used_ns["generate"] = 0
            pipe.planners["embed"].num_steps = 10_000  # type: ignore[attr-defined]
        (sent,) = names(pipe)
        name = sent.split("-")[0]
        used_ns[name] += took_ns[name]
        header = (0, 0, step_id)
        if name == "embed":
            pipe.apply(EmbedResult(*header, 0, took_ns[name], ()), NONE)
        else:
            pipe.apply(StepResult(*header, 0, True, 0, took_ns[name], ()), NONE)
    assert abs(used_ns["embed"] - used_ns["generate"]) <= 2 * sum(took_ns.values())


def test_result_of_another_epoch_is_dropped() -> None:
    planner = FakePlanner("generate", 1)
    pipe = pipeline(planner, epoch=1)
    names(pipe)
    assert pipe.apply(result(0, epoch=0), NONE) == ((), 0)
    assert pipe.num_in_flight == 1
    ended: list[tuple[Any, str]] = list(pipe.apply(result(0, epoch=1), NONE).ended)
    assert ended == [("generate-0", "stop")]


def test_result_out_of_order_is_our_own_bug_and_asserts() -> None:
    pipe = pipeline(FakePlanner("generate", 3))
    names(pipe)
    with pytest.raises(AssertionError, match="result of step 1, expected 0"):
        pipe.apply(result(1), NONE)


def test_a_planner_is_made_when_its_workflow_has_a_request() -> None:
    made = []

    def make(name: str) -> FakePlanner:
        made.append(FakePlanner(name, 0))
        return made[-1]

    pipe = Pipeline(0, lambda: PlannersOnDemand(make), 2)
    assert (pipe.next_step(), pipe.gauges, made) == (None, Gauges(0, 0, 0), [])
    pipe.planners["embed"].num_steps = 1  # type: ignore[attr-defined]
    assert names(pipe) == ["embed-0"]
    pipe.planners["generate"].num_steps = 1  # type: ignore[attr-defined]
    assert names(pipe) == ["generate-1"]
    assert len(made) == 2
    pipe.lose_worker(0)
    assert set(pipe.planners) == {"embed", "generate"}
    assert len(made) == 4


# --- the pause after an end

MS = 10**6


class DecodingPlanner(FakePlanner):
    """Rows that decode for ever; `ends` says how many of them end with the next result. `num_waiting` as it is told."""

    def __init__(self, num_rows: int = 8, passes: int = 1) -> None:
        super().__init__("generate", 1000, passes)
        self.num_rows = num_rows
        self.num_waiting = 0
        self.ends = 0

    @property
    def gauges(self) -> Gauges:
        return Gauges(self.num_waiting, self.num_rows, 3)

    def build(self, plan: str, step_id: int, epoch: int) -> PlannedStep:
        rows = self.num_rows
        header = StepInput(step_id, epoch, rows, rows, rows, rows, self.passes, 1, 1, 0, -1, ())
        return PlannedStep(header, NONE, f"generate-{step_id}", [], is_steady=True)

    def apply(self, sent: object, header: Any, payload: Any) -> list[tuple[Any, str]]:
        return [(sent, "stop")] * self.ends


def send(pipe: Pipeline) -> int:
    count = 0
    while (plan := pipe.next_plan(may_pause=True)) is not None:
        pipe.build(plan)
        count += 1
    return count


def busy(step_id: int, ms: float, *, micro_step: int = 0, is_last: bool = True) -> StepResult:
    return StepResult(0, 0, step_id, micro_step, is_last, 0, int(ms * MS), ())


def after_an_end(planner: DecodingPlanner, *, depth: int = 2, ms: float = 20) -> Pipeline:
    """A pipeline whose newest result, of step 1, ended a request. Its steps take so long."""
    pipe = pipeline(planner, depth=depth)
    assert send(pipe) == depth
    pipe.apply(busy(0, ms), NONE)
    assert (pipe.pause_ns, send(pipe)) == (0, 1)
    planner.ends = 1
    pipe.apply(busy(1, ms), NONE)
    planner.ends = 0
    return pipe


def test_the_step_after_an_end_is_planned_when_half_of_the_running_one_has_gone_by() -> None:
    pipe = after_an_end(DecodingPlanner())
    assert pipe.pause_ns == 10 * MS
    assert (send(pipe), send(pipe)) == (0, 0)
    pipe.end_pause()
    assert send(pipe) == 1
    pipe.apply(busy(2, 20), NONE)
    assert (pipe.pause_ns, send(pipe)) == (0, 1), "one pause for an end"


def test_a_request_that_comes_ends_the_pause() -> None:
    planner = DecodingPlanner()
    pipe = after_an_end(planner)
    assert send(pipe) == 0
    planner.num_waiting = 1
    planner.wants_late_plan = True  # its step has room for others
    assert (send(pipe), pipe.pause_ns) == (0, 0)
    planner.wants_late_plan = False
    assert send(pipe) == 1


def test_the_running_steps_result_ends_the_pause() -> None:
    planner = DecodingPlanner()
    pipe = after_an_end(planner)
    assert send(pipe) == 0
    planner.ends = 1
    pipe.apply(busy(2, 20), NONE)
    assert pipe.pause_ns == 0, "nothing runs beside it"
    assert send(pipe) == 2


def test_nobody_pauses_who_has_no_timer() -> None:
    pipe = after_an_end(DecodingPlanner())
    assert pipe.next_plan() is not None
    assert pipe.pause_ns == 0


def test_there_is_no_pause_while_others_wait() -> None:
    planner = DecodingPlanner()
    pipe = pipeline(planner)
    planner.num_waiting = planner.ends = 1
    send(pipe)
    for step_id in range(5):
        pipe.apply(busy(step_id, 20), NONE)
        assert send(pipe) == 1


@pytest.mark.parametrize("depth", [1, 3])
def test_there_is_no_pause_with_other_than_one_step_in_flight(depth: int) -> None:
    planner = DecodingPlanner()
    pipe = pipeline(planner, depth=depth)
    planner.ends = 1
    send(pipe)
    for step_id in range(5):
        pipe.apply(busy(step_id, 20), NONE)
        assert (pipe.pause_ns, send(pipe)) == (0, 1)


@pytest.mark.parametrize(("ms", "pause_ms"), [(0.1, 0), (3.9, 0), (4, 2), (50, 25)])
def test_short_steps_are_planned_at_once(ms: float, pause_ms: float) -> None:
    assert after_an_end(DecodingPlanner(), ms=ms).pause_ns == pause_ms * MS


@pytest.mark.parametrize(("num_rows", "pause_ms"), [(1, 2.5), (4, 10), (8, 20), (16, 20)])
def test_a_running_step_with_less_to_do_takes_less(num_rows: int, pause_ms: float) -> None:
    """One with more may take longer, but how much is not known."""
    planner = DecodingPlanner()
    pipe = pipeline(planner)
    send(pipe)
    planner.num_rows = num_rows
    pipe.apply(busy(0, 40), NONE)
    send(pipe)
    planner.ends = 1
    pipe.apply(busy(1, 40), NONE)
    assert pipe.pause_ns == pause_ms * MS


def test_all_passes_of_a_step_count_and_only_its_last_result_begins_a_pause() -> None:
    planner = DecodingPlanner(passes=4)
    pipe = pipeline(planner)
    send(pipe)
    planner.ends = 1
    for micro_step in range(4):
        assert pipe.pause_ns == 0
        pipe.apply(busy(0, 5, micro_step=micro_step, is_last=micro_step == 3), NONE)
    assert pipe.pause_ns == 10 * MS
    planner.ends = 0
    pipe.apply(busy(1, 5, is_last=False), NONE)
    assert (pipe.pause_ns, send(pipe)) == (0, 1), "it is about to end"


def test_a_step_of_another_workflow_is_not_paused_beside() -> None:
    generate, embed = DecodingPlanner(), FakePlanner("embed", 1)
    pipe = pipeline(generate, embed)
    assert send(pipe) == 2
    generate.ends = 1
    pipe.apply(busy(0, 20), NONE)
    assert (pipe.pause_ns, send(pipe)) == (0, 1), "nothing is known of how long it takes"


def test_the_pause_is_over_when_the_worker_is_gone_or_to_go() -> None:
    pipe = after_an_end(DecodingPlanner())
    pipe.lose_worker(0)
    assert pipe.pause_ns == 0
    pipe = after_an_end(DecodingPlanner())
    pipe.is_up = False
    assert (send(pipe), pipe.pause_ns) == (0, 0)
