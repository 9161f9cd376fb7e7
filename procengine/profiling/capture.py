"""`Capture`: what a group noted about itself in a stretch of time, joined. Pure.

Owns: which facts a trace and a profile start from. Never does: read a ring (`recording`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ConfigError
from procengine.profiling.bubbles import Bubbles, find_bubbles
from procengine.profiling.records import RecordKind
from procengine.profiling.requests import Requests, finished_requests, unfinished_requests
from procengine.profiling.snapshot import SpanTables, Table
from procengine.profiling.steps import Passes, join_passes

__all__ = ["Capture", "GroupFacts", "Joined", "join_capture", "only_passes", "only_request"]

_MOST_IDS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """Whose records these are. `pids` by process name: frontend, output, worker-0, ..."""

    name: str
    model: str
    pids: dict[str, int]
    num_blocks: int = 0  # KV blocks of all workers together; 0 is unknown

    @property
    def num_workers(self) -> int:
        """Workers of the group."""
        return sum(name.startswith("worker") for name in self.pids)


@dataclass(frozen=True, slots=True)
class Capture:
    """Raw records.

    Attributes:
        began_ns, ended_ns: CLOCK_MONOTONIC.
        cpu_s: CPU seconds that each process used meanwhile.
        cut_short: why the capture ended before its time; "" if it did not.
        restarted: processes that were replaced meanwhile.
        since_ns: requests that ended before are not wanted, though their records may have been written later.
        open_since_ns: of requests that were accepted before, it is not known whether they ended before the capture.
    """

    group: GroupFacts
    began_ns: int
    ended_ns: int
    tables: SpanTables
    cpu_s: dict[str, float]
    cut_short: str = ""
    restarted: tuple[str, ...] = ()
    since_ns: int = 0
    open_since_ns: int = 0

    @property
    def seconds(self) -> float:
        """How long it was."""
        return (self.ended_ns - self.began_ns) / 1e9


@dataclass(frozen=True, slots=True)
class Joined:
    """A capture in the terms of passes, gaps and requests."""

    capture: Capture
    passes: Passes
    bubbles: Bubbles
    requests: Requests  # that ended
    unfinished: Requests
    accepted: Table
    admitted: Table
    tokenized: Table
    flushed: Table


def join_capture(capture: Capture) -> Joined:
    """Join all that is complete in the capture."""
    tables = capture.tables
    passes = join_passes(tables)
    finished, unfinished = finished_requests(tables), unfinished_requests(tables, capture.ended_ns)
    return Joined(
        capture,
        passes,
        find_bubbles(passes, tables),
        finished.where(finished.bounds_ns[:, -1] >= capture.since_ns),
        unfinished.where(unfinished.bounds_ns[:, 1] >= capture.open_since_ns),
        *(
            tables[kind]
            for kind in (
                RecordKind.REQUEST_ACCEPTED,
                RecordKind.REQUEST_ADMITTED,
                RecordKind.TOKENIZED,
                RecordKind.FLUSHED,
            )
        ),
    )


def only_request(joined: Joined, request_id: str) -> Joined:
    """What concerns one request: itself, and the passes of its worker from its admission to its last token.

    Clients choose ids for themselves: of several requests with this one it is the newest.

    Raises:
        ConfigError: it is not in the capture.
    """
    done, unfinished = joined.requests.named(request_id), joined.unfinished.named(request_id)
    received_ns = np.concatenate((done.bounds_ns[:, 1], unfinished.bounds_ns[:, 1]))
    if not received_ns.size:
        raise ConfigError(f"--request: no request {request_id!r} in this capture; {_known_ids(joined)}")
    done, unfinished = (each.where(each.bounds_ns[:, 1] == received_ns.max()) for each in (done, unfinished))
    keys = np.concatenate((done.keys, unfinished.keys))
    accepted = joined.accepted.where(np.isin(joined.accepted["key"], keys))
    admitted = joined.admitted.where(np.isin(joined.admitted["key"], keys))
    concerns = np.zeros(len(joined.passes), np.bool_)
    for requests in (done, unfinished):
        for rank, bounds in zip(requests.ranks.tolist(), requests.bounds_ns.tolist(), strict=True):
            concerns |= _between(joined.passes, rank, bounds[3], bounds[5])
    return replace(
        only_passes(joined, concerns),
        requests=done,
        unfinished=unfinished,
        accepted=accepted,
        admitted=admitted,
        tokenized=joined.tokenized.where(_overlaps(joined.tokenized, accepted)),
    )


def only_passes(joined: Joined, concerns: NDArray[np.bool_]) -> Joined:
    """Some passes (bool [n]), the gaps between them, and the flushes that carried their text; no requests."""
    bubbles, kept = joined.bubbles, joined.passes.where(concerns)
    firsts = np.flatnonzero(concerns & ~np.concatenate(([False], concerns[:-1])))
    # The gap before the first pass is of the time before.
    gaps = concerns[bubbles.next_pass] & ~np.isin(bubbles.next_pass, firsts)
    new_row = np.cumsum(concerns) - 1
    nobody, none = np.zeros(len(joined.requests), np.bool_), np.zeros(0, np.int64)
    return replace(
        joined,
        passes=kept,
        bubbles=Bubbles(
            new_row[bubbles.next_pass[gaps]], bubbles.ranks[gaps], bubbles.began_ns[gaps], bubbles.parts_ns[gaps]
        ),
        requests=joined.requests.where(nobody),
        unfinished=joined.unfinished.where(np.zeros(len(joined.unfinished), np.bool_)),
        accepted=joined.accepted.where(none),
        admitted=joined.admitted.where(none),
        tokenized=joined.tokenized.where(none),
        flushed=joined.flushed.where(np.isin(joined.flushed["started_ns"], kept["flush_started_ns"])),
    )


def _between(passes: Passes, rank: int, admitted_ns: int, last_token_ns: int) -> NDArray[np.bool_]:
    """bool [n]: passes of a worker whose step was sent after the admission and whose text came by the last token."""
    is_in = (passes["encoded_ns"] >= admitted_ns) & (passes["text_received_ns"] <= last_token_ns)
    return np.asarray(is_in & (passes["rank"] == rank), np.bool_)


def _overlaps(tokenized: Table, accepted: Table) -> NDArray[np.bool_]:
    """bool [n]: batches that were tokenized while one of these requests waited for that."""
    overlaps = np.zeros(len(tokenized), np.bool_)
    for received, prepared in zip(accepted["received_ns"].tolist(), accepted["prepared_ns"].tolist(), strict=True):
        overlaps |= (tokenized["started_ns"] >= received) & (tokenized["ended_ns"] <= prepared)
    return overlaps


def _known_ids(joined: Joined) -> str:
    ids = list(dict.fromkeys(each for each in (*joined.requests.ids, *joined.unfinished.ids) if each))
    if not ids:
        return "there is none at all"
    shown = ", ".join(ids[-_MOST_IDS_SHOWN:])
    return f"it has {shown}" if len(ids) <= _MOST_IDS_SHOWN else f"it has {len(ids)}, the last are {shown}"
