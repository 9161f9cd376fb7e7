"""Models with random weights, on the device, without a file.

Owns: their sizes and weights. Never does: run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from procengine.bench.roofline import DecoderShape
from procengine.config import ModelConfig
from procengine.kernels.backends import Conditions
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import TORCH_OPERATIONS, open_operations
from procengine.models.llama import LlamaModel
from procengine.models.loader import destinations
from procengine.models.new_tensors import NewTensors
from procengine.models.tensor_names import EMBEDDING

__all__ = [
    "BLOCK_SIZE",
    "SHAPES",
    "Checkpoint",
    "build",
    "dtype_name",
    "make_config",
    "make_weights",
    "num_weight_bytes",
    "oracle_of",
    "read_weights",
    "shape_of",
]

Checkpoint = Mapping[str, Tensor]  # by their names in a file, on the device

# vocab, hidden, intermediate, layers, heads, kv heads, head dim; those of public models of these sizes.
SHAPES: dict[str, tuple[int, int, int, int, int, int, int]] = {
    "135M": (49152, 576, 1536, 30, 9, 3, 64),
    "1B": (32000, 2048, 5632, 22, 32, 4, 64),
    "8B": (128256, 4096, 14336, 32, 32, 8, 128),
    "tiny": (300, 64, 96, 2, 4, 2, 16),
}
_MAX_POSITIONS = 4096
BLOCK_SIZE = 16


def make_config(name: str) -> ModelConfig:
    """A Llama of that size. Head and embedding are two matrices: tied random ones only repeat their input."""
    vocab, hidden, intermediate, layers, heads, kv_heads, head_dim = SHAPES[name]
    return ModelConfig(
        name=name,
        path="",
        format="safetensors",
        architecture="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_MAX_POSITIONS,
    )


def shape_of(config: ModelConfig) -> DecoderShape:
    """For the roofline."""
    names = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
    return DecoderShape(**{name: getattr(config, name) for name in names})


def num_weight_bytes(config: ModelConfig, bits: float) -> float:
    """What a decode step reads of the matrices."""
    shape = shape_of(config)
    return (shape.num_layer_weights + shape.num_head_weights) * bits / 8


def make_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Checkpoint:
    """Random, and the same for every dtype but for its rounding: each matrix keeps the size of what passes through."""
    generator = torch.Generator(device).manual_seed(5)
    weights = dict(destinations(LlamaModel(config, NewTensors(dtype, device), TORCH_OPERATIONS)))
    for name, tensor in weights.items():
        drawn = torch.randn(tensor.shape, generator=generator, device=device)
        if tensor.dim() == 1:
            drawn.mul_(0.1).add_(1.0)
        elif name != EMBEDDING:
            drawn.mul_(tensor.shape[-1] ** -0.5)
        tensor.copy_(drawn)
    return weights


def read_weights(config: ModelConfig, device: torch.device) -> Checkpoint:
    """A checkpoint's, in float32."""
    from procengine.models.loader import read_into
    from procengine.models.weights import open_weights

    source = open_weights(config)
    weights = dict(destinations(LlamaModel(config, NewTensors(torch.float32, device), TORCH_OPERATIONS)))
    for name, tensor in weights.items():
        read_into(source, name, tensor)
    return weights


def build(
    config: ModelConfig, weights: Checkpoint, backend: str = "auto", kind: WeightKind | None = None
) -> LlamaModel:
    """The model with copies of these weights, rounded to `kind` as the loader does. `backend`: of all operations; auto
    is what a worker of this device takes."""
    device, dtype = weights[EMBEDDING].device, weights[EMBEDDING].dtype
    conditions = Conditions(device.type, dtype_name(weights), BLOCK_SIZE, config.head_dim)
    new, meta = NewTensors(dtype, device), NewTensors(dtype, "meta")
    operations = open_operations(backend, conditions, rowwise_backend=backend)
    model = LlamaModel(config, new, operations, in_layers=meta)
    _fill(model.outer_destinations(), "", weights)
    for index in range(config.num_layers):
        layer = model.replace_layer(index, new)
        _fill(layer.destinations(), model.layer_prefix(index), weights)
        if kind is not None:
            layer.quantize(kind, dtype)
    if kind is not None:
        model.quantize_head("int8" if kind == "int4" else kind)
    return model


def _fill(places: Iterable[tuple[str, Tensor]], prefix: str, weights: Checkpoint) -> None:
    for name, place in places:
        place.copy_(weights[prefix + name])


def dtype_name(weights: Checkpoint) -> str:
    """Of the floats."""
    return str(weights[EMBEDDING].dtype).removeprefix("torch.")


def oracle_of(config: ModelConfig, weights: Checkpoint, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' model with copies of these weights, in `dtype`."""
    import transformers

    names = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "rms_norm_eps", "max_position_embeddings")
    own = transformers.LlamaConfig(
        **{name: getattr(config, name) for name in names},
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        tie_word_embeddings=config.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(own)
    model = model.to_empty(device=device).to(dtype).eval()
    model.tie_weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        for module in model.modules():  # what is not in a checkpoint was never computed on the meta device
            if type(module).__name__ == "LlamaRotaryEmbedding":
                fresh = type(module)(own).to(device)
                module.inv_freq = module.original_inv_freq = fresh.inv_freq
    return model
