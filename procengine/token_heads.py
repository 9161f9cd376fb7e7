"""Hidden states to something of each token, by a linear layer: the worker's part of `embed_sparse` and `embed_multi`.

Owns: bge-m3's two heads (Chen et al., 2024, arXiv 2402.03216). Never does: read a file, or know which token is which:
that weights of equal tokens become one is the output process's part (`lexical_outputs`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from procengine.encoder_runner import EncoderRunner, Options, Reduced
from procengine.errors import ConfigError
from procengine.kernels.pooling.native import normalized

if TYPE_CHECKING:
    from procengine.encoder_device import EncoderDevice
    from procengine.models.linear_file import LinearFile

__all__ = ["open_embed_multi", "open_embed_sparse", "token_vectors", "token_weights"]

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


def token_weights(hidden: Float32s, bounds: Int32s, linear: LinearFile) -> Reduced:
    """One weight for each token, none below 0: float32 [T] of hidden states [T, H]; bounds: int32 [R + 1]."""
    weights = np.maximum(hidden @ linear.weight[0] + linear.bias[0], np.float32(0))
    return Reduced(weights, np.diff(bounds))


def token_vectors(hidden: Float32s, bounds: Int32s, linear: LinearFile) -> Reduced:
    """A vector of length 1 for each token but a sequence's first: float32 [T - R, V] of hidden states [T, H]."""
    is_kept = np.ones(len(hidden), np.bool_)
    is_kept[bounds[:-1]] = False
    vectors = normalized(hidden[is_kept] @ linear.weight.T + linear.bias)
    return Reduced(vectors, (np.diff(bounds) - 1) * np.int32(linear.weight.shape[0]))


def open_embed_sparse(device: EncoderDevice) -> EncoderRunner:
    """The runner of `embed_sparse` steps."""
    linear = _given("embed_sparse", device, device.sparse_linear)

    def reduce(hidden: Float32s, bounds: Int32s, _options: Options) -> Reduced:
        return token_weights(hidden, bounds, linear)

    return EncoderRunner("embed_sparse", device.model, reduce)


def open_embed_multi(device: EncoderDevice) -> EncoderRunner:
    """The runner of `embed_multi` steps."""
    linear = _given("embed_multi", device, device.colbert_linear)

    def reduce(hidden: Float32s, bounds: Int32s, _options: Options) -> Reduced:
        return token_vectors(hidden, bounds, linear)

    return EncoderRunner("embed_multi", device.model, reduce)


def _given(workflow: str, device: EncoderDevice, linear: LinearFile | None) -> LinearFile:
    if linear is None:
        raise ConfigError(f"{workflow}: {device.config.model.name} has no layer for it")
    return linear
