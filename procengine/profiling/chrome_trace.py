"""A capture as a trace in the Chrome Trace Event Format, which Perfetto, chrome://tracing and others open. Pure.

Owns: what is drawn: tracks, slices, arrows and counters. Never does: know how an event looks (`trace_writer`), read a
ring or write a file.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
import numpy as np

from procengine.profiling.bubbles import CAUSES
from procengine.profiling.capture import Joined
from procengine.profiling.records import RecordKind
from procengine.profiling.requests import REQUEST_STAGES, Requests
from procengine.profiling.steps import Passes
from procengine.profiling.trace_writer import Event, TraceWriter, Track

__all__ = ["encode_trace", "trace_events"]

_IDLE: Final = "idle"
_REQUESTS: Final = "requests"
_THREADS: Final = {  # by process: the tracks, from the top
    "frontend": ("loop", "tokenize"),
    "worker": ("steps", "receive", "device", "send"),
    "output": ("loop",),
}
_SORT_BY_ROLE: Final = ("requests", "frontend", "worker", "output")


class _Tracks:
    """Where things are drawn."""

    def __init__(self, joined: Joined) -> None:
        pids = joined.capture.group.pids
        known = (name for name in pids if _role(name) in _THREADS)
        self._pids = {name: pids[name] for name in sorted(known, key=lambda name: _SORT_BY_ROLE.index(_role(name)))}
        for rank in joined.passes.ranks:  # a table may know workers of which the description does not
            self._pids.setdefault(f"worker-{rank}", max(self._pids.values(), default=0) + 1)
        self._pids.setdefault("frontend", max(self._pids.values(), default=0) + 1)
        self._pids.setdefault("output", max(self._pids.values()) + 1)
        self._pids[_REQUESTS] = max(self._pids.values()) + 1

    def of(self, process: str, thread: str) -> Track:
        return Track(self._pids[process], _THREADS[_role(process)].index(thread) + 1)

    def lane(self, number: int) -> Track:
        return Track(self._pids[_REQUESTS], number + 1)

    def write_names(self, writer: TraceWriter, num_lanes: int) -> None:
        for name, pid in self._pids.items():
            role = _role(name)
            track = Track(pid, 0)
            writer.name("process_name", track, name=name)
            writer.name("process_sort_index", track, sort_index=_SORT_BY_ROLE.index(role))
            threads = _THREADS.get(role) or [f"lane {number}" for number in range(num_lanes)]
            for at, thread in enumerate(threads, 1):
                writer.name("thread_name", Track(pid, at), name=thread)
                writer.name("thread_sort_index", Track(pid, at), sort_index=at)


def _role(process: str) -> str:
    return process.partition("-")[0]


def encode_trace(joined: Joined) -> bytes:
    """The whole file, JSON."""
    capture = joined.capture
    about = {
        "group": capture.group.name,
        "model": capture.group.model,
        "began_ns": capture.began_ns,
        "seconds": capture.seconds,
        "num_lost_records": capture.tables.num_lost,
        "cut_short": capture.cut_short,
    }
    return msgspec.json.encode({"traceEvents": trace_events(joined), "displayTimeUnit": "ms", "otherData": about})


def trace_events(joined: Joined, origin_ns: int | None = None) -> list[Event]:
    """All events, sorted by time. `ts` counts from `origin_ns` (CLOCK_MONOTONIC), None: from the first event."""
    writer, tracks = TraceWriter(), _Tracks(joined)
    _draw_frontend(writer, tracks, joined)
    for rank in joined.passes.ranks:
        own = joined.passes.of_rank(rank)
        _draw_worker(writer, tracks, f"worker-{rank}", own)
        _draw_step_flows(writer, tracks, f"worker-{rank}", own)
        _draw_counters(writer, tracks, rank, own, joined)
    _draw_bubbles(writer, tracks, joined)
    _draw_output(writer, tracks, joined)
    tracks.write_names(writer, _draw_requests(writer, tracks, joined))
    return writer.finish(origin_ns)


def _rows(passes: Passes, *columns: str) -> Iterable[list[int]]:
    return np.stack([passes[name] for name in columns], axis=1).tolist() if len(passes) else []


def _draw_frontend(writer: TraceWriter, tracks: _Tracks, joined: Joined) -> None:
    loop = tracks.of("frontend", "loop")
    passes = joined.passes
    steps = passes.where(passes["micro_step"] == 0)
    columns = ("rank", "step_id", "num_step_rows", "num_decode_rows")
    for rank, step, num_rows, num_decodes, *times in _rows(
        steps, *columns, "plan_ns", "scheduled_ns", "built_ns", "encoded_ns", "sent_ns"
    ):
        args = {"worker": rank, "step": step, "rows": num_rows, "decode rows": num_decodes}
        writer.slice(loop, f"plan step {step}", times[0], times[-1], args)
        writer.parts(loop, times, ("schedule", "build", "encode", "send"))
    for rank, step, micro_step, num_finished, *times in _rows(
        passes,
        "rank",
        "step_id",
        "micro_step",
        "num_finished",
        "result_received_ns",
        "result_decoded_ns",
        "applied_ns",
    ):
        args = {"worker": rank, "step": step, "pass": micro_step, "finished": num_finished}
        writer.slice(loop, f"result of step {step}", times[0], times[-1], args)
        writer.parts(loop, times, ("decode", "apply"))
    for prepared, accepted in _acceptances(joined).items():
        writer.slice(loop, "accept request", prepared, accepted)
    tokenizer, tokenized = tracks.of("frontend", "tokenize"), joined.tokenized
    for started, ended, num_bodies in zip(
        *(tokenized[name].tolist() for name in ("started_ns", "ended_ns", "num_bodies")), strict=True
    ):
        writer.slice(tokenizer, "tokenize", started, ended, {"requests": num_bodies})


def _acceptances(joined: Joined) -> dict[int, int]:
    """When the frontend's loop began and ended to take each request in; the choices of one are taken in together."""
    return dict(zip(joined.accepted["prepared_ns"].tolist(), joined.accepted["accepted_ns"].tolist(), strict=True))


