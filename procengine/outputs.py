"""What a caller gets back: results and deltas as plain values, and the fold from wire messages to them.

Owns: the shape of results. Never does: talk to a group, or turn tokens into text (the output process did that).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

import msgspec

from procengine.messages import Delta, Embedding, RequestTimes, TokenLogprobs
from procengine.tool_calls.calls import ToolCall, ToolCallDelta

__all__ = [
    "CompletionOutput",
    "EmbeddingOutput",
    "Logprob",
    "RequestMetrics",
    "RequestOutput",
    "StreamDelta",
    "collect_deltas",
    "collect_embedding",
    "request_metrics",
    "stream_delta",
]


class Logprob(msgspec.Struct, frozen=True):
    """Natural log of a token's probability, and its rank (1 is the most likely token)."""

    logprob: float
    rank: int


class RequestMetrics(msgspec.Struct, frozen=True):
    """Where a request's time went, in milliseconds. The stages follow each other and add up to `e2e_ms`; one that was
    not reached took no time.

    Attributes:
        submit_ms: from the client's call to the frontend.
        tokenize_ms: waiting for the tokenizer (and the grammar compiler), and being tokenized.
        queue_ms: waiting for a place in a step.
        prefill_ms: from its first step to its first token, as the output process saw it.
        decode_ms: from the first to the last token.
        detokenize_ms: from there until its last message was ready.
        deliver_ms: the last message's way to the client.
        num_preemptions: how often its place went to another request.
    """

    submit_ms: float
    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    detokenize_ms: float
    deliver_ms: float
    e2e_ms: float
    num_preemptions: int


class CompletionOutput(msgspec.Struct, frozen=True):
    """One generated sequence.

    Attributes:
        index: which choice of the request this is.
        text: the new text, without the prompt and without calls that were read from it.
        token_ids: the new tokens, the one that ended the sequence included.
        finish_reason: "stop" | "length" | "abort" | "tool_calls".
        stop_reason: the stop string or the requested stop token that matched, else None.
        logprobs: one map a token, chosen token first, then the most likely ones; None where they were not asked for.
        tool_calls: what the model calls, in order; None where no tools were offered or the group reads no calls.
        error: why the group aborted it (`timeout_s`), where it did.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    tool_calls: list[ToolCall] | None = None
    error: str | None = None


class RequestOutput(msgspec.Struct, frozen=True):
    """The result of one `generate` request.

    Attributes:
        prompt: the text that was sent; None for token ids and messages.
        prompt_token_ids: what the model saw.
        outputs: the choices in order, `n` of them.
        num_cached_tokens: prompt tokens whose keys and values were found in the prefix cache; None if it never started.
        prompt_logprobs: one map a prompt token, that token first, then the most likely ones; the first token has None.
            None where they were not asked for.
        metrics: where its time went; with several choices, the time of the one that ended last.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None


class StreamDelta(msgspec.Struct, frozen=True):
    """New text and tokens of one choice of a running request. The one with a `finish_reason` is the choice's last.

    With output kind "cumulative" text, tokens and logprobs are all so far; with "final" there is one delta a choice.
    `prompt_logprobs` are in the first delta of choice 0, `metrics` in the last of each. `tool_calls` are additions to
    calls, if there are any; `text` has what is no call, and comes before them. `error` says why the group aborted it,
    if it did.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics | None = None
    tool_calls: list[ToolCallDelta] | None = None
    error: str | None = None


class EmbeddingOutput(msgspec.Struct, frozen=True):
    """The result of one `embed` request: a vector of `hidden_size` floats with length 1."""

    request_id: str
    embedding: list[float]
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None


def request_metrics(times: RequestTimes, delivered_ns: int, arrived_ns: int) -> RequestMetrics:
    """The stages between a request's times; `delivered_ns` and `arrived_ns` are of its last message."""
    at = times.client_sent_ns or times.received_ns
    reached = (
        times.received_ns,
        times.prepared_ns,
        times.admitted_ns,
        times.first_token_ns,
        times.last_token_ns,
        delivered_ns,
        arrived_ns,
    )
    bounds_ns = list(accumulate(reached, max, initial=at))
    submit, tokenize, queue, prefill, decode, detokenize, deliver = (
        (end - begin) / 1e6 for begin, end in pairwise(bounds_ns)
    )
    e2e = (bounds_ns[-1] - bounds_ns[0]) / 1e6
    return RequestMetrics(submit, tokenize, queue, prefill, decode, detokenize, deliver, e2e, times.num_preemptions)


