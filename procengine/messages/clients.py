"""What clients say to the frontend and the output process, and what they hear from them.

These are the messages that a client in any language needs (docs/PROTOCOL.md).
"""

from __future__ import annotations

from typing import Any

from msgspec import Raw

from procengine.messages.base import Message

__all__ = [
    "Abort",
    "Attach",
    "Attached",
    "Delta",
    "Embedding",
    "GetStats",
    "Hello",
    "Lost",
    "Outputs",
    "Received",
    "Rejected",
    "RequestTimes",
    "Stats",
    "Submit",
    "TokenLogprobs",
    "Welcome",
]


# --- client -> frontend -----------------------------------------------------------------------------------------------


class Hello(Message, tag="hello"):
    """First message of a client: the version it speaks. Said again when the frontend may be another one."""

    version: int
    mark: int = 0  # comes back in the answer, which so tells what was sent before


class Submit(Message, tag="submit"):
    """A request. `body` is a map whose shape the workflow decides (`GenerateBody`, `EmbedBody`)."""

    request_id: str  # chosen by the client, unique among its running requests
    workflow: str
    body: Raw
    sent_ns: int = 0  # CLOCK_MONOTONIC, for RequestTimes
    traceparent: str = ""  # W3C Trace Context of the caller's span
    epoch: int = -1  # of the frontend that it is sent to, which may be gone when it arrives; -1: whichever there is


class Abort(Message, tag="abort"):
    """Stop a request; it still ends with one terminal message, `finish_reason` "abort"."""

    request_id: str


class GetStats(Message, tag="get_stats"):
    """Ask for the counters since the last reset."""

    reset: bool = False


# --- frontend -> client -----------------------------------------------------------------------------------------------


class Welcome(Message, tag="welcome"):
    """Answer to Hello: what this group is and where its outputs come from."""

    version: int
    group: str
    model: str
    output_endpoint: str
    max_model_len: int
    vocab_size: int
    workflows: tuple[str, ...]
    max_request_bytes: int
    tool_call_parser: str = "none"  # the style in which the model writes tool calls; clients read them
    epoch: int = 0  # how many frontends this group had before; what those held is lost
    mark: int = 0  # of the Hello
    labels: tuple[str, ...] = ()  # what the numbers of `classify` belong to, in order
    instance: int = 0  # of the group: one that took its place at this address has another


class Rejected(Message, tag="rejected"):
    """A request was not accepted, or the whole group is going: terminal for `request_id`."""

    request_id: str  # "" when the message belongs to no request
    code: str  # see procengine.errors
    message: str
    retry_after_s: float = 0.0  # when the same may be accepted, with the code "overloaded"; 0: no hint


class Received(Message, tag="received"):
    """A request has reached a frontend of another epoch than it was sent to, which takes it all the same."""

    request_id: str
    epoch: int


class Stats(Message, tag="stats"):
    """Counters and percentiles since the last reset, by name."""

    values: dict[str, Any]


# --- client <-> output ------------------------------------------------------------------------------------------------


class Attach(Message, tag="attach"):
    """First message of a client on the output socket, so that the output process can route to it."""

    version: int


class Attached(Message, tag="attached"):
    """Answer to Attach: outputs can reach this client now."""

    version: int


class RequestTimes(Message):
    """When a request passed each stage, in CLOCK_MONOTONIC nanoseconds, one clock for the whole host; 0: it did not."""

    client_sent_ns: int = 0  # as the client says
    received_ns: int = 0  # by the frontend
    prepared_ns: int = 0  # tokenized, its grammar compiled
    admitted_ns: int = 0  # its first step was sent
    first_token_ns: int = 0  # arrived at the output process
    last_token_ns: int = 0
    num_preemptions: int = 0


class TokenLogprobs(Message):
    """Log probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # 1 is the most likely token


class Delta(Message, tag="delta"):
    """New text and tokens of one choice. The one with a `finish_reason` is the last.

    It may repeat what an earlier one brought, after the output process was restarted: see `DeltaCursor`.
    """

    request_id: str
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: int | str | None = None  # the stop string or stop token id that matched
    logprobs: list[TokenLogprobs] | None = None
    prompt_token_ids: list[int] | None = None  # in the first delta
    num_cached_tokens: int | None = None  # in the first delta after admission
    error: str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one a prompt token, once; the first token has none
    times: RequestTimes | None = None  # in the last delta
    token_offset: int = -1  # tokens of this choice in the deltas before; -1: this one holds everything so far
    text_offset: int = -1  # the same in characters (code points) of text
    key: int = -1  # of the choice; grows from each request to the next, so that a name that is used again is no riddle


class Embedding(Message, tag="embedding"):
    """What a request that generates nothing gets: little-endian float32 bytes, a vector, scores, or several vectors one
    behind the other. Terminal."""

    request_id: str
    data: bytes
    prompt_token_ids: list[int]
    finish_reason: str | None = "stop"
    error: str | None = None
    times: RequestTimes | None = None
    key: int = -1  # see Delta


class Lost(Message, tag="lost"):
    """A frontend is gone, and these requests with it: terminal for each of them. They may be sent again."""

    epoch: int  # of that frontend
    request_ids: list[str]
    message: str


class Outputs(Message, tag="outputs"):
    """All that one step brought for one client."""

    items: list[Delta | Embedding]
    sent_ns: int = 0  # CLOCK_MONOTONIC
