"""What the loaders ask of a checkpoint, whatever its file format.

Owns: the protocol, and which reader a format has. Never does: read anything itself, or load torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from procengine.config import ModelConfig

__all__ = ["RowPiece", "WeightSource", "open_weights"]


class RowPiece(NamedTuple):
    """Some rows of a tensor, [n, ...]: float32, float16 or, as uint16, bfloat16; or, with a `ggml_type`, the blocks as
    they are stored, uint8 [n, bytes]. Values may be views of a mapped file, of any alignment and read-only."""

    rows: NDArray[np.int64]  # [n], where they stand in the tensor
    values: NDArray[Any]
    ggml_type: str | None


class WeightSource(Protocol):
    """Tensors by their Hugging Face names. `pieces` may be called from several threads at once."""

    @property
    def names(self) -> Collection[str]:
        """All tensors that can be read."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, outermost dimension first, without reading it. `name` is one of `names`."""
        ...

    def ggml_type(self, name: str) -> str | None:
        """The block format that the tensor is stored in ("Q4_0", ...), or None where it is plain floats."""
        ...

    def pieces(self, name: str, *, keep_blocks: bool) -> Iterator[RowPiece]:
        """All rows of the tensor `name`, a few at a time; as blocks, with `keep_blocks`, where it is stored so. What a
        piece took of memory goes when the next one is asked for.

        Raises ModelError, naming the tensor, when its stored type cannot be decoded.
        """
        ...


def open_weights(config: ModelConfig) -> WeightSource:
    """The reader for the checkpoint's format."""
    if config.format == "gguf":
        from procengine.models.gguf_weights import GGUFWeights

        return GGUFWeights(Path(config.path), config.num_heads, config.num_kv_heads)
    from procengine.models.safetensors_weights import SafetensorsWeights

    prefix = "transformer." if config.architecture == "gpt2" else "model."
    return SafetensorsWeights(Path(config.path), prefix)
