"""What engines say, and what follows from it. Pure: JSON lines in, figures out.

Owns: the messages of an engine, and that it did what it was asked to. Never does: talk to a process (`process`).

One line in is one request: `{"prompts": [[ids]], "output_len": n, "is_streaming": bool, "max_concurrency": n or null,
"arrivals_s": [s] or null}`. One line out answers it: `Ran`, or `Failed` and then the engine is of no more use. Before
the first, an engine says `Ready`. All times are in seconds since the engine began to run the request.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from procengine.bench.peers.loads import Load
from procengine.bench.report import ReportOptions, report
from procengine.bench.timelines import Timeline
from procengine.errors import ProcengineError

__all__ = [
    "Answer",
    "EngineError",
    "Failed",
    "Ran",
    "Ready",
    "RequestTimes",
    "encode_load",
    "figures_of",
    "read_answer",
]

_NS: Final = 1e9


class EngineError(ProcengineError):
    """An engine failed, or did not do what it was asked to. The others go on."""


class Ready(msgspec.Struct, tag_field="kind", tag="ready", frozen=True):
    """It has loaded.

    Attributes:
        version: of the engine.
        precision: what it computes in: "int8", "bf16".
    """

    version: str
    precision: str


class RequestTimes(msgspec.Struct, frozen=True):
    """One request, in the order they were asked for.

    Attributes:
        intended_s: when it should have been sent: its arrival, or when it was sent if there was no plan.
        token_times_s: when tokens came, ascending; `token_counts` says how many each time. Without streaming, one time.
    """

    intended_s: float
    submitted_s: float
    token_times_s: list[float]
    token_counts: list[int]


class Ran(msgspec.Struct, tag_field="kind", tag="ran", frozen=True):
    """It has run."""

    requests: list[RequestTimes]


class Failed(msgspec.Struct, tag_field="kind", tag="failed", frozen=True):
    """It could not; says why."""

    error: str


Answer = Ready | Ran | Failed
_decoder: Final = msgspec.json.Decoder(Answer)


def encode_load(load: Load) -> bytes:
    """The line that asks an engine to run `load`."""
    arrivals = None if load.arrivals_s is None else load.arrivals_s.tolist()
    return msgspec.json.encode(
        {
            "prompts": load.prompts,
            "output_len": load.output_len,
            "is_streaming": load.is_streaming,
            "max_concurrency": load.max_concurrency,
            "arrivals_s": arrivals,
        }
    )


def read_answer(line: bytes) -> Ready | Ran:
    """What an engine said.

    Raises:
        EngineError: it failed, or the line is no answer.
    """
    try:
        answer: Answer = _decoder.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(f"not an answer: {error}: {line[:200]!r}") from error
    if isinstance(answer, Failed):
        raise EngineError(answer.error)
    return answer


def figures_of(load: Load, ran: Ran) -> dict[str, Any]:
    """The figures of a run, those of `procengine bench` and `decode_tokens_per_s`: of one request, after its first.

    Raises:
        EngineError: a request is missing, or has more or fewer tokens than asked for.
    """
    if len(ran.requests) != len(load.prompts):
        raise EngineError(f"{len(ran.requests)} requests were answered, {len(load.prompts)} were asked for")
    timelines = []
    for number, (prompt, times) in enumerate(zip(load.prompts, ran.requests, strict=True)):
        _check_times(number, times, load.output_len)
        timelines.append(_timeline(len(prompt), times))
    figures = report(timelines, {}, ReportOptions(percentiles=(99.0,), has_schedule=load.arrivals_s is not None))
    tpot_ms = figures["tpot_ms"]["mean"]
    figures["decode_tokens_per_s"] = 1e3 / tpot_ms if tpot_ms else None
    return figures


def _check_times(number: int, times: RequestTimes, output_len: int) -> None:
    if sum(times.token_counts) != output_len or len(times.token_counts) != len(times.token_times_s):
        raise EngineError(
            f"request {number} has {sum(times.token_counts)} tokens at {len(times.token_times_s)} times, "
            f"{output_len} were asked for"
        )
    moments = [times.submitted_s, *times.token_times_s]
    if times.intended_s > times.submitted_s or moments != sorted(moments):
        raise EngineError(f"request {number}: its times do not ascend")


def _timeline(num_prompt_tokens: int, times: RequestTimes) -> Timeline:
    token_times_ns = [round(at * _NS) for at in times.token_times_s]
    return Timeline(
        intended_ns=round(times.intended_s * _NS),
        submitted_ns=round(times.submitted_s * _NS),
        token_times_ns=token_times_ns,
        token_counts=times.token_counts,
        end_ns=token_times_ns[-1],
        num_prompt_tokens=num_prompt_tokens,
    )
