"""From a ModelConfig to a model in torch that can run.

Owns: checking a checkpoint against the model and filling the weights. Never does: choose dtype, device or model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager

import msgspec
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from procengine.config import ModelConfig, Quantization
from procengine.errors import ModelError
from procengine.kernels.linear.quantized import quantize
from procengine.kernels.operations import TORCH_OPERATIONS, Operations
from procengine.models.llama import LlamaModel
from procengine.models.llama_weights import (
    LayerWeights,
    LlamaWeights,
    allocate_layer,
    allocate_weights,
    layer_destinations,
    quantized_layer,
    weight_destinations,
)
from procengine.models.registry import find_implementation
from procengine.models.rotary import rotary_table
from procengine.models.weights import WeightSource, open_weights

__all__ = ["load_model", "read_into"]


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    progress: bool,
    operations: Operations = TORCH_OPERATIONS,
    quantization: Quantization = "none",
) -> LlamaModel:
    """Read `config.path` and build the model, which computes with `operations`.

    Each tensor is decoded straight into its place, so memory peaks at the model plus a few tensors; with
    `quantization`, at the rounded model plus a block in float32. Raises ModelError naming the tensor that is missing,
    of the wrong shape or of an unreadable type. `progress` draws a bar on stderr.
    """
    implementation = find_implementation(config.architecture)
    with torch.inference_mode():
        source = open_weights(config)
        # Before anything is allocated: sizes that the configuration claims and the file does not have cost nothing.
        _check(source, weight_destinations(config, allocate_weights(config, dtype, "meta")), config)
        weights = _read_weights(config, source, dtype, device, quantization, progress)
        rotary = rotary_table(config)
    return implementation(config, weights, rotary, operations)


def _read_weights(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: str | torch.device,
    quantization: Quantization,
    progress: bool,
) -> LlamaWeights:
    with _progress_bar(config, progress) as bar:
        # stored: as a GGUF file's blocks, which a model in torch has as floats
        if quantization == "none" or quantization == "stored":
            weights = allocate_weights(config, dtype, device)
            _read_all(source, list(weight_destinations(config, weights)), bar)
            return weights
        assert quantization != "int14", "of encoders alone"
        bare = msgspec.structs.replace(config, num_layers=0)
        outside = allocate_weights(bare, dtype, device)
        _read_all(source, list(weight_destinations(bare, outside)), bar)
        layers: list[LayerWeights] = []
        for index in range(config.num_layers):
            layer = allocate_layer(config, torch.float32, device)
            _read_all(source, list(layer_destinations(config, layer, index)), bar)
            layers.append(quantized_layer(layer, quantization, dtype))
        assert isinstance(outside.lm_head, Tensor)
        # Four bits would harm the head most; the embedding, of which a step reads a few rows, stays as it is.
        head = quantize(outside.lm_head, "int8" if quantization == "int4" else quantization)
        return LlamaWeights(outside.embedding, tuple(layers), outside.final_norm, head)


@contextmanager
def _progress_bar(config: ModelConfig, progress: bool) -> Iterator[tqdm]:
    total = sum(one.numel() for _, one in weight_destinations(config, allocate_weights(config, torch.float32, "meta")))
    with tqdm(total=total, desc="Loading weights", unit="", unit_scale=True, disable=not progress) as bar:
        yield bar


def read_into(source: WeightSource, name: str, destination: Tensor) -> None:
    """Fill `destination` (of the tensor's shape; any floating dtype, any device) with the tensor's values.

    Raises ModelError, naming the tensor, when its stored type cannot be decoded.
    """
    for rows, values, _ in source.pieces(name, keep_blocks=False):
        copied = torch.from_numpy(np.array(values))  # torch warns about views of read-only memory
        copied = copied.view(torch.bfloat16) if copied.dtype == torch.uint16 else copied
        first, last = int(rows[0]), int(rows[-1])
        if np.array_equal(rows, np.arange(first, last + 1)):
            destination[first : last + 1].copy_(copied)
        else:
            destination[torch.from_numpy(rows).to(destination.device)] = copied.to(destination)


def _check(source: WeightSource, destinations: Iterable[tuple[str, Tensor]], config: ModelConfig) -> None:
    """Every tensor is there and has its shape: known before the slow part, so that a wrong file fails at once."""
    for name, destination in destinations:
        if name not in source.names:
            raise ModelError(f"{config.path}: tensor {name} is missing")
        expected, found = tuple(destination.shape), source.shape(name)
        if found != expected:
            raise ModelError(f"{config.path}: tensor {name} has shape {list(found)}, expected {list(expected)}")


def _read_all(source: WeightSource, destinations: list[tuple[str, Tensor]], bar: tqdm) -> None:
    """Decode in threads (numpy and torch release the GIL), the largest tensors first so that none is left over."""
    largest_first = sorted(destinations, key=lambda item: -item[1].numel())
    with ThreadPoolExecutor(max_workers=torch.get_num_threads(), thread_name_prefix="load") as pool:
        pending = {pool.submit(_read, source, name, destination): destination for name, destination in largest_first}
        try:
            for done in as_completed(pending):
                done.result()
                bar.update(pending[done].numel())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read(source: WeightSource, name: str, destination: Tensor) -> None:
    with torch.inference_mode():  # a thread does not inherit it
        read_into(source, name, destination)
