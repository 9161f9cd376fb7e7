"""`RequestDeadlines`: how long a request may take, and how long it may wait for its first step.

Wiring only: it brings the clock, the engine and the requests' own wishes together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from procengine.config import LimitsConfig
from procengine.engine import Engine
from procengine.errors import OverloadedError
from procengine.messages import Finish
from procengine.procs.deadline_timer import DeadlineTimer
from procengine.submission import Submission

__all__ = ["RequestDeadlines"]


@dataclass(frozen=True, slots=True)
class _Deadline:
    submission: Submission
    seconds: float
    is_of_queue: bool


class RequestDeadlines:
    """Requests are aborted or refused as their time comes; without deadlines, nothing here costs anything.

    Args:
        is_preparing: whether a submission is still being tokenized.
        refuse: tells a client that its request will not run.
        finish: passes the end of a request on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: LimitsConfig,
        is_preparing: Callable[[Submission], bool],
        refuse: Callable[[Submission, OverloadedError], None],
        finish: Callable[[Finish], None],
    ) -> None:
        self._limits = limits
        self._is_preparing = is_preparing
        self._refuse = refuse
        self._finish = finish
        self._engine: Engine | None = None
        self._timer: DeadlineTimer[_Deadline] = DeadlineTimer(loop, self._is_over, self._on_due)

    def open(self, engine: Engine) -> None:
        """From here on there are requests."""
        self._engine = engine

    def watch(self, submission: Submission) -> None:
        """A request has come."""
        timeout_s, queue_timeout_s = submission.body.timeout_s, self._limits.queue_timeout_s
        if timeout_s is None:
            timeout_s = self._limits.request_timeout_s
        if timeout_s is not None:
            self._add(_Deadline(submission, timeout_s, is_of_queue=False))
        if queue_timeout_s is not None:
            self._add(_Deadline(submission, queue_timeout_s, is_of_queue=True))

    def settle(self) -> None:
        """Some may have ended or begun: do not wake up for them."""
        self._timer.settle()

    def _add(self, deadline: _Deadline) -> None:
        self._timer.add(deadline.submission.received_ns + int(deadline.seconds * 1e9), deadline)

    def _is_over(self, deadline: _Deadline) -> bool:
        keys, engine = deadline.submission.keys, self._engine
        if not keys or engine is None:
            return not self._is_preparing(deadline.submission)
        if deadline.is_of_queue:  # it has begun when one of its choices has
            return not all(map(engine.is_waiting, keys))
        return not any(map(engine.is_unfinished, keys))

    def _on_due(self, deadline: _Deadline) -> None:
        submission, engine = deadline.submission, self._engine
        assert engine is not None
        field = "queue_timeout" if deadline.is_of_queue else "timeout_s"
        limit = f"the limit ({field}) is {deadline.seconds:g} s"
        if deadline.is_of_queue or not submission.keys:
            for key in submission.keys:
                if (finish := engine.end(key, "abort", is_told=True)) is not None:
                    self._finish(finish)
            self._refuse(submission, OverloadedError(f"the request had no first step in time, {limit}"))
            return
        for key in submission.keys:
            if (finish := engine.end(key, "abort", f"the request took too long, {limit}")) is not None:
                self._finish(finish)
