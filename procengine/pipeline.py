"""`Pipeline`: one worker as the frontend sees it: what is in flight and what goes next.

Owns: step ids, the in-flight window and its depth. Never does: send, receive, read a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from procengine.device_turns import DeviceTurns
from procengine.messages import EmbedInput, EmbedResult, StepInput, StepResult
from procengine.scheduler.counters import SchedulerCounters

__all__ = [
    "AnyRequest",
    "Applied",
    "Gauges",
    "MakePlanners",
    "NextPlan",
    "Pipeline",
    "PlannedStep",
    "Planner",
    "PlannersOnDemand",
]


_LEAST_PAUSE_NS = 2 * 10**6  # about what a client takes to send its next request


class AnyRequest(Protocol):
    """What every workflow's request has."""

    key: int
    client: bytes
    request_id: str
    token_ids: NDArray[np.int32]  # prompt and confirmed output; stale while it has a slot
    is_finished: bool
    num_cached_tokens: int | None
    num_preemptions: int
    num_worker_deaths: int


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step ready to send. `sent` is whatever its planner needs to take in the results."""

    header: StepInput | EmbedInput
    payload: NDArray[np.int32]
    sent: object
    admitted: Sequence[AnyRequest]
    is_steady: bool  # decode rows alone


class Gauges(NamedTuple):
    """How full a planner is: requests waiting and running, KV blocks that are free (cached ones included)."""

    num_waiting: int
    num_running: int
    num_free_blocks: int


class Applied(NamedTuple):
    """What a result brought.

    Attributes:
        ended: requests it ended, with their finish reasons.
        num_tokens: that requests got by it; those of ended ones do not count.
    """

    ended: Sequence[tuple[AnyRequest, str]]
    num_tokens: int


_NOTHING = Applied((), 0)


class Planner(Protocol):
    """The frontend's part of a workflow, for one worker. A step is made in two parts, so that each can be timed:
    `plan` decides what it computes, `build` encodes it."""

    @property
    def num_unfinished(self) -> int: ...
    @property
    def counters(self) -> SchedulerCounters: ...
    @property
    def gauges(self) -> Gauges: ...
    @property
    def wants_late_plan(self) -> bool: ...
    def add(self, request: Any) -> None: ...
    def finish(self, request: Any) -> None: ...
    def take_failed(self) -> list[tuple[Any, str]]: ...
    def take_all(self, *, has_died: bool = True) -> list[Any]: ...
    def plan(self) -> Any | None: ...
    def build(self, plan: Any, step_id: int, epoch: int) -> PlannedStep: ...
    def apply(self, sent: object, header: Any, payload: NDArray[np.int32]) -> list[tuple[Any, str]]: ...


@dataclass(frozen=True, slots=True)
class NextPlan:
    """What the next step computes; not encoded yet."""

    workflow: str
    planner: Planner
    plan: Any


@dataclass(slots=True)
class _InFlight:
    step_id: int
    workflow: str
    planner: Planner
    sent: object
    charged_ns: int  # of device time, until it is known
    num_tokens: int  # of all its passes
    is_steady: bool
    busy_ns: int = 0  # of its results so far


MakePlanners = Callable[[], dict[str, Planner]]  # of all workflows, or a dict that makes one when it is looked up


class PlannersOnDemand(dict[str, Planner]):
    """A planner for each workflow that has had a request."""

    def __init__(self, make: Callable[[str], Planner]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, workflow: str) -> Planner:
        self[workflow] = self._make(workflow)
        return self[workflow]


class Pipeline:
    """Keeps up to `async_depth` steps at a worker.

    Depth 1 is a plain synchronous engine: plan, wait, plan. At depth 2 the next step is at the worker before it is
    needed, so the device does not wait for a round trip. The depth falls to 1 while the next step would hold a prompt
    (`Planner.wants_late_plan`): the steps in flight keep the device busy, and a prompt that arrives meanwhile can still
    join, instead of waiting behind a step planned too early.

    For the same reason there is a pause after a result that ended a request, if nobody waits: its client may send the
    next one within a millisecond or two. The step behind the running one is planned when half of that has gone by, or
    a request comes. The pipeline has no clock: it says how long `pause_ns` is, and its owner calls `end_pause` then.

    Attributes:
        pause_ns: for so long from the newest result on, `next_plan` has none for who says that it `may_pause`.
    """

    def __init__(
        self, rank: int, make_planners: MakePlanners, async_depth: int, epoch: int = 0, first_step_id: int = 0
    ) -> None:
        self.rank = rank
        self.epoch = epoch  # of its worker
        self.is_up = True  # there is a worker of this epoch, and it gets steps
        self.num_steps = 0
        self.pause_ns = 0
        self._first_step_id = first_step_id
        self._make_planners = make_planners
        self._async_depth = async_depth
        self._in_flight: deque[_InFlight] = deque()
        self.planners = make_planners()
        self._turns = DeviceTurns()
        self._steady: _InFlight | None = None  # the newest of decode rows alone whose results are all back

    @property
    def num_in_flight(self) -> int:
        """Steps sent whose last result is not back."""
        return len(self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running, of all workflows."""
        return sum(planner.num_unfinished for planner in self.planners.values())

    @property
    def gauges(self) -> Gauges:
        """How full it is, all workflows together."""
        each = [planner.gauges for planner in self.planners.values()]
        return each[0] if len(each) == 1 else Gauges(*map(sum, zip((0, 0, 0), *each, strict=True)))

    def lose_worker(self, epoch: int, *, has_died: bool = True) -> list[tuple[str, AnyRequest]]:
        """The worker of this epoch is gone, and with it every step in flight and every block. Returns (workflow,
        request) of all that is unfinished, in order of service; new planners wait for the next worker.
        """
        self.epoch = epoch + 1
        return self.lose_slots(has_died=has_died)

    def lose_slots(self, *, has_died: bool = False) -> list[tuple[str, AnyRequest]]:
        """The same of a worker that goes on, with its slots and blocks forgotten; it gets no steps until `is_up`."""
        self.is_up = False
        self._in_flight.clear()
        self.end_pause()
        self._steady = None
        lost, self.planners = self.planners, self._make_planners()
        self._turns = DeviceTurns()
        for name, planner in lost.items():
            self.planners[name].counters.add(planner.counters)
        return [(name, request) for name, planner in lost.items() for request in planner.take_all(has_died=has_died)]

    def next_step(self) -> PlannedStep | None:
        """A step to send now; None if the window is full or nothing can run."""
        plan = self.next_plan()
        return None if plan is None else self.build(plan)

    def next_plan(self, *, may_pause: bool = False) -> NextPlan | None:
        """What the step to send now computes, for `build`; None if the window is full, or nothing can run, or there is
        a pause.
        """
        if self.pause_ns:
            if may_pause and self.is_up and not self.gauges.num_waiting:
                return None
            self.end_pause()
        for name in self._turns.order(self.planners) if self.is_up else ():
            planner = self.planners[name]
            if self.num_in_flight >= (1 if planner.wants_late_plan else self._async_depth):
                return None
            plan = planner.plan()
            if plan is not None:
                return NextPlan(name, planner, plan)
        return None

    def end_pause(self) -> None:
        """The next step may be planned."""
        self.pause_ns = 0

    def build(self, next_plan: NextPlan) -> PlannedStep:
        """The step of a plan, which is in flight from here on."""
        step_id = self._first_step_id + self.num_steps
        step = next_plan.planner.build(next_plan.plan, step_id, self.epoch)
        charged_ns = self._turns.serve(next_plan.workflow)
        num_tokens, is_steady = _num_tokens(step.header), step.is_steady
        self._in_flight.append(
            _InFlight(step_id, next_plan.workflow, next_plan.planner, step.sent, charged_ns, num_tokens, is_steady)
        )
        self.num_steps += 1
        return step

    def expects(self, header: StepResult | EmbedResult) -> bool:
        """Whether `apply` can take this in: a result of the oldest step in flight, of its kind, or one of a worker that
        is gone.
        """
        if header.epoch != self.epoch:
            return header.epoch < self.epoch
        if not self._in_flight:
            return False
        oldest = self._in_flight[0]
        return header.step_id == oldest.step_id and oldest.planner is self.planners.get(header.workflow)

    def apply(self, header: StepResult | EmbedResult, payload: NDArray[np.int32]) -> Applied:
        """Take in a result."""
        if header.epoch != self.epoch:
            return _NOTHING  # of a worker that is gone
        self.end_pause()
        oldest = self._in_flight[0]
        assert header.step_id == oldest.step_id, f"result of step {header.step_id}, expected {oldest.step_id}"
        oldest.busy_ns += header.busy_ns
        if header.is_last:
            self._in_flight.popleft()
            self._turns.settle(oldest.workflow, oldest.charged_ns, oldest.busy_ns)
            self._steady = oldest if oldest.is_steady else self._steady
        counters = oldest.planner.counters
        num_before = counters.output_tokens
        ended = oldest.planner.apply(oldest.sent, header, payload)
        if ended and header.is_last and self.num_in_flight == 1:
            self._pause_beside(self._in_flight[0])
        return Applied(ended, counters.output_tokens - num_before)

    def _pause_beside(self, running: _InFlight) -> None:
        """Pause for half of the time that the running step takes at least: what the newest steady one took, or less if
        it had more to do. So there is time enough to plan. Steps of a few milliseconds are not worth it.
        """
        steady = self._steady
        if steady is None or running.workflow != steady.workflow:
            return
        half_ns = steady.busy_ns * min(running.num_tokens, steady.num_tokens) // (2 * steady.num_tokens)
        self.pause_ns = half_ns if half_ns >= _LEAST_PAUSE_NS else 0


def _num_tokens(header: StepInput | EmbedInput) -> int:
    return header.num_tokens * header.decode_steps if isinstance(header, StepInput) else header.num_tokens
