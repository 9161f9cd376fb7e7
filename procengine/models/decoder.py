"""What the executor in torch asks of a model, whichever class implements it.

Owns: the protocols. Never does: compute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.kernels.attention import AttentionSpec, Rotation
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import Operations
from procengine.models.lora_bank import LoraPass
from procengine.models.new_tensors import NewTensors

__all__ = ["AdaptedDecoder", "AttentionCallback", "Decoder", "DecoderClass", "DecoderLayer", "LoadableDecoder"]

# attention(layer_index, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D], rotation) -> [T, H, D]. Queries and keys are not yet
# turned: whoever attends turns them, in the pass that stores the keys if it can. None: they are not to be turned.
AttentionCallback = Callable[[int, Tensor, Tensor, Tensor, Rotation | None], Tensor]


class DecoderLayer(Protocol):
    """A block of a decoder, as loading it sees it."""

    def destinations(self) -> Iterator[tuple[str, Tensor]]:
        """Every checkpoint tensor that it needs, with the (slice of a) tensor it fills. Together they fill all."""
        ...

    def settle(self) -> None:
        """To be called once, when all is filled: brings what checkpoints write in another form into ours."""
        ...

    def quantize(self, kind: WeightKind, dtype: torch.dtype) -> None:
        """Rounds its matrices, and brings its vectors to `dtype`. Raises ConfigError for sizes that cannot be."""
        ...


class Decoder(Protocol):
    """A model whose attention is left to the caller. Call it under `torch.inference_mode()`."""

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """How each layer attends."""
        ...

    @property
    def num_layers(self) -> int:
        """As many as `attention` has entries."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        ...

    @property
    def head_dim(self) -> int:
        """Their size."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of its tensors."""
        ...

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        ...

    @property
    def operations(self) -> Operations:
        """What it computes with."""
        ...

    @property
    def quantization(self) -> str:
        """How the blocks' matrices are rounded; "none" if they are not."""
        ...

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionCallback, num_layers: int | None = None
    ) -> Tensor:
        """Hidden states after the final norm, [T, hidden_size] in the model's dtype.

        input_ids, positions: int32 or int64 [T], tokens of any number of sequences; `attention` knows which is which.
        num_layers: only the first so many layers are run, and what comes out of them is not normed. None: all.
        """
        ...

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits. hidden: [S, hidden_size], rows of `forward`'s result; returns float32 [S, vocab_size]."""
        ...


class AdaptedDecoder(Decoder, Protocol):
    """A model whose projections take adapters."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionCallback,
        num_layers: int | None = None,
        adapters: LoraPass | None = None,
    ) -> Tensor:
        """The same, with what `adapters` add to the projections."""
        ...


class LoadableDecoder(Decoder, Protocol):
    """A model whose weights `loader` fills."""

    @property
    def layers(self) -> Sequence[DecoderLayer]:
        """Its blocks."""
        ...

    def replace_layer(self, index: int, new: NewTensors) -> DecoderLayer:
        """The block of that index, made anew."""
        ...

    def layer_prefix(self, index: int) -> str:
        """What goes before the names of a block's tensors."""
        ...

    def outer_destinations(self) -> Iterator[tuple[str, Tensor]]:
        """As `DecoderLayer.destinations`, of what is not in a layer."""
        ...

    def settle_outer(self) -> None:
        """As `DecoderLayer.settle`."""
        ...

    def quantize_head(self, kind: WeightKind) -> None:
        """Rounds the head; the embedding, of which a step reads a few rows, stays as it is."""
        ...


class DecoderClass(Protocol):
    """An implementation: makes a model with uninitialised weights, those of layers by `in_layers`."""

    def __call__(
        self, config: ModelConfig, new: NewTensors, operations: Operations, in_layers: NewTensors | None = None
    ) -> LoadableDecoder: ...
