"""An encoder's checkpoint, packed for the native kernels layer by layer.

Owns: that order. Never does: name a tensor (`encoder_weights`), compute, or load torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from procengine.kernels.encoder.native import Encoder, EncoderLayer, EncoderSizes, EncoderTables, WideMatrix
from procengine.models.encoder_weights import EncoderBlock, EncoderCheckpoint

__all__ = ["load_packed_encoder"]


def load_packed_encoder(checkpoint: EncoderCheckpoint, *, progress: bool) -> Encoder:
    """Read and pack all weights. `progress` draws a bar on stderr.

    Raises ModelError naming the tensor that is missing, of the wrong shape or of an unreadable type.
    """
    config, encoder = checkpoint.config, checkpoint.encoder
    outside = checkpoint.embedding()
    tables = EncoderTables(
        outside.tokens,
        outside.positions,
        outside.types,
        *(outside.norm, outside.norm_bias),
        *(outside.final_norm, outside.final_norm_bias),
    )
    indices = tqdm(range(config.num_layers), desc="Loading layers", disable=not progress)
    layers = [_layer(checkpoint.block(index)) for index in indices]
    sizes = EncoderSizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        encoder.norm_eps,
        encoder.activation,
        encoder.is_gated,
        encoder.is_pre_norm,
    )
    return Encoder(sizes, tables, layers)


def _layer(block: EncoderBlock) -> EncoderLayer:
    return EncoderLayer(
        *(block.attention_norm, block.attention_norm_bias, block.mlp_norm, block.mlp_norm_bias),
        *(block.qkv_bias, block.output_bias, block.up_bias, block.down_bias, block.cos, block.sin),
        *(_packed(block.qkv), _packed(block.output), _packed(block.up), _packed(block.down)),
        block.window,
    )


def _packed(weights: NDArray[np.float32]) -> WideMatrix:
    matrix = WideMatrix(*weights.shape)
    matrix.pack(weights)
    return matrix