def collect_deltas(
    request_id: str, prompt: str | None, deltas: Sequence[Delta], delivered_ns: int = 0, arrived_ns: int = 0
) -> RequestOutput:
    """All deltas of one request, in order of arrival, as its result. Their output kind is "delta" or "final".

    `delivered_ns` and `arrived_ns` say when the last message was sent, and when it came (CLOCK_MONOTONIC).
    """
    prompt_token_ids = next((d.prompt_token_ids for d in deltas if d.prompt_token_ids is not None), [])
    num_cached_tokens = next((d.num_cached_tokens for d in deltas if d.num_cached_tokens is not None), None)
    prompt_logprobs = next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None)
    times = next((d.times for d in reversed(deltas) if d.times is not None), None)
    deltas_by_index: dict[int, list[Delta]] = {}
    for delta in deltas:
        deltas_by_index.setdefault(delta.index, []).append(delta)
    outputs = [_collect_choice(index, of_one) for index, of_one in sorted(deltas_by_index.items())]
    return RequestOutput(
        request_id=request_id,
        prompt=prompt,
        prompt_token_ids=prompt_token_ids,
        outputs=outputs,
        finished=bool(outputs) and all(output.finish_reason is not None for output in outputs),
        num_cached_tokens=num_cached_tokens,
        prompt_logprobs=None if prompt_logprobs is None else _prompt_logprob_maps(prompt_logprobs),
        metrics=None if times is None else request_metrics(times, delivered_ns, arrived_ns),
    )


def collect_embedding(message: Embedding, delivered_ns: int = 0, arrived_ns: int = 0) -> EmbeddingOutput:
    """The vector of a finished `embed` request. Its bytes are little-endian float32."""
    values = array("f")
    values.frombytes(message.data)
    if sys.byteorder == "big":
        values.byteswap()
    metrics = None if message.times is None else request_metrics(message.times, delivered_ns, arrived_ns)
    return EmbeddingOutput(message.request_id, values.tolist(), message.prompt_token_ids, metrics)


def stream_delta(delta: Delta, delivered_ns: int = 0, arrived_ns: int = 0) -> StreamDelta:
    """A delta as callers see it; the times are of the message that ended it, if one has."""
    return StreamDelta(
        request_id=delta.request_id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        logprobs=None if delta.logprobs is None else [_logprob_map(at) for at in delta.logprobs],
        prompt_logprobs=None if delta.prompt_logprobs is None else _prompt_logprob_maps(delta.prompt_logprobs),
        metrics=None if delta.times is None else request_metrics(delta.times, delivered_ns, arrived_ns),
        error=delta.error,
    )


def _collect_choice(index: int, deltas: Sequence[Delta]) -> CompletionOutput:
    last = deltas[-1]
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for delta in deltas:
        token_ids += delta.token_ids
        if delta.logprobs is not None:
            logprobs += delta.logprobs
    return CompletionOutput(
        index=index,
        text="".join([delta.text for delta in deltas]),
        token_ids=token_ids,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=[_logprob_map(at) for at in logprobs] if logprobs else None,
        error=last.error,
    )


def _prompt_logprob_maps(positions: Iterable[TokenLogprobs | None]) -> list[dict[int, Logprob] | None]:
    return [None if at is None else _logprob_map(at) for at in positions]


def _logprob_map(at: TokenLogprobs) -> dict[int, Logprob]:
    return {
        token_id: Logprob(logprob, rank)
        for token_id, logprob, rank in zip(at.token_ids, at.logprobs, at.ranks, strict=True)
    }
