"""Every message that crosses a socket, and one typed decoder a receiving end.

Owns: the wire format (docs/PROTOCOL.md describes it; golden-bytes tests pin it). Never does: open a socket.
Messages are MessagePack arrays whose first element is the tag. New fields go last, with defaults. Bulk arrays travel as
a second frame beside a header (`StepInput`, `StepResult`, `EmbedInput`, `EmbedResult`); `procengine.step_payload`
cuts those frames into named sections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, dataclass_transform

import msgspec
from msgspec import Raw, Struct

__all__ = [
    "PROTOCOL_VERSION",
    "UNREADABLE",
    "Abort",
    "Admitted",
    "Attach",
    "Attached",
    "ChildStats",
    "ClientGone",
    "Delivered",
    "Delta",
    "Drain",
    "Drained",
    "EmbedInput",
    "EmbedResult",
    "Embedding",
    "Failed",
    "Finish",
    "GetStats",
    "GetStatus",
    "Hello",
    "OutputLost",
    "Outputs",
    "ProcessStatus",
    "Query",
    "Ready",
    "Register",
    "Rejected",
    "Replay",
    "RequestTimes",
    "Resume",
    "Resync",
    "Shutdown",
    "Stats",
    "Status",
    "StepInput",
    "StepResult",
    "Submit",
    "TextStop",
    "TokenLogprobs",
    "Welcome",
    "WorkerHung",
    "WorkerLost",
    "WorkerReady",
    "decode_from_client",
    "decode_from_control_peer",
    "decode_from_frontend",
    "decode_from_output",
    "decode_from_output_peer",
    "decode_from_supervisor",
    "decode_from_worker",
    "decode_status",
    "decode_step",
    "decode_to_client",
    "encode",
]

PROTOCOL_VERSION = 1


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))  # type checkers: subclasses are frozen too
class _Message(Struct, frozen=True, array_like=True, gc=False):
    """Base of all messages: immutable, an array on the wire, invisible to the garbage collector."""


# --- client -> frontend ---------------------------------------------------------------------------------------------


class Hello(_Message, tag="hello"):
    """First message of a client: the version it speaks."""

    version: int


class Submit(_Message, tag="submit"):
    """A request. `body` is a map whose shape the workflow decides (`GenerateBody`, `EmbedBody`)."""

    request_id: str  # chosen by the client, unique among its running requests
    workflow: str
    body: Raw
    sent_ns: int = 0  # CLOCK_MONOTONIC, for RequestTimes
    traceparent: str = ""  # W3C Trace Context of the caller's span


class Abort(_Message, tag="abort"):
    """Stop a request; it still ends with one terminal message, `finish_reason` "abort"."""

    request_id: str


class GetStats(_Message, tag="get_stats"):
    """Ask for the counters since the last reset."""

    reset: bool = False


# --- frontend -> client ---------------------------------------------------------------------------------------------


class Welcome(_Message, tag="welcome"):
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


class Rejected(_Message, tag="rejected"):
    """A request was not accepted, or the whole group is going: terminal for `request_id`."""

    request_id: str  # "" when the message belongs to no request
    code: str  # see procengine.errors
    message: str


class Stats(_Message, tag="stats"):
    """Counters and percentiles since the last reset, by name."""

    values: dict[str, Any]


# --- client <-> output ----------------------------------------------------------------------------------------------


class Attach(_Message, tag="attach"):
    """First message of a client on the output socket, so that the output process can route to it."""

    version: int


class Attached(_Message, tag="attached"):
    """Answer to Attach: outputs can reach this client now."""

    version: int


class RequestTimes(_Message):
    """When a request passed each stage, in CLOCK_MONOTONIC nanoseconds, one clock for the whole host; 0: it did not."""

    client_sent_ns: int = 0  # as the client says
    received_ns: int = 0  # by the frontend
    prepared_ns: int = 0  # tokenized, its grammar compiled
    admitted_ns: int = 0  # its first step was sent
    first_token_ns: int = 0  # arrived at the output process
    last_token_ns: int = 0
    num_preemptions: int = 0


class TokenLogprobs(_Message):
    """Log probabilities at one position: the chosen token first, then the most likely ones."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]  # 1 is the most likely token


class Delta(_Message, tag="delta"):
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


class Embedding(_Message, tag="embedding"):
    """The vector of one `embed` request: little-endian float32 bytes. Terminal."""

    request_id: str
    data: bytes
    prompt_token_ids: list[int]
    finish_reason: str | None = "stop"
    error: str | None = None
    times: RequestTimes | None = None
    key: int = -1  # see Delta


