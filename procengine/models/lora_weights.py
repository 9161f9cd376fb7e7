"""The weights of a PEFT adapter, checked against the model: all of it, before any of it is used.

Owns: the names of an adapter's tensors, and the order of rows that the model has. Never does: load torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.kernels.native.arguments import BFLOAT16, to_float32
from procengine.lora_targets import LoraTarget, lora_targets
from procengine.models.lora_config import read_lora_config
from procengine.models.rotary import pairing_order
from procengine.safetensors_file import SafetensorsFile

__all__ = ["LoraPart", "LoraWeights", "read_lora_weights"]

Float32s = NDArray[np.float32]

WEIGHTS_FILE: Final = "adapter_model.safetensors"
_NAME: Final = re.compile(r"base_model\.model\.(?:model\.)?(?:layers\.(\d+)\.)?(.+)\.lora_([AB])\.weight")
_DTYPES: Final[dict[str, np.dtype[Any]]] = {"F32": np.dtype(np.float32), "BF16": BFLOAT16, "F16": np.dtype(np.float16)}


class LoraPart(NamedTuple):
    """What an adapter adds to one module of one layer: `b @ (a @ x)`; the scaling is in `b`."""

    layer: int
    target: LoraTarget
    a: Float32s  # [rank, inputs]
    b: Float32s  # [outputs, rank]


class LoraWeights(NamedTuple):
    """All parts of an adapter."""

    parts: tuple[LoraPart, ...]


def read_lora_weights(folder: Path, model: ModelConfig, max_rank: int) -> LoraWeights:
    """The adapter in `folder`.

    Raises ModelError, naming the file and the field or tensor: something is missing, has another shape than the model
    wants, is of a module that takes no adapters, or of a rank over the limit.
    """
    config = read_lora_config(folder)
    if config.rank > max_rank:
        raise ModelError(f"{folder}: r: the adapter has rank {config.rank}, the limit (max_lora_rank) is {max_rank}")
    file = _open_weights(folder)
    pairs = _pairs(file, model)
    parts = []
    for (layer, module), sides in sorted(pairs.items()):
        if sides.keys() != {"A", "B"}:
            (there,) = sides.values()
            raise ModelError(f"{file.path}: tensor {there} is there without its other half")
        target = lora_targets(model)[module]
        a, b = _read(file, sides["A"]), _read(file, sides["B"])
        _check_shapes(file, sides, a, b, target, max_rank)
        parts.append(LoraPart(layer, target, a, _in_model_order(b * np.float32(config.scaling(len(a))), target, model)))
    return LoraWeights(tuple(parts))


def _open_weights(folder: Path) -> SafetensorsFile:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        others = [name for name in ("adapter_model.bin",) if (folder / name).is_file()]
        hint = f"; {others[0]} is a pickle, which is not read here: save the adapter as safetensors" if others else ""
        raise ModelError(f"{folder}: there is no {WEIGHTS_FILE}{hint}")
    file = SafetensorsFile(path)
    if not file.tensors:
        raise ModelError(f"{path}: holds no tensors")
    return file


def _pairs(file: SafetensorsFile, model: ModelConfig) -> dict[tuple[int, str], dict[str, str]]:
    """(layer, module) -> side (A or B) -> name of the tensor."""
    known = lora_targets(model)
    pairs: dict[tuple[int, str], dict[str, str]] = {}
    for name in file.tensors:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelError(f"{file.path}: tensor {name:.200} is none of a LoRA adapter as PEFT saves them")
        layer, module, side = match.groups()
        if layer is None or module not in known:
            modules = ", ".join(sorted(known))
            raise ModelError(f"{file.path}: tensor {name:.200}: {module} takes no adapter in this model; do: {modules}")
        if int(layer) >= model.num_layers:
            raise ModelError(f"{file.path}: tensor {name:.200}: this model has {model.num_layers} layers")
        pairs.setdefault((int(layer), module), {})[side] = name
    return pairs


def _read(file: SafetensorsFile, name: str) -> Float32s:
    info = file.tensors[name]
    if info.dtype not in _DTYPES:
        raise ModelError(f"{file.path}: tensor {name} is stored as {info.dtype}, it must be F32, F16 or BF16")
    values = to_float32(file.tensor_bytes(name).view(_DTYPES[info.dtype]))
    if not np.isfinite(values).all():
        raise ModelError(f"{file.path}: tensor {name} holds values that are no finite numbers")
    return values.reshape(info.shape)


def _check_shapes(
    file: SafetensorsFile, sides: dict[str, str], a: Float32s, b: Float32s, target: LoraTarget, max_rank: int
) -> None:
    rank = a.shape[0] if a.ndim == 2 else 0
    for side, found, expected in (
        ("A", a.shape, (rank, target.num_inputs)),
        ("B", b.shape, (target.num_outputs, rank)),
    ):
        if found != expected or not rank:
            shown = [size or "rank" for size in expected]
            raise ModelError(f"{file.path}: tensor {sides[side]} has shape {list(found)}, expected {shown}")
    if rank > max_rank:
        raise ModelError(f"{file.path}: tensor {sides['A']} has rank {rank}, the limit (max_lora_rank) is {max_rank}")


def _in_model_order(b: Float32s, target: LoraTarget, model: ModelConfig) -> Float32s:
    """Rows as the model has those of its own matrix: it reorders the dimensions of heads that turn in part."""
    rotary_dim, head_dim = model.decoder.rotary_dim, model.head_dim
    if target.matrix != "qkv" or rotary_dim is None or rotary_dim >= head_dim:
        return b
    order = pairing_order(head_dim, rotary_dim)
    num_turned = (model.num_heads + model.num_kv_heads) * head_dim  # queries and keys
    rows = np.arange(target.first_output, target.first_output + target.num_outputs)
    heads = rows.reshape(-1, head_dim)
    heads = np.where(heads < num_turned, heads[:, order], heads)
    return b[heads.ravel() - target.first_output]
