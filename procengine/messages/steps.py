"""Headers of steps and of their results; the arrays travel beside them (`procengine.step_payload`)."""

from __future__ import annotations

from procengine.messages.base import Message

__all__ = [
    "AdapterLoaded",
    "Begin",
    "EmbedInput",
    "EmbedResult",
    "LoadAdapter",
    "StepFailed",
    "StepInput",
    "StepResult",
    "WorkerReady",
]


# --- frontend -> worker -----------------------------------------------------------------------------------------------


class Begin(Message, tag="begin"):
    """First message of a frontend that is not the group's first: forget what was of earlier ones, say WorkerReady."""

    epoch: int  # of the frontend


class LoadAdapter(Message, tag="load_adapter"):
    """Read the LoRA adapter of this folder, and let it have this place from then on; say AdapterLoaded."""

    number: int  # of this loading, by this frontend
    place: int
    path: str


class StepInput(Message, tag="step"):
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


class EmbedInput(Message, tag="embed"):
    """Header of one step of independent sequences without cache; payload: `step_payload.EMBED_SECTIONS`."""

    step_id: int
    epoch: int
    num_rows: int
    num_tokens: int
    max_query_len: int
    sizes: tuple[int, ...]
    workflow: str = "embed"  # whose parts understand the payload
    options: tuple[int, ...] = ()  # what is made of all its sequences; the workflow knows what they mean
    num_sequence_tokens: int = 0  # of a step that is a piece of one sequence: tokens of the whole; 0: all are whole

    @property
    def num_decode_rows(self) -> int:
        """None: nothing is generated."""
        return 0


# --- worker -> frontend and output ------------------------------------------------------------------------------------


class WorkerReady(Message, tag="worker_ready"):
    """A worker holds its weights and its KV pool and waits for steps."""

    rank: int
    epoch: int
    num_blocks: int


class AdapterLoaded(Message, tag="adapter_loaded"):
    """Answer to LoadAdapter: steps that come after this may use the adapter."""

    rank: int
    epoch: int
    number: int
    error: str | None = None  # why it cannot be


class StepFailed(Message, tag="step_failed"):
    """The memory of the device did not suffice for this step. The worker has no slots now, and takes no step before
    the next Begin; what earlier steps gave counts."""

    rank: int
    epoch: int
    step_id: int
    keys: list[int]  # of the step's requests
    error: str


class StepResult(Message, tag="result"):
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


class EmbedResult(Message, tag="embed_result"):
    """Header of the result of such a step; payload: int32 keys, float32 numbers of all rows, and int32 how many numbers
    each row has, which is empty where all have as many."""

    rank: int
    epoch: int
    step_id: int
    num_rows: int
    busy_ns: int
    sizes: tuple[int, ...]
    workflow: str = "embed"

    @property
    def is_last(self) -> bool:
        """An embed step has one result."""
        return True

    @property
    def micro_step(self) -> int:
        """An embed step has one forward pass."""
        return 0
