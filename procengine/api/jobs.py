"""`StreamJob` and `WholeJob`: the requests to the group that one HTTP request becomes, until it is answered.

Owns: submitting them, and aborting all of them when one fails or the peer is gone. Never does: know a shape: a renderer
turns what comes into bytes.
"""

from __future__ import annotations

import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from procengine.api.errors import ApiError, api_error, error_response
from procengine.api.exchange import EVENT_STREAM, Exchange, Response
from procengine.api.group_link import GroupLink, Work
from procengine.client_bodies import Body
from procengine.messages import Delta, Embedding

__all__ = ["Job", "StreamJob", "StreamRenderer", "WholeJob", "log_failure"]


class StreamRenderer(Protocol):
    """Turns deltas into events. Every method returns whole events, or nothing."""

    is_anthropic: bool

    def take(self, prompt: int, deltas: Sequence[Delta]) -> bytes:
        """What came for a prompt of the request."""
        ...

    def finish(self) -> bytes:
        """The end, when all choices of all prompts have ended."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """The end, when something went wrong behind the first event."""
        ...


class Job(ABC):
    """What both kinds share: the works, and one answer."""

    is_collected = False  # whether nothing is shown before the end

    def __init__(self, link: GroupLink, exchange: Exchange, *, is_anthropic: bool = False) -> None:
        self._link = link
        self._exchange = exchange
        self._is_anthropic = is_anthropic
        self._works: list[Work] = []
        self._num_open = 0
        self._is_over = False

    def start(self, workflow: str, bodies: Sequence[Body], traceparent: str = "") -> None:
        """Submit all. An error is answered, and not raised."""
        self._exchange.on_gone = self._abandon
        self._num_open = len(bodies)
        try:
            for index, body in enumerate(bodies):
                self._works.append(self._submit(workflow, body, index, traceparent))
        except Exception as error:  # noqa: BLE001 - per request, at the rim
            self._fail(error)

    def _submit(self, workflow: str, body: Body, index: int, traceparent: str) -> Work:
        return self._link.submit(workflow, body, self._on_news, index, traceparent, is_collected=self.is_collected)

    def _on_news(self, work: Work) -> None:
        if self._is_over:
            return
        try:
            self._take(work)
        except Exception as error:  # noqa: BLE001 - per request, at the rim
            self._fail(error)

    @abstractmethod
    def _take(self, work: Work) -> None:
        """Something has come of this request."""

    def _has_ended(self, work: Work) -> bool:
        """Whether this was the last of all. Raises what ended it, if an error did."""
        if not work.request.is_done:
            return False
        work.request.raise_error()
        self._num_open -= 1
        return not self._num_open

    def _fail(self, failure: Exception) -> None:
        error = api_error(failure)
        log_failure(failure, error)
        self._abandon()
        if self._exchange.has_begun:
            self._break_off(error)
        else:
            self._exchange.send(error_response(error, is_anthropic=self._is_anthropic))

    @abstractmethod
    def _break_off(self, error: ApiError) -> None:
        """An error came behind the first byte."""

    def _abandon(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_over = True
        for work in self._works:
            self._link.abandon(work)


class StreamJob(Job):
    """An answer that goes out as it comes. Nothing is sent before the first news, so a refusal has its own status."""

    def __init__(self, link: GroupLink, exchange: Exchange, renderer: StreamRenderer) -> None:
        super().__init__(link, exchange, is_anthropic=renderer.is_anthropic)
        self._renderer = renderer
        exchange.on_room = self._catch_up

    def _take(self, work: Work) -> None:
        # A peer that reads slowly gets what waits for it in fewer, larger writes; what waits is small until then.
        if self._exchange.is_full and not work.request.is_done:
            return
        deltas = [delta for delta in work.request.take_deltas() if delta.finish_reason != "error"]
        data = self._renderer.take(work.index, deltas)
        if work.request.error is not None and self._exchange.has_begun:
            self._exchange.write(data)
        is_last = self._has_ended(work)
        if not self._exchange.has_begun:
            self._exchange.begin(EVENT_STREAM)
        if is_last:
            self._is_over = True
            self._exchange.end(data + self._renderer.finish())
        else:
            self._exchange.write(data)

    def _catch_up(self) -> None:
        for work in self._works:
            if work.request.items and not work.request.is_done:
                self._on_news(work)

    def _break_off(self, error: ApiError) -> None:
        self._exchange.end(self._renderer.fail(error))


class WholeJob(Job):
    """An answer that waits for the end. `render` gets the items of each prompt, in the order of the prompts."""

    is_collected = True

    def __init__(
        self,
        link: GroupLink,
        exchange: Exchange,
        render: Callable[[list[list[Delta | Embedding]]], Response],
        *,
        is_anthropic: bool = False,
    ) -> None:
        super().__init__(link, exchange, is_anthropic=is_anthropic)
        self._render = render

    def _take(self, work: Work) -> None:
        if self._has_ended(work):
            self._is_over = True
            self._exchange.send(self._render([list(one.request.items) for one in self._works]))  # type: ignore[arg-type]

    def _break_off(self, error: ApiError) -> None:
        raise AssertionError("the answer is sent whole")


def log_failure(failure: Exception, error: ApiError) -> None:
    """An error of ours goes to the log with its traceback; those of callers do not."""
    if error.code == "internal":
        traceback.print_exception(failure, file=sys.stderr)
