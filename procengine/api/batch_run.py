"""Runs the requests of a batch file through the routes of the HTTP server, without HTTP.

Owns: how many are under way, trying again what the group had no room for, and writing each answer as it comes.
Never does: read files (`batch_file`), or launch a group.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from procengine import ipc
from procengine.api.all_routes import all_routes
from procengine.api.batch_file import BatchError, BatchLine, BatchResponse, BatchResult
from procengine.api.exchange import JSON, HttpRequest, Response
from procengine.api.front_door import FrontDoor
from procengine.api.group_link import GroupLink
from procengine.api.group_status import GroupStatus
from procengine.api.service import Service
from procengine.config import EngineConfig
from procengine.errors import EngineDeadError
from procengine.groups import GroupInfo, is_gone

__all__ = ["run_batch"]

_RETRY_S: Final = 0.5
_LIVENESS_S: Final = 1.0
_HEADERS: Final = {"content-type": JSON}


class _BatchExchange:
    """The way back of one line. An answer that comes in pieces has no place in a line."""

    is_full = False

    def __init__(self, answered: asyncio.Future[Response | None]) -> None:
        self.headers: list[tuple[str, str]] = []
        self.has_begun = False
        self.is_over = False
        self.on_gone: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self._answered = answered

    def send(self, response: Response) -> None:
        self._finish(response)

    def begin(self, content_type: str) -> None:
        self.has_begun = True

    def write(self, data: bytes) -> None:
        pass

    def end(self, data: bytes = b"") -> None:
        self._finish(None)

    def cut(self) -> None:
        self._finish(None)

    def _finish(self, response: Response | None) -> None:
        if not self.is_over:
            self.is_over = True
            self._answered.set_result(response)


class _Batch:
    """One run."""

    def __init__(self, door: FrontDoor, output: Any, on_answer: Callable[[bool], None]) -> None:
        self._door = door
        self._output = output
        self._on_answer = on_answer

    async def run(self, lines: Iterator[BatchLine], max_concurrency: int) -> None:
        """Answer all lines, so many at a time."""

        async def work() -> None:
            for line in lines:  # one iterator for all: each takes the next
                self._write(await self._answer(line))

        async with asyncio.TaskGroup() as group:
            for _ in range(max_concurrency):
                group.create_task(work())

    async def _answer(self, line: BatchLine) -> BatchResult:
        while True:
            answered: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
            exchange = _BatchExchange(answered)
            self._door.answer(HttpRequest("POST", line.url, headers=_HEADERS, body=bytes(line.body)), exchange)
            try:
                response = await answered
            except asyncio.CancelledError:
                if exchange.on_gone is not None:
                    exchange.on_gone()
                raise
            if response is None or response.status != 503:
                return _result(line, response, dict(exchange.headers).get("X-Request-Id", ""))
            if b'"engine_dead"' in response.body:
                raise EngineDeadError("the group has ended; the same command goes on with what is left")
            await asyncio.sleep(_RETRY_S)

    def _write(self, result: BatchResult) -> None:
        self._output.write(msgspec.json.encode(result) + b"\n")
        self._output.flush()
        self._on_answer(result.error is None)


def _result(line: BatchLine, response: Response | None, request_id: str) -> BatchResult:
    result_id = f"batch_req_{secrets.token_hex(12)}"
    if response is None:
        refusal = BatchError("invalid_request", "stream: must not be true in a batch")
        return BatchResult(result_id, line.custom_id, None, refusal)
    answer = BatchResponse(response.status, request_id, msgspec.Raw(response.body))
    error = None if response.status == 200 else BatchError("request_failed", f"answered with status {response.status}")
    return BatchResult(result_id, line.custom_id, answer, error)


def run_batch(
    config: EngineConfig,
    group: GroupInfo,
    lines: Iterator[BatchLine],
    output: Path,
    max_concurrency: int,
    on_answer: Callable[[bool], None],
) -> None:
    """Append the answers to `lines` to `output`, each when it is there. `on_answer` hears whether it is one.

    Raises:
        EngineDeadError: the group has ended.
    """

    async def main() -> None:
        loop, context = asyncio.get_running_loop(), ipc.make_context()
        attached = asyncio.Event()
        link = GroupLink(loop, context, group.endpoint, lambda _: attached.set())
        watching = loop.create_task(_watch(link, group))
        try:
            await attached.wait()
            service = Service(config, link, GroupStatus(loop, context, group.control))
            with output.open("ab") as file:
                await _Batch(FrontDoor(service, all_routes()), file, on_answer).run(lines, max_concurrency)
        finally:
            watching.cancel()
            link.close()
            context.destroy(linger=1000)

    try:
        uvloop.run(main())
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None


async def _watch(link: GroupLink, group: GroupInfo) -> None:
    """Look at the group's life now and then: nobody here is its child."""
    while True:
        await asyncio.sleep(_LIVENESS_S)
        if is_gone(group):
            link.die(EngineDeadError(f"group {group.name!r} is gone"))
            return
