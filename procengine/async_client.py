"""`AsyncClient`: talks to a running group from an asyncio loop.

Owns: the sockets on the loop and the liveness timer. Never does: know the protocol (`ClientCore`) or block the loop.
A client belongs to the loop it was connected on; any number of tasks may use it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import zmq

from procengine import ipc
from procengine.async_client_verbs import AsyncPrefillVerbs
from procengine.client_bodies import (
    Body,
    Messages,
    Prompt,
    final_body,
    generate_body,
    messages_body,
    one_prompt_body,
    prompt_body,
    prompt_text,
)
from procengine.client_core import ClientCore, OnEnd, OnItem, Pending, dead_group_error
from procengine.client_link import CUT_OFF_S, new_call_seed, new_identity
from procengine.curve_keys import ClientKeys, client_keys
from procengine.errors import EngineDeadError, ProcengineError
from procengine.groups import GroupInfo, find_group, is_gone
from procengine.listen import reachable_from
from procengine.messages import Attached, Stats, Welcome
from procengine.outputs import (
    RequestOutput,
    StreamDelta,
    collect_deltas,
    stream_delta,
)
from procengine.refusal import raise_if_refused
from procengine.sampling_params import SamplingParams
from procengine.tool_calls.offer import ToolChoice, ToolOffer, Tools, make_offer
from procengine.tool_calls.reading import CallStream, read_calls

__all__ = ["AsyncClient"]

_LIVENESS_S = 0.5
_CONNECT_TIMEOUT_S = 30.0


class AsyncClient(AsyncPrefillVerbs):
    """A connection to one group. Use it with `async with`, or call `connect` and `close`.

    Args:
        endpoint_or_group_name: `ipc://...`, `tcp://HOST:PORT` or a group's name; None is the only running group.
        curve_keys, server_key, resubmit_lost: those of `Client`.
    """

    def __init__(
        self,
        endpoint_or_group_name: str | None = None,
        *,
        curve_keys: str | os.PathLike[str] | ClientKeys | None = None,
        server_key: str | None = None,
        resubmit_lost: bool = True,
    ) -> None:
        self._wanted = endpoint_or_group_name
        self._keys = client_keys(curve_keys, server_key)
        self._resubmits = resubmit_lost
        self._connection: _Connection | None = None

    async def connect(self) -> Welcome:
        """Connect and shake hands. Returns what the group says about itself: model, limits, workflows.

        Raises:
            GroupNotFoundError: no such group, or several and none was named.
            EngineDeadError: the group does not answer.
            AccessDeniedError: it does not know this client's key, or has another one than it should.
        """
        if self._connection is None:
            connection = _Connection(find_group(self._wanted), self._keys, resubmits=self._resubmits)
            self._connection = connection
            try:
                await asyncio.wait_for(connection.shake_hands(), _CONNECT_TIMEOUT_S)
            except TimeoutError as error:
                name = connection.group.name
                raise EngineDeadError(f"group {name!r} does not answer within {_CONNECT_TIMEOUT_S:g} s") from error
            finally:
                if connection.welcome is None:
                    await self.close()
        return self._connected.require_welcome()

    @property
    def welcome(self) -> Welcome:
        """What the group said about itself."""
        return self._connected.require_welcome()

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        lora_name: str = "",
        echo: bool = False,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> RequestOutput:
        """Complete a text or a list of token ids. Cancelling the task aborts the request.

        With `echo` the text begins with the prompt's. What is not done after `timeout_s` seconds ends with
        `finish_reason` "abort", an `error` that says so, and what it has by then. `traceparent` (W3C Trace Context)
        names the span of the caller that the group's own belong to, where it exports them.

        Raises:
            InvalidRequestError, OverloadedError, ShuttingDownError, EngineDeadError, RequestFailedError.
        """
        body = generate_body(
            prompt_body(prompt), params, priority, cache_salt, echo=echo, lora_name=lora_name, timeout_s=timeout_s
        )
        return await self._generate(body, request_id, traceparent)

    async def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        lora_name: str = "",
        timeout_s: float | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        traceparent: str = "",
    ) -> RequestOutput:
        """Answer a conversation: `[{"role": "user", "content": "..."}]`.

        `tools` and `tool_choice` are those of `Client.chat`. Otherwise as `generate`.
        """
        offer = self._offer(tools, tool_choice)
        body = generate_body(
            messages_body(messages, offer.tools),
            offer.params(params),
            priority,
            cache_salt,
            lora_name=lora_name,
            timeout_s=timeout_s,
        )
        with offer.naming_tools():
            output = await self._generate(body, request_id, traceparent)
        return read_calls(output, offer.style, new_call_seed())

    async def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        lora_name: str = "",
        echo: bool = False,
        timeout_s: float | None = None,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        traceparent: str = "",
    ) -> AsyncIterator[StreamDelta]:
        """The answer to a prompt or to `messages` as it comes. Closing the iterator, or cancelling, aborts it.

        Deltas of several choices come interleaved, told apart by `index`; `params.output_kind` says what each holds.
        `tools` and `tool_choice` are those of `Client.stream`.
        """
        offer = self._offer(tools, tool_choice)
        params, calls = offer.stream_params(params, echo=echo), CallStream(offer.style, new_call_seed())
        body = generate_body(
            one_prompt_body(prompt, messages, offer.tools),
            params,
            priority,
            cache_salt,
            echo=echo,
            lora_name=lora_name,
            timeout_s=timeout_s,
        )
        connection, news = self._connected, asyncio.Event()
        pending = connection.submit("generate", body, request_id, traceparent, lambda _: news.set(), news.set)
        try:
            while True:
                await news.wait()
                news.clear()
                is_last = pending.is_done
                for delta in pending.take_deltas():
                    if delta.finish_reason != "error":
                        yield calls.read(stream_delta(delta, pending.delivered_ns, pending.arrived_ns))
                if is_last:
                    with offer.naming_tools():
                        pending.raise_error()
                    return
        finally:
            connection.abandon(pending)

    async def abort(self, request_id: str) -> None:
        """Stop a running request: it ends with `finish_reason` "abort" and what it has by then."""
        self._connected.abort(request_id)

    async def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """The group's counters and percentiles since the last reset."""
        return (await self._connected.ask_stats(reset=reset)).values

    async def close(self) -> None:
        """Close the connection. Requests still running are aborted, and end with an error here."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _connected(self) -> _Connection:
        if self._connection is None:
            raise ProcengineError("the client is not connected: use `async with AsyncClient(...)`, or call `connect`")
        return self._connection

    def _offer(self, tools: Tools | None, tool_choice: ToolChoice | None) -> ToolOffer:
        return make_offer(tools, tool_choice, self.welcome.tool_call_parser)

    async def _generate(self, body: Body, request_id: str | None, traceparent: str) -> RequestOutput:
        pending = await self._run("generate", final_body(body), request_id, traceparent)
        return collect_deltas(
            pending.request_id, prompt_text(body), pending.take_deltas(), pending.delivered_ns, pending.arrived_ns
        )

    async def _run(self, workflow: str, body: Body, request_id: str | None, traceparent: str = "") -> Pending:
        connection, ended = self._connected, asyncio.Event()
        pending = connection.submit(workflow, body, request_id, traceparent, lambda _: ended.set(), is_collected=True)
        try:
            await ended.wait()
        finally:
            connection.abandon(pending)
        pending.raise_error()
        return pending


_AnswerT = TypeVar("_AnswerT", Welcome, Attached, Stats)


class _Connection:
    """Sockets, readers and the liveness timer of a connected client. Everything runs on one loop."""

    def __init__(self, group: GroupInfo, keys: ClientKeys | None = None, *, resubmits: bool = True) -> None:
        self.group = group
        self._keys = keys
        self._is_refused = False
        self._lost_at_s: float | None = None  # the connection was lost then, and no frontend has said anything since
        self.welcome: Welcome | None = None
        self._core = ClientCore(resubmits=resubmits)
        self._identity = new_identity()
        self._loop = asyncio.get_running_loop()
        self._context = ipc.make_context()
        self._links: list[tuple[zmq.Socket[bytes], ipc.SocketReader]] = []
        self._readers: list[ipc.SocketReader] = []
        self._liveness: asyncio.TimerHandle | None = None

    async def shake_hands(self) -> None:
        """Introduce ourselves to the frontend, then to the output process."""
        link = self._link(self.group.endpoint, self._on_frontend_frames)
        disconnects = ipc.disconnects_of(link[0])
        self._readers.append(ipc.SocketReader(self._loop, disconnects, self._on_disconnect))
        welcome = await self._greet(link)
        output_endpoint = reachable_from(self.group.endpoint, welcome.output_endpoint)
        await self._attach(self._link(output_endpoint, self._on_frames))
        self.welcome = welcome

    def require_welcome(self) -> Welcome:
        """What the group said; an error while hands are being shaken."""
        if self.welcome is None:
            raise ProcengineError("the client is still connecting")
        return self.welcome

    def submit(
        self,
        workflow: str,
        body: Body,
        request_id: str | None,
        traceparent: str,
        on_end: OnEnd,
        on_item: OnItem | None = None,
        *,
        is_collected: bool = False,
    ) -> Pending:
        """Start a request."""
        sent_ns = time.monotonic_ns()
        pending, frame = self._core.submit(
            workflow, body, request_id, on_end, on_item, sent_ns, traceparent, is_collected=is_collected
        )
        self._send(frame)
        return pending

    def abort(self, request_id: str) -> None:
        """Ask for the end of a request."""
        self._send(self._core.abort(request_id))

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for this any more."""
        self._send(self._core.abandon(pending))

    def ask_stats(self, *, reset: bool) -> Awaitable[Stats]:
        """The counters."""
        return self._ask(Stats, lambda on_end: self._core.get_stats(reset=reset, on_end=on_end), self._links[0])

    def close(self) -> None:
        """Abort what runs, then close everything."""
        for request_id in self._core.running_ids():
            self.abort(request_id)
        self._core.die(ProcengineError("the client is closed"))
        if self._liveness is not None:
            self._liveness.cancel()
        for reader in self._readers:
            reader.close()
        # Aborts are in the kernel's hands within microseconds, unless nobody is there to take them.
        self._context.destroy(linger=0 if is_gone(self.group) else None)

    def _link(
        self, endpoint: str, on_frames: Callable[[list[bytes]], None]
    ) -> tuple[zmq.Socket[bytes], ipc.SocketReader]:
        socket = ipc.connect(self._context, zmq.DEALER, endpoint, identity=self._identity, keys=self._keys)
        reader = ipc.SocketReader(self._loop, socket, on_frames)
        self._readers.append(reader)
        self._links.append((socket, reader))
        return self._links[-1]

    def _on_frontend_frames(self, frames: list[bytes]) -> None:
        self._lost_at_s = None  # what outputs still come says nothing of it
        self._on_frames(frames)

    def _on_frames(self, frames: list[bytes]) -> None:
        self._core.receive(frames[0], time.monotonic_ns())
        for frame in self._core.take_frames():
            self._send(frame)

    def _on_disconnect(self, _: list[bytes]) -> None:
        self._lost_at_s = time.monotonic()
        self._send(self._core.hello_again())

    async def _greet(self, link: tuple[zmq.Socket[bytes], ipc.SocketReader]) -> Welcome:
        """If no answer comes, find out whether we are not let in."""
        answer = asyncio.ensure_future(self._ask(Welcome, self._core.hello, link))
        try:
            while not (await asyncio.wait((answer,), timeout=_LIVENESS_S))[0]:
                await asyncio.to_thread(raise_if_refused, self.group.endpoint, self._keys)
            return await answer
        finally:
            answer.cancel()

    async def _attach(self, link: tuple[zmq.Socket[bytes], ipc.SocketReader]) -> None:
        """Until an output process answers: one that was asked may have died meanwhile."""
        answer = asyncio.ensure_future(self._ask(Attached, self._core.attach, link))
        try:
            while not (await asyncio.wait((answer,), timeout=_LIVENESS_S))[0]:
                self._send(self._core.attach_again(), link)
            await answer
        finally:
            answer.cancel()

    async def _ask(
        self,
        kind: type[_AnswerT],
        question: Callable[[OnEnd], tuple[Pending, bytes]],
        link: tuple[zmq.Socket[bytes], ipc.SocketReader],
    ) -> _AnswerT:
        ended = asyncio.Event()
        pending, frame = question(lambda _: ended.set())
        self._send(frame, link)
        await ended.wait()
        return pending.answer(kind)

    def _send(self, frame: bytes | None, link: tuple[zmq.Socket[bytes], ipc.SocketReader] | None = None) -> None:
        if frame is None:
            return
        socket, reader = link or self._links[0]
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # ZeroMQ has given up, because it was not let in: nobody will read
            self._is_refused = True
        reader.poke()  # a send may swallow the wake-up for a message that came meanwhile
        self._watch()

    def _watch(self) -> None:
        """Look at the group's liveness now and then, as long as anything is awaited."""
        if self._liveness is None:
            self._liveness = self._loop.call_later(_LIVENESS_S, self._check_liveness)

    def _check_liveness(self) -> None:
        self._liveness = None
        if not self._core.has_pending:
            return
        is_silent = self._lost_at_s is not None and time.monotonic() - self._lost_at_s > CUT_OFF_S
        if is_gone(self.group) or self._is_refused or is_silent:
            self._core.die(dead_group_error(self.group.name))
        else:
            self._watch()