def _draw_worker(writer: TraceWriter, tracks: _Tracks, process: str, own: Passes) -> None:
    receive, device, send = (tracks.of(process, thread) for thread in ("receive", "device", "send"))
    for step, micro_step, num_rows, num_tokens, *times in _rows(
        own,
        *("step_id", "micro_step", "num_rows", "num_tokens"),
        *("step_received_ns", "step_decoded_ns", "started_ns", "staged_ns", "forwarded_ns", "done_ns"),
        *("woken_ns", "on_host_ns", "result_encoded_ns", "result_sent_ns", "text_sent_ns"),
    ):
        if micro_step == 0:
            writer.slice(receive, f"receive step {step}", times[0], times[1])
        args = {"step": step, "pass": micro_step, "tokens": num_tokens, "sampled": num_rows}
        writer.slice(
            device, f"step {step}" if micro_step == 0 else f"step {step}.{micro_step}", times[2], times[5], args
        )
        writer.parts(device, times[2:6], ("stage", "forward", "sample"))
        writer.slice(send, f"send result of step {step}", times[6], times[-1])
        writer.parts(send, times[6:], ("copy to host", "encode", "send", "send text"))
    _draw_steps(writer, tracks.of(process, "steps"), own)


def _draw_steps(writer: TraceWriter, track: Track, own: Passes) -> None:
    """Step boundaries: from the start of a step's first pass to the end of its last."""
    firsts = np.flatnonzero(own["micro_step"] == 0)
    if not firsts.size:
        return
    lasts = np.append(firsts[1:], len(own)) - 1
    rows = zip(
        own["step_id"][firsts].tolist(),
        own["num_step_rows"][firsts].tolist(),
        own["num_decode_rows"][firsts].tolist(),
        own["started_ns"][firsts].tolist(),
        own["done_ns"][lasts].tolist(),
        strict=True,
    )
    for step, num_rows, num_decodes, started, done in rows:
        kind = "decode" if num_rows == num_decodes else "prefill" if not num_decodes else "mixed"
        writer.slice(track, kind, started, done, {"step": step, "rows": num_rows, "decode rows": num_decodes})