class Outputs(_Message, tag="outputs"):
    """All that one step brought for one client."""

    items: list[Delta | Embedding]
    sent_ns: int = 0  # CLOCK_MONOTONIC


# --- frontend -> output ---------------------------------------------------------------------------------------------


class Register(_Message, tag="register"):
    """An accepted request: all that the output process needs to turn its tokens into text."""

    key: int
    client: bytes
    request_id: str
    index: int
    workflow: str
    prompt_token_ids: list[int]
    end_position: int  # the sequence is complete when it has this many tokens
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    requested_stop_token_ids: tuple[int, ...] = ()  # those the request itself named: they become the stop_reason
    num_logprobs: int = -1  # alternatives to show; -1 is no logprobs at all
    min_position: int = 0  # stop tokens and stop strings before this position do not count
    num_prompt_logprobs: int = -1
    detokenize: bool = True
    echo: bool = False  # the text begins with the prompt's
    output_kind: str = "delta"  # delta | cumulative | final
    stream_interval: int = 1
    client_sent_ns: int = 0  # see RequestTimes
    received_ns: int = 0
    prepared_ns: int = 0


class Admitted(_Message, tag="admitted"):
    """Requests that got a slot, with the prompt tokens found in the cache; once more after each preemption."""

    keys: list[int]
    num_cached_tokens: list[int]
    sent_ns: int = 0  # when their step was sent


class Finish(_Message, tag="finish"):
    """A request ends for a reason the output process cannot see in the tokens (abort, error)."""

    key: int
    finish_reason: str
    error: str | None = None


class Replay(_Message, tag="replay"):
    """The tokens of a request from `position` on: the answer to Resync, and what a new output process is told."""

    key: int
    position: int
    token_ids: list[int]


class Resume(_Message, tag="resume"):
    """All that a new output process must know has been sent; it takes results and answers clients from here on."""

    epoch: int  # of that output process


# --- output -> frontend ---------------------------------------------------------------------------------------------


class TextStop(_Message, tag="text_stop"):
    """A stop string matched: the request is over, its blocks can go."""

    key: int


class ClientGone(_Message, tag="client_gone"):
    """A client cannot be reached any more: abort all it has running."""

    client: bytes


class Resync(_Message, tag="resync"):
    """Tokens are missing before a position that arrived: send them from `position` on."""

    key: int
    position: int


class Delivered(_Message, tag="delivered"):
    """The last messages of these requests have been sent to their clients."""

    keys: list[int]


# --- frontend -> worker ---------------------------------------------------------------------------------------------


class StepInput(_Message, tag="step"):
    """Header of one generation step; the int32 payload frame holds `step_payload.STEP_SECTIONS` of these sizes.

    Rows are ordered: decode rows (one token each, taken from the device token table), then prefill chunks.
    """

    step_id: int
    epoch: int
    num_rows: int
    num_decode_rows: int
    num_tokens: int
    num_samples: int  # rows that yield a token
    decode_steps: int  # forward passes; more than 1 only without prefill rows
    max_query_len: int
    max_seq_len: int  # after the first forward pass
    features: int  # SamplingFeatures in use by any row
    num_logprobs: int  # most alternatives asked by any row; -1 is none
    sizes: tuple[int, ...]  # int32 elements of each section

    @property
    def workflow(self) -> str:
        """Which workflow's parts understand the payload."""
        return "generate"


class EmbedInput(_Message, tag="embed"):
    """Header of one step of independent sequences without cache; payload: `step_payload.EMBED_SECTIONS`."""

    step_id: int
    epoch: int
    num_rows: int
    num_tokens: int
    max_query_len: int
    sizes: tuple[int, ...]

    @property
    def workflow(self) -> str:
        """Which workflow's parts understand the payload."""
        return "embed"

    @property
    def num_decode_rows(self) -> int:
        """None: nothing is generated."""
        return 0


# --- worker -> frontend and output ----------------------------------------------------------------------------------


class WorkerReady(_Message, tag="worker_ready"):
    """A worker holds its weights and its KV pool and waits for steps."""

    rank: int
    epoch: int
    num_blocks: int


class StepResult(_Message, tag="result"):
    """Header of one forward pass's tokens; payload: `step_payload.RESULT_SECTIONS`."""

    rank: int
    epoch: int
    step_id: int
    micro_step: int
    is_last: bool  # the last result of this step
    num_rows: int
    busy_ns: int  # device loop time of this forward pass
    sizes: tuple[int, ...]

    @property
    def workflow(self) -> str:
        """Which workflow's parts understand the payload."""
        return "generate"


