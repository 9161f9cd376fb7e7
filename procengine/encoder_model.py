"""`EncoderModel`: a bidirectional encoder in memory, as runners see it; and the two ways to have one.

Owns: how arrays are handed to the native kernels, or to torch. Never does: read a checkpoint, or arithmetic, or load
torch where it does not compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from procengine.kernels.encoder.native import Encoder
    from procengine.models.torch_encoder import TorchEncoder

__all__ = ["EncoderModel", "NativeEncoderModel", "TorchEncoderModel"]

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class EncoderModel(Protocol):
    """Weights in memory. One caller at a time."""

    @property
    def facts(self) -> dict[str, int | float | str]:
        """For the log: how the weights are kept and what computes with them."""
        ...

    def encode(
        self, input_ids: Int32s, token_types: Int32s | None, query_start_loc: Int32s, num_layers: int | None
    ) -> Float32s:
        """Hidden states [T, hidden_size] of whole sequences, one behind the other, without a cache.

        input_ids, token_types: int32 [T]; query_start_loc: int32 [R + 1]; num_layers: how many are run, None is all.
        """
        ...


class NativeEncoderModel:
    """An `Encoder` of the native library."""

    def __init__(self, encoder: Encoder, isa: str) -> None:
        self._encoder = encoder
        self.facts: dict[str, int | float | str] = {
            "kernels": "native",
            "quantization": "int14",
            "weights_mb": round(encoder.num_bytes / 1e6, 1),
            "isa": isa,
        }

    def encode(
        self, input_ids: Int32s, token_types: Int32s | None, query_start_loc: Int32s, num_layers: int | None
    ) -> Float32s:
        return self._encoder.forward(input_ids, token_types, query_start_loc, num_layers)


class TorchEncoderModel:
    """A `TorchEncoder`."""

    def __init__(self, encoder: TorchEncoder) -> None:
        self._encoder = encoder
        self.facts: dict[str, int | float | str] = {"kernels": "torch", "quantization": "none"}

    def encode(
        self, input_ids: Int32s, token_types: Int32s | None, query_start_loc: Int32s, num_layers: int | None
    ) -> Float32s:
        import torch

        device = self._encoder.device
        with torch.inference_mode():
            ids = torch.from_numpy(input_ids.astype(np.int64)).to(device)
            types = None if token_types is None else torch.from_numpy(token_types.astype(np.int64)).to(device)
            hidden = self._encoder.forward(ids, types, np.diff(query_start_loc).tolist(), num_layers)
            found: Float32s = hidden.float().cpu().numpy()
            return found
