"""`Executor`: what runs a forward pass, whichever way: in torch, or in one native call.

Owns: the values that go in and out. Never does: compute, or know a step's message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol

from procengine.arrays import A, Arrays
from procengine.kernels.lora import AdapterBlocks
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kv_tensors import KVTensors

__all__ = ["Executor", "ForwardBatch", "Model"]


@dataclass(frozen=True, slots=True)
class ForwardBatch(Generic[A]):
    """R rows with T query tokens in all, decode rows (one query token) first. A row's tokens are the last of its
    context; for the layers of a group (`LayerGroups`) position p, if they see it, lies in block
    `block_tables[group, slot, p // block_size]`. Other entries are block ids too. Arrays are on the device."""

    input_ids: A  # int32 [T]
    positions: A  # int64 [T]
    query_start_loc: A  # int32 [R + 1]
    seq_lens: A  # int32 [R], this step's tokens included
    slots: A  # int64 [R], each row's in `block_tables`
    block_tables: A  # int32 [groups, slots + 1, blocks], of rows that are not in the batch too; the last is nobody's
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    wanted: A | None  # int64 [W], ascending: tokens whose hidden states are asked for; None: all
    adapters: AdapterBlocks[A] | None = None  # of tokens that have one; None: none has


class Executor(Protocol[A]):
    """A model over a paged cache. One caller at a time, without gradients (`Arrays`)."""

    def prepare(self, block_tables: A) -> None:
        """Before the first step: get ready for steps with these tables, the same array for all of them."""
        ...

    def forward(self, batch: ForwardBatch[A]) -> A:
        """Writes keys and values of all tokens; gives hidden states after the final norm, [W, hidden_size]."""
        ...

    def compute_logits(self, hidden: A) -> A:
        """Next-token logits, float32 [S, vocab_size], of rows of hidden states as `forward` gives them."""
        ...

    def greedy_tokens(self, hidden: A) -> A:
        """int32 [S]: where each row's logits have their first maximum."""
        ...

    def sample(self, logits: A, columns: SamplingColumns[A], features: SamplingFeatures) -> A:
        """int32 [S]: a token for each row of logits, float32 [S, V]; the same whichever executor draws it."""
        ...


class Model(Protocol[A]):
    """Weights in memory."""

    @property
    def arrays(self) -> Arrays[A]:
        """Arrays where the model is: what it takes, and gives."""
        ...

    @property
    def facts(self) -> dict[str, int | float | str]:
        """For the log: how the weights are kept and what computes with them."""
        ...

    def open(self, cache: KVTensors[A]) -> Executor[A]:
        """The forward pass over `cache`."""
        ...

    def encode(
        self, input_ids: A, positions: A, query_start_loc: A, max_query_len: int, num_layers: int | None = None
    ) -> A:
        """Hidden states after the final norm, [T, hidden_size], of whole sequences, without a cache.

        input_ids: int32 [T], sequences one behind the other; positions: int64 [T]; query_start_loc: int32 [R + 1];
        num_layers: only the first so many layers are run, and what comes out of them is not normed. None: all.
        """
        ...

    def compute_logits(self, hidden: A) -> A:
        """As `Executor.compute_logits`."""
        ...
