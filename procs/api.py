"""An HTTP process: the group's front door, and a client of it like any other.

Wiring only. Several of them may accept on one socket, which is the supervisor's. One that dies takes its connections
along and is started again; the group aborts what it had asked for.
"""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import ssl
import sys
from pathlib import Path
from typing import Any, Final

import uvloop

from procengine import ipc
from procengine.api.all_routes import all_routes
from procengine.api.front_door import FrontDoor
from procengine.api.group_link import GroupLink
from procengine.api.group_status import GroupStatus
from procengine.api.http_server import HttpServer
from procengine.api.lora_link import LoraLink
from procengine.api.service import Service
from procengine.child import Child, run_child, run_loop
from procengine.errors import ConfigError, EngineDeadError
from procengine.messages import (
    Adapters,
    ChangeAdapter,
    ChildStats,
    Drain,
    FrontendLost,
    Leave,
    OutputLost,
    Query,
    RetireWorker,
    Shutdown,
    TakeRecord,
    Welcome,
    WorkerLost,
    decode_from_supervisor,
    encode,
)

__all__ = ["main"]

_NICENESS: Final = 10  # when cores are scarce, text may be late; the loop that feeds the device may not
_RESERVED_FDS: Final = 48  # for all that is no connection
_END_S: Final = 3.0  # for what is still to be said when the group has ended


class Api:
    """The sockets and what hangs between them. Everything runs on the loop's thread."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        self._child = child
        self._loop = loop
        self._link = GroupLink(loop, child.context, child.endpoint("frontend"), self._on_attached)
        status = GroupStatus(loop, child.context, child.endpoint("control"))
        lora = LoraLink(loop, child.context, child.endpoint("control")) if child.config.lora.is_on else None
        self._service = Service(child.config, self._link, status, lora)
        self._door = FrontDoor(self._service, all_routes())
        self._server = HttpServer(
            loop,
            self._door.answer,
            self._door.refusal,
            max_connections=_max_connections(),
            max_body_bytes=child.config.limits.max_request_bytes,
        )
        self._control = ipc.SocketReader(loop, child.control, self._on_control)

    async def open(self) -> None:
        """Accept connections; the group may still be starting."""
        assert self._child.listen_fd is not None
        await self._server.open(socket.socket(fileno=self._child.listen_fd), _tls(self._child))

    def _on_attached(self, _: Welcome) -> None:
        self._child.say_ready({})
        self._control.poke()  # a send may swallow the wake-up

    def _on_control(self, frames: list[bytes]) -> None:
        match decode_from_supervisor(frames[0]):
            case Query(query_id):
                state = "draining" if self._service.is_draining else "ready" if self._link.is_attached else "starting"
                self._child.control.send(encode(ChildStats(query_id, state, self._link.num_running)))
                self._control.poke()
            case Drain():
                self._service.is_draining = True
            case Shutdown(error):
                self._end(error)
            case Leave(timeout_s):
                self._stop(timeout_s)
            case Adapters(modules):
                self._service.adapters = dict(modules)
            case (
                WorkerLost() | RetireWorker() | OutputLost() | FrontendLost() | TakeRecord() | ChangeAdapter()
            ):  # these are the business of others
                pass

    def _end(self, error: str | None) -> None:
        """Answer what is left, and stop when that is sent."""
        self._service.is_draining = True
        self._service.error = error
        self._link.die(EngineDeadError(error or "the group was shut down"))
        self._stop(_END_S)

    def _stop(self, timeout_s: float) -> None:
        """Accept no more, and end when everybody has an answer, or then."""
        self._loop.call_later(timeout_s, self._loop.stop)
        self._server.close(self._loop.stop)


def main(child: Child) -> None:
    """Serve until the supervisor says stop or is gone."""
    os.nice(_NICENESS)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.add_reader(child.death_fd, lambda: os._exit(1))
    api = Api(child, loop)
    opening = loop.create_task(api.open())
    opening.add_done_callback(lambda done: done.result())
    run_loop(loop, is_tolerable=_is_of_a_connection)
    child.context.destroy(linger=1000)


def _max_connections() -> int:
    """As many as there may be descriptors, less what everything else needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(hard - len(list(Path("/proc/self/fd").iterdir())) - _RESERVED_FDS, 1)


def _tls(child: Child) -> ssl.SSLContext | None:
    api = child.config.api
    if api.ssl_certfile is None or api.ssl_keyfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(api.ssl_certfile, api.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ssl_certfile: {api.ssl_certfile} and its key cannot be used: {error}") from error
    return context


def _is_of_a_connection(context: dict[str, Any]) -> bool:
    """Whether what went wrong is one peer's: it is noted, and the others are served."""
    is_theirs = isinstance(context.get("exception"), OSError | ssl.SSLError)
    if is_theirs:
        sys.stderr.write(f"procengine: api: {context['message']}: {context['exception']}\n")
    return is_theirs


if __name__ == "__main__":
    run_child("api", main)
