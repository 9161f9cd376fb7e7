"""What each record in a span ring means: its kind, its key and its columns.

Owns: the meaning of the numbers. Never does: write or read a ring.

All times are CLOCK_MONOTONIC nanoseconds, which all processes of a host share; 0 is "did not happen" or "not known".
Consecutive times of a record cut its stretch of time into stages without a hole, so stages add up by construction.
Records of steps are joined by (rank, epoch, step_id, micro_step), those of requests by the request key.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

from procengine.profiling.span_ring import NUM_VALUES

__all__ = ["COLUMNS", "FINISH_CODES", "REJECT_CODES", "RecordKind", "id_words", "reject_number", "request_id_of"]


class RecordKind(IntEnum):
    """Kinds, by who writes them."""

    STEP_SENT = 1  # frontend: key is the step id
    RESULT_APPLIED = 2  # frontend: key is the step id
    REQUEST_ACCEPTED = 3  # frontend: key is the request key
    REQUEST_ADMITTED = 4  # frontend: key is the request key; again when it comes back to a worker
    TOKENIZED = 5  # frontend, its tokenizer thread: key counts batches
    STEP_RUN = 6  # worker, device loop: key is the step id; one record a forward pass
    RESULT_SENT = 7  # worker, send thread: key is the step id
    RESULT_TAKEN = 8  # output: key is the step id
    FLUSHED = 9  # output: key counts flushes; the results taken since the one before went out with this one
    REQUEST_DONE = 10  # output: key is the request key
    REQUEST_TRACED = 11  # frontend: key is the request key; of requests whose client named a span of its own
    REQUEST_REJECTED = 12  # frontend: key counts them; refused at the door, or before their first step
    CLIENT_DROPPED = 13  # output: key counts them; a client that is gone, or does not read


_STEP: Final = ("rank", "epoch", "micro_step")

COLUMNS: Final[dict[RecordKind, tuple[str, ...]]] = {
    RecordKind.STEP_SENT: (
        "rank",
        "epoch",
        "plan_ns",  # schedule begins
        "scheduled_ns",
        "built_ns",
        "encoded_ns",
        "sent_ns",  # handed to the socket
        "num_rows",
        "num_decode_rows",
        "num_tokens",
        "num_waiting",  # requests, after this step was planned
        "num_running",
        "num_free_blocks",  # cached ones included
        "num_in_flight",  # steps at the worker, this one included
    ),
    RecordKind.RESULT_APPLIED: (
        *_STEP,
        "received_ns",
        "decoded_ns",
        "applied_ns",
        "num_rows",
        "num_finished",
        "num_tokens",
    ),
    RecordKind.REQUEST_ACCEPTED: (
        "client_sent_ns",
        "received_ns",
        "prepared_ns",  # tokenized, grammar compiled
        "accepted_ns",
        "num_prompt_tokens",
        "rank",
        *(f"id_word_{number}" for number in range(8)),
    ),
    RecordKind.REQUEST_ADMITTED: (
        "rank",
        "epoch",
        "step_id",
        "sent_ns",
        "num_cached_tokens",
        "num_preemptions",  # so far; it may also have come back from a worker that died
    ),
    RecordKind.TOKENIZED: ("started_ns", "ended_ns", "num_bodies"),
    RecordKind.STEP_RUN: (
        *_STEP,
        "received_ns",  # off the socket; of later passes of a step: when the one before was done
        "decoded_ns",  # in the device loop's queue
        "started_ns",  # the device loop takes it
        "staged_ns",  # copied to the device, slots updated
        "forwarded_ns",  # hidden states computed
        "done_ns",  # sampled, copy back begun: the device loop is free
        "num_rows",
        "num_tokens",
    ),
    RecordKind.RESULT_SENT: (*_STEP, "woken_ns", "on_host_ns", "encoded_ns", "sent_ns", "text_sent_ns"),
    RecordKind.RESULT_TAKEN: (*_STEP, "received_ns", "decoded_ns", "taken_ns", "num_rows"),
    RecordKind.FLUSHED: ("started_ns", "detokenized_ns", "delivered_ns", "num_items", "num_clients"),
    RecordKind.REQUEST_DONE: (
        "client_sent_ns",
        "received_ns",
        "prepared_ns",
        "admitted_ns",
        "first_token_ns",
        "last_token_ns",
        "detokenized_ns",
        "delivered_ns",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_output_tokens",
        "num_preemptions",
        "finish_code",  # index in FINISH_CODES
    ),
    RecordKind.REQUEST_TRACED: ("accepted_ns", "trace_id_high", "trace_id_low", "parent_span_id", "trace_flags"),
    RecordKind.REQUEST_REJECTED: ("rejected_ns", "reject_code"),  # index in REJECT_CODES
    RecordKind.CLIENT_DROPPED: ("dropped_ns", "is_slow", "num_requests", "num_unsent_bytes"),
}
FINISH_CODES: Final = ("", "stop", "length", "abort", "error")
REJECT_CODES: Final = (
    "internal",
    "invalid_request",
    "overloaded",
    "shutting_down",
    "engine_dead",
    "protocol",
)
assert all(len(columns) <= NUM_VALUES for columns in COLUMNS.values())

_ID_WORDS: Final = struct.Struct("<8q")


def id_words(request_id: str) -> tuple[int, ...]:
    """The first 64 bytes of a request id as 8 integers."""
    return _ID_WORDS.unpack(request_id.encode()[:64].ljust(64, b"\0"))


def reject_number(code: str) -> int:
    """The number of an error's code in REJECT_CODES; codes that are not there count as "internal"."""
    return REJECT_CODES.index(code) if code in REJECT_CODES else 0


def request_id_of(words: tuple[int, ...]) -> str:
    """The inverse of `id_words`."""
    return _ID_WORDS.pack(*words).rstrip(b"\0").decode(errors="replace")
