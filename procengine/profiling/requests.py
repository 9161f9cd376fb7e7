"""Requests and their stages: one row a request that ended. Pure.

Owns: what the stages of a request are called and where they begin, and which id belongs to which key. Never does: read
a ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.records import FINISH_CODES, RecordKind, request_id_of
from procengine.profiling.snapshot import SpanTables, Table

__all__ = ["REQUEST_STAGES", "Requests", "finished_requests", "ids_by_key", "unfinished_requests"]

Int64s = NDArray[np.int64]

REQUEST_STAGES: Final = ("submit", "tokenize", "queue", "prefill", "decode", "detokenize", "deliver")
_BOUNDS: Final = (
    "client_sent_ns",
    "received_ns",  # submit: client to frontend
    "prepared_ns",  # tokenize: and compile its grammar
    "admitted_ns",  # queue: until its first step is sent
    "first_token_ns",  # prefill: until its first token is in the output process
    "last_token_ns",  # decode
    "detokenized_ns",  # detokenize: its last tokens
    "delivered_ns",  # deliver: its last message is with the socket
)
_COUNTS: Final = ("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "num_preemptions", "finish_code")
_NUM_ID_WORDS: Final = 8


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests, in the order of their records.

    Attributes:
        keys: int64 [n].
        ids: request ids, "" where the acceptance was not captured. The choices of a request (n > 1) share one.
        ranks: int64 [n], the worker; -1 where the acceptance was not captured.
        bounds_ns: int64 [n, 8]: where the stages begin, and the end of the last. Never falls along a row: a stage that
            did not happen takes no time. A client that sent no time of its own counts from when it was received.
        counts: int64 [n] each: num_prompt_tokens, num_cached_tokens, num_output_tokens, num_preemptions, finish_code.
    """

    keys: Int64s
    ids: list[str]
    ranks: Int64s
    bounds_ns: Int64s
    counts: dict[str, Int64s]

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def stages_ns(self) -> Int64s:
        """int64 [n, 7], in the order of `REQUEST_STAGES`; a row adds up to `e2e_ns`."""
        return np.diff(self.bounds_ns, axis=1)

    @property
    def e2e_ns(self) -> Int64s:
        """int64 [n]: from the client's sending to the delivery of the last message."""
        return np.asarray(self.bounds_ns[:, -1] - self.bounds_ns[:, 0], np.int64)

    @property
    def finish_reasons(self) -> list[str]:
        """stop, length, abort or error; "" of those that have not ended."""
        return [FINISH_CODES[code] for code in self.counts["finish_code"].tolist()]

    def where(self, selected: NDArray[np.bool_]) -> Requests:
        """Some of them: bool [n]."""
        return Requests(
            self.keys[selected],
            [request_id for request_id, is_in in zip(self.ids, selected.tolist(), strict=True) if is_in],
            self.ranks[selected],
            self.bounds_ns[selected],
            {name: values[selected] for name, values in self.counts.items()},
        )

    def named(self, request_id: str) -> Requests:
        """The choices of one request."""
        return self.where(np.array([each == request_id for each in self.ids], np.bool_))


def ids_by_key(tables: SpanTables) -> dict[int, str]:
    """Request id by key, of requests whose acceptance is in the tables. Ids beyond 64 bytes are cut there."""
    accepted = tables[RecordKind.REQUEST_ACCEPTED]
    first = accepted.rows.shape[1] - _NUM_ID_WORDS
    words = accepted.rows[:, first:].tolist()
    return {key: request_id_of(tuple(row)) for key, row in zip(accepted["key"].tolist(), words, strict=True)}


def finished_requests(tables: SpanTables) -> Requests:
    """Every request whose end is in the tables."""
    done = tables[RecordKind.REQUEST_DONE]
    bounds = np.stack([done[name] for name in _BOUNDS], axis=1)
    return _requests(tables, done["key"], bounds, {name: done[name] for name in _COUNTS})


def unfinished_requests(tables: SpanTables, until_ns: int) -> Requests:
    """Every request that was accepted, and whose end is not in the tables.

    The stage it is in, as far as is known, lasts until `until_ns`: queue before its admission, else prefill.
    """
    accepted = tables[RecordKind.REQUEST_ACCEPTED]
    accepted = accepted.where(~np.isin(accepted["key"], tables[RecordKind.REQUEST_DONE]["key"]))
    admitted_ns = _first_by_key(tables[RecordKind.REQUEST_ADMITTED], "sent_ns", accepted["key"], until_ns)
    ends = np.full(len(accepted), until_ns, np.int64)
    bounds = np.stack(
        [*(accepted[name] for name in ("client_sent_ns", "received_ns", "prepared_ns")), admitted_ns, *[ends] * 4],
        axis=1,
    )
    unknown = np.zeros(len(accepted), np.int64)
    counts = dict.fromkeys(_COUNTS, unknown) | {"num_prompt_tokens": accepted["num_prompt_tokens"]}
    return _requests(tables, accepted["key"], bounds, counts)


def _requests(tables: SpanTables, keys: Int64s, bounds: Int64s, counts: dict[str, Int64s]) -> Requests:
    bounds[:, 0] = np.where(bounds[:, 0] > 0, bounds[:, 0], bounds[:, 1])
    ids = ids_by_key(tables)
    accepted = tables[RecordKind.REQUEST_ACCEPTED]
    rank_by_key = dict(zip(accepted["key"].tolist(), accepted["rank"].tolist(), strict=True))
    return Requests(
        keys,
        [ids.get(key, "") for key in keys.tolist()],
        np.array([rank_by_key.get(key, -1) for key in keys.tolist()], np.int64),
        np.maximum.accumulate(bounds, axis=1) if len(bounds) else bounds,
        counts,
    )


def _first_by_key(table: Table, column: str, keys: Int64s, default: int) -> Int64s:
    """The first value of each key; a request that is preempted is admitted again."""
    first_by_key = dict(zip(table["key"][::-1].tolist(), table[column][::-1].tolist(), strict=True))
    return np.array([first_by_key.get(key, default) for key in keys.tolist()], np.int64)
