"""`Client`: talks to a running group, and blocks. No asyncio, no thread of its own.

Owns: who waits on the sockets when several threads use one client. Never does: know the protocol (`ClientCore`) or the
sockets (`ClientLink`).

Threads: all methods may be called from several threads at once. The first that has to wait becomes the leader, takes
messages in for everybody and wakes the others; sending never waits for it. One iterator of `stream` belongs to one
thread, and `close` must come last.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, overload

from procengine.client_batch import Batch
from procengine.client_bodies import (
    Body,
    Messages,
    Prompt,
    Prompts,
    final_body,
    generate_body,
    messages_body,
    one_params_each,
    one_prompt_body,
    prompt_body,
    prompt_list,
    prompt_text,
)
from procengine.client_core import ClientCore, OnEnd, Pending, dead_group_error
from procengine.client_handshake import answer_losses, connect_link
from procengine.client_link import new_call_seed
from procengine.client_verbs import PrefillVerbs
from procengine.curve_keys import ClientKeys, client_keys
from procengine.errors import ProcengineError
from procengine.groups import find_group, is_gone
from procengine.messages import Stats, Welcome
from procengine.outputs import (
    RequestOutput,
    StreamDelta,
    collect_deltas,
    stream_delta,
)
from procengine.sampling_params import SamplingParams
from procengine.tool_calls.offer import ToolChoice, ToolOffer, Tools, make_offer
from procengine.tool_calls.reading import CallStream, read_calls

__all__ = ["Client"]

_LIVENESS_MS = 500


class Client(PrefillVerbs):
    """A connection to one group; many requests may be under way on it.

    Args:
        endpoint_or_group_name: `ipc://...`, `tcp://HOST:PORT` or a group's name; None is the only running group.
        curve_keys: this client's keys, for a tcp endpoint that demands some: `ClientKeys`, the path of its file, or
            the name that `procengine keys` was given.
        server_key: the group's public key, if it is not the one in that file.
        resubmit_lost: send requests again that were lost because the frontend died, if nothing of them was returned
            yet. Those whose caller has seen a part end with a `RequestLostError`, and so do all if this is False.

    Raises:
        GroupNotFoundError: no such group, or several and none was named.
        EngineDeadError: the group does not answer.
        ConfigError: the keys are not what they should be.
        AccessDeniedError: the group does not know this client's key, or has another one than it should.
    """

    def __init__(
        self,
        endpoint_or_group_name: str | None = None,
        *,
        curve_keys: str | os.PathLike[str] | ClientKeys | None = None,
        server_key: str | None = None,
        resubmit_lost: bool = True,
    ) -> None:
        self._group = find_group(endpoint_or_group_name)
        self._core = ClientCore(resubmits=resubmit_lost)
        self._link, self._welcome = connect_link(self._group, self._core, client_keys(curve_keys, server_key))
        self._order = threading.Lock()  # requests are sent in the order of their numbers
        self._condition = threading.Condition(threading.Lock())
        self._has_leader = False

    @property
    def welcome(self) -> Welcome:
        """What the group said about itself: model, context limit, size of the vocabulary, workflows."""
        return self._welcome

    @overload
    def generate(
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
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        lora_name: str = "",
        echo: bool = False,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompt: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        lora_name: str = "",
        echo: bool = False,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> RequestOutput | list[RequestOutput]:
        """Complete a text or a list of token ids; for a list of prompts, a list of results in the same order.

        With `echo` the texts begin with the prompt's. What is not done after `timeout_s` seconds is aborted: it ends
        with `finish_reason` "abort", an `error` that says so, and what it has by then. `traceparent` (W3C Trace
        Context) names the span of the caller that the group's own belong to, where it exports them.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; the other prompts of the list are aborted.
            OverloadedError, ShuttingDownError, EngineDeadError, RequestFailedError: as their names say.
        """
        prompts, is_list = prompt_list(prompt)
        bodies = [
            generate_body(
                prompt_body(one), of_one, priority, cache_salt, echo=echo, lora_name=lora_name, timeout_s=timeout_s
            )
            for one, of_one in zip(prompts, one_params_each(params, len(prompts)), strict=True)
        ]
        if is_list:
            return self.generate_bodies(bodies, traceparent=traceparent)
        return self.generate_bodies(bodies, [request_id], traceparent=traceparent)[0]

    def chat(
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

        The chat template shows `tools` (functions, as OpenAI's API describes them) to the model, and calls of them are
        in `tool_calls` of the result. `tool_choice` is "auto" (the default), "none" (they are not shown), "required"
        or `{"type": "function", "function": {"name": ...}}`; with the last two, the answer is nothing but calls.

        Raises as `generate` does.
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
            output = self.generate_bodies([body], [request_id], traceparent=traceparent)[0]
        return read_calls(output, offer.style, new_call_seed())

    def stream(
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
    ) -> Iterator[StreamDelta]:
        """The answer to a prompt or to `messages` as it comes. Closing the iterator aborts the request.

        Deltas of several choices come interleaved, told apart by `index`; `params.output_kind` says what each holds.
        `tools` and `tool_choice` are those of `chat`; additions to calls come in `tool_calls`, and the output kind is
        not "cumulative" then. The request is sent when the first delta is asked for. Raises as `generate` does.
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
        pending = self._submit("generate", body, request_id, traceparent=traceparent)
        try:
            while True:
                self._wait_until(lambda: bool(pending.items) or pending.is_done)
                is_last = pending.is_done  # before taking: what comes in between belongs to the next turn
                for delta in pending.take_deltas():
                    if delta.finish_reason != "error":
                        yield calls.read(stream_delta(delta, pending.delivered_ns, pending.arrived_ns))
                if is_last:
                    with offer.naming_tools():
                        pending.raise_error()
                    return
        finally:
            self._abandon(pending)

    def abort(self, request_id: str) -> None:
        """Stop a running request, from any thread: it ends with `finish_reason` "abort" and what it has by then."""
        self._send(self._core.abort(request_id))

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """The group's counters and percentiles since the last reset."""
        question, frame = self._core.get_stats(reset=reset)
        self._send(frame)
        self._wait_until(lambda: question.is_done)
        return question.answer(Stats).values

    def close(self) -> None:
        """Close the connection. Requests still running are aborted."""
        for request_id in self._core.running_ids():
            self._send(self._core.abort(request_id))
        self._core.die(ProcengineError("the client is closed"))
        self._link.close(linger=not is_gone(self._group))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate_bodies(
        self,
        bodies: Sequence[Body],
        request_ids: Sequence[str | None] | None = None,
        on_end: Callable[[], object] | None = None,
        traceparent: str = "",
    ) -> list[RequestOutput]:
        """Run bodies of `generate` requests together; results in their order. `on_end` is called as each one ends."""
        ended = self._run_all("generate", [final_body(body) for body in bodies], request_ids, on_end, traceparent)
        return [
            collect_deltas(
                pending.request_id, prompt_text(body), pending.take_deltas(), pending.delivered_ns, pending.arrived_ns
            )
            for pending, body in zip(ended, bodies, strict=True)
        ]

    def _offer(self, tools: Tools | None, tool_choice: ToolChoice | None) -> ToolOffer:
        return make_offer(tools, tool_choice, self._welcome.tool_call_parser)

    def _run_all(
        self,
        workflow: str,
        bodies: Sequence[Body],
        request_ids: Sequence[str | None] | None,
        on_end: Callable[[], object] | None,
        traceparent: str = "",
    ) -> list[Pending]:
        """Submit all, wait for all. The first error aborts those that still run, and is raised."""
        batch = Batch(on_end)
        try:
            for body, request_id in zip(bodies, request_ids or [None] * len(bodies), strict=True):
                batch.members.append(
                    self._submit(workflow, body, request_id, batch.take_end, traceparent, is_collected=True)
                )
            self._wait_until(batch.is_settled)
            for pending in batch.members:
                pending.raise_error()
        finally:
            for pending in batch.members:
                self._abandon(pending)
        return batch.members

    def _submit(
        self,
        workflow: str,
        body: Body,
        request_id: str | None,
        on_end: OnEnd | None = None,
        traceparent: str = "",
        *,
        is_collected: bool = False,
    ) -> Pending:
        with self._order:
            pending, frame = self._core.submit(
                workflow,
                body,
                request_id,
                on_end,
                sent_ns=time.monotonic_ns(),
                traceparent=traceparent,
                is_collected=is_collected,
            )
            self._link.queue(frame)
        self._send_queued()
        return pending

    def _abandon(self, pending: Pending) -> None:
        self._send(self._core.abandon(pending))

    def _send(self, frame: bytes | None) -> None:
        if frame is not None:
            self._link.queue(frame)
            self._send_queued()

    def _send_queued(self) -> None:
        """Send now, or have the leader do it. A leader that is about to end looks once more (`_lead`)."""
        with self._condition:
            if not self._has_leader:
                self._link.flush()
                return
        self._link.wake()

    def _wait_until(self, is_ready: Callable[[], bool]) -> None:
        with self._condition:
            while not is_ready():
                if self._has_leader:
                    self._condition.wait()
                else:
                    self._lead()

    def _lead(self) -> None:
        """Take in messages once, for everybody, with the condition released meanwhile."""
        self._has_leader = True
        self._condition.release()
        try:
            self._receive()
        finally:
            self._condition.acquire()
            self._has_leader = False
            self._link.flush()  # queued by a thread that saw us lead
            self._condition.notify_all()

    def _receive(self) -> None:
        frames = self._link.receive(_LIVENESS_MS)
        arrived_ns = time.monotonic_ns()
        for frame in frames:
            self._core.receive(frame, arrived_ns)
        with self._order:
            answer_losses(self._link, self._core)
        if not frames and self._core.has_pending and (is_gone(self._group) or self._link.is_cut_off):
            self._core.die(dead_group_error(self._group.name))