class EmbedResult(_Message, tag="embed_result"):
    """Header of one embed step; payload: int32 keys section, then float32 vectors [num_rows, dim]."""

    rank: int
    epoch: int
    step_id: int
    num_rows: int
    busy_ns: int
    sizes: tuple[int, ...]

    @property
    def is_last(self) -> bool:
        """An embed step has one result."""
        return True

    @property
    def micro_step(self) -> int:
        """An embed step has one forward pass."""
        return 0

    @property
    def workflow(self) -> str:
        """Which workflow's parts understand the payload."""
        return "embed"


# --- supervisor <-> its children and the command line ---------------------------------------------------------------


class Ready(_Message, tag="ready"):
    """A child is up. `facts` are for the ready line and the log."""

    role: str
    rank: int
    pid: int
    facts: dict[str, int | float | str]


class Failed(_Message, tag="failed"):
    """A child cannot start or go on; it exits after this."""

    role: str
    rank: int
    message: str
    traceback: str


class Query(_Message, tag="query"):
    """Supervisor asks a child for ChildStats."""

    query_id: int


class ChildStats(_Message, tag="child_stats"):
    """A child's answer to Query."""

    query_id: int
    state: str
    queue_depth: int


class Drain(_Message, tag="drain"):
    """Supervisor to frontend: take no new requests, finish the running ones within this time, abort the rest."""

    timeout_s: float


class Drained(_Message, tag="drained"):
    """Frontend to supervisor: nothing is running any more."""


class WorkerHung(_Message, tag="worker_hung"):
    """Frontend to supervisor: this worker has steps to run, and no result of it has come for too long."""

    rank: int
    epoch: int


class WorkerLost(_Message, tag="worker_lost"):
    """Supervisor to frontend: this worker is gone, and another one, of the next epoch, takes its place."""

    rank: int
    epoch: int  # of the one that is gone


class OutputLost(_Message, tag="output_lost"):
    """Supervisor to frontend: the output process is gone, and another one, of the next epoch, takes its place."""

    epoch: int  # of the one that is gone


class Shutdown(_Message, tag="shutdown"):
    """Supervisor to a child: end now. With an `error`, tell every client with unfinished requests why."""

    error: str | None = None


class GetStatus(_Message, tag="get_status"):
    """Command line to supervisor: the state of every process."""


class ProcessStatus(_Message):
    """One line of `procengine ps`."""

    role: str
    rank: int
    pid: int
    state: str
    uptime_s: float
    rss_bytes: int
    cpu_s: float
    queue_depth: int
    num_restarts: int = 0


class Status(_Message, tag="status"):
    """Answer to GetStatus."""

    group: str
    model: str
    processes: list[ProcessStatus]


# --- one encoder, one decoder a receiving end -----------------------------------------------------------------------

encode = msgspec.msgpack.Encoder().encode

# What a decoder raises for bytes that are no message of its union; the second is for those that nest too deep.
UNREADABLE = (msgspec.DecodeError, RecursionError)

FromClient = Hello | Submit | Abort | GetStats
ToClient = Welcome | Rejected | Stats | Attached | Outputs
FromFrontend = Register | Admitted | Finish | Replay | Resume
FromOutput = TextStop | ClientGone | Resync | Delivered
Step = StepInput | EmbedInput
FromWorker = WorkerReady | StepResult | EmbedResult
FromSupervisor = Query | Drain | WorkerLost | OutputLost | Shutdown
FromControlPeer = Ready | Failed | ChildStats | Drained | WorkerHung | GetStatus


decode_from_client: Callable[[bytes], FromClient] = msgspec.msgpack.Decoder(FromClient).decode
decode_from_output_peer: Callable[[bytes], Attach] = msgspec.msgpack.Decoder(Attach).decode
decode_to_client: Callable[[bytes], ToClient] = msgspec.msgpack.Decoder(ToClient).decode
decode_from_frontend: Callable[[bytes], FromFrontend] = msgspec.msgpack.Decoder(FromFrontend).decode
decode_from_output: Callable[[bytes], FromOutput] = msgspec.msgpack.Decoder(FromOutput).decode
decode_step: Callable[[bytes], Step] = msgspec.msgpack.Decoder(Step).decode
decode_from_worker: Callable[[bytes], FromWorker] = msgspec.msgpack.Decoder(FromWorker).decode
decode_from_supervisor: Callable[[bytes], FromSupervisor] = msgspec.msgpack.Decoder(FromSupervisor).decode
decode_from_control_peer: Callable[[bytes], FromControlPeer] = msgspec.msgpack.Decoder(FromControlPeer).decode
decode_status: Callable[[bytes], Status] = msgspec.msgpack.Decoder(Status).decode