def _draw_bubbles(writer: TraceWriter, tracks: _Tracks, joined: Joined) -> None:
    """Gaps on the device track: what the worker waited for, in the order of time."""
    bubbles = joined.bubbles
    rows = zip(bubbles.ranks.tolist(), bubbles.began_ns.tolist(), bubbles.parts_ns.tolist(), strict=True)
    for rank, began, parts in rows:
        length = sum(parts)
        if not length:
            continue
        track = tracks.of(f"worker-{rank}", "device")
        args: Event = {cause: ns / 1e3 for cause, ns in zip(CAUSES, parts, strict=True) if ns}
        args["cause"] = CAUSES[parts.index(max(parts))]
        writer.slice(track, _IDLE, began, began + length, args)
        writer.parts(track, np.cumsum([began, *parts]).tolist(), [f"wait: {cause}" for cause in CAUSES])


def _draw_step_flows(writer: TraceWriter, tracks: _Tracks, process: str, own: Passes) -> None:
    """One arrow from the plan through the device to the text, and one back with the result."""
    frontend, output = tracks.of("frontend", "loop"), tracks.of("output", "loop")
    device, send = tracks.of(process, "device"), tracks.of(process, "send")
    for micro_step, plan, started, woken, received, taken in _rows(
        own, "micro_step", "plan_ns", "started_ns", "woken_ns", "result_received_ns", "text_received_ns"
    ):
        begin = [(plan, frontend)] if micro_step == 0 else []
        writer.flow("step", "step", [*begin, (started, device), (woken, send), (taken, output)])
        writer.flow("result", "result", [(woken, send), (received, frontend)])


def _draw_counters(writer: TraceWriter, tracks: _Tracks, rank: int, own: Passes, joined: Joined) -> None:
    """Queues and KV blocks when a step was sent, and rows when it started. Only changes are written."""
    track = tracks.of(f"worker-{rank}", "device")
    group = joined.capture.group
    num_blocks = group.num_blocks // max(group.num_workers, 1) or int(own["num_free_blocks"].max(initial=0))
    steps = own.where(own["micro_step"] == 0)
    series = {
        "requests waiting": (steps["sent_ns"], steps["num_waiting"]),
        "requests running": (steps["sent_ns"], steps["num_running"]),
        "KV blocks in use": (steps["sent_ns"], num_blocks - steps["num_free_blocks"]),
        "batch rows": (steps["started_ns"], steps["num_step_rows"]),
        "steps in flight": _in_flight(own),
    }
    for name, (times, values) in series.items():
        changes = np.flatnonzero(np.diff(values, prepend=-1))
        for time_ns, value in zip(times[changes].tolist(), values[changes].tolist(), strict=True):
            writer.counter(track, name, time_ns, value)


def _in_flight(own: Passes) -> tuple[np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.int64]]]:
    """Times and numbers of steps at the worker: one more when one is sent, one less when its last result is applied."""
    firsts = np.flatnonzero(own["micro_step"] == 0)
    lasts = np.append(firsts[1:], len(own))[: firsts.size] - 1
    is_sent = np.arange(2 * firsts.size) < firsts.size
    times = np.concatenate((own["sent_ns"][firsts], own["applied_ns"][lasts]))
    known = np.concatenate((own["num_in_flight"][firsts], np.zeros(lasts.size, np.int64)))
    order = np.lexsort((is_sent, times))
    changes = np.cumsum(np.where(is_sent[order], 1, -1))
    # The frontend says how many there are with every step it sends; after that, count.
    newest_sent = np.maximum.accumulate(np.where(is_sent[order], np.arange(order.size), 0))
    values = known[order][newest_sent] - changes[newest_sent] + changes
    return times[order], np.maximum(values, 0)


def _draw_output(writer: TraceWriter, tracks: _Tracks, joined: Joined) -> None:
    loop = tracks.of("output", "loop")
    for step, micro_step, num_rows, *times in _rows(
        joined.passes, "step_id", "micro_step", "num_rows", "text_received_ns", "text_decoded_ns", "taken_ns"
    ):
        args = {"step": step, "pass": micro_step, "tokens": num_rows}
        writer.slice(loop, f"tokens of step {step}", times[0], times[-1], args)
        writer.parts(loop, times, ("decode", "take tokens"))
    flushed = joined.flushed
    columns = ("started_ns", "detokenized_ns", "delivered_ns", "num_items", "num_clients")
    for *times, num_items, num_clients in zip(*(flushed[name].tolist() for name in columns), strict=True):
        writer.slice(loop, "flush", times[0], times[-1], {"messages": num_items, "clients": num_clients})
        writer.parts(loop, times, ("detokenize", "deliver"))


def _draw_requests(writer: TraceWriter, tracks: _Tracks, joined: Joined) -> int:
    """A slice with its stages for each request, on as few lanes as keep them apart. Returns how many lanes."""
    free_from: list[int] = []  # by lane
    everyone = [
        (bounds, at, requests)
        for requests in (joined.requests, joined.unfinished)
        for at, bounds in enumerate(requests.bounds_ns.tolist())
    ]
    points = _flow_points(tracks, joined)
    for bounds, at, requests in sorted(everyone, key=lambda each: each[0]):
        number = next((lane for lane, free in enumerate(free_from) if free <= bounds[0]), len(free_from))
        free_from[number : number + 1] = [bounds[-1]]
        lane, key = tracks.lane(number), int(requests.keys[at])
        name = requests.ids[at] or f"request {key}"
        writer.slice(lane, name, bounds[0], bounds[-1], _request_args(requests, at))
        writer.parts(lane, bounds, REQUEST_STAGES)
        writer.flow("request", name, [(bounds[0], lane), *points.get(key, [])])
    return len(free_from)


def _request_args(requests: Requests, at: int) -> Event:
    stages = zip(REQUEST_STAGES, requests.stages_ns[at].tolist(), strict=True)
    return {
        "key": int(requests.keys[at]),
        "worker": int(requests.ranks[at]),
        "finish reason": requests.finish_reasons[at] or "has not ended",
        "prompt tokens": int(requests.counts["num_prompt_tokens"][at]),
        "cached tokens": int(requests.counts["num_cached_tokens"][at]),
        "output tokens": int(requests.counts["num_output_tokens"][at]),
        "preemptions": int(requests.counts["num_preemptions"][at]),
        **{f"{stage} ms": ns / 1e6 for stage, ns in stages},
    }


def _flow_points(tracks: _Tracks, joined: Joined) -> dict[int, list[tuple[int, Track]]]:
    """By request key: where it was accepted, planned and run for the first time, and delivered for the last."""
    frontend, output = tracks.of("frontend", "loop"), tracks.of("output", "loop")
    points: dict[int, list[tuple[int, Track]]] = {}
    for key, prepared in zip(joined.accepted["key"].tolist(), joined.accepted["prepared_ns"].tolist(), strict=True):
        points.setdefault(key, []).append((prepared, frontend))
    first_pass = {
        (rank, epoch, step): (plan, started)
        for rank, epoch, step, micro_step, plan, started in _rows(
            joined.passes, "rank", "epoch", "step_id", "micro_step", "plan_ns", "started_ns"
        )
        if micro_step == 0
    }
    admitted = joined.admitted
    for key, *step in zip(*(admitted[name].tolist() for name in ("key", "rank", "epoch", "step_id")), strict=True):
        if (times := first_pass.get(tuple(step))) is not None:
            device = tracks.of(f"worker-{step[0]}", "device")
            points.setdefault(key, []).extend([(times[0], frontend), (times[1], device)])
    flushes = dict(zip(joined.flushed["delivered_ns"].tolist(), joined.flushed["started_ns"].tolist(), strict=True))
    done = joined.capture.tables[RecordKind.REQUEST_DONE]
    for key, delivered in zip(done["key"].tolist(), done["delivered_ns"].tolist(), strict=True):
        if (started := flushes.get(delivered)) is not None:
            points.setdefault(key, []).append((started, output))
    return points
