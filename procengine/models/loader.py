"""From a ModelConfig to a model in torch that can run.

Owns: checking a checkpoint against the model and filling the weights. Never does: choose dtype, device or model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from procengine.config import ModelConfig, Quantization
from procengine.errors import ModelError
from procengine.kernels.linear.quantized import WeightKind
from procengine.kernels.operations import TORCH_OPERATIONS, Operations
from procengine.models.decoder import Decoder, DecoderLayer, LoadableDecoder
from procengine.models.new_tensors import NewTensors
from procengine.models.registry import find_implementation
from procengine.models.weights import WeightSource, open_weights

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["destinations", "load_model", "read_into"]

logger = logging.getLogger(__name__)


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    progress: bool,
    operations: Operations = TORCH_OPERATIONS,
    quantization: Quantization = "none",
) -> Decoder:
    """Read `config.path` and build the model, which computes with `operations`.

    Each tensor is decoded straight into its place, so memory peaks at the model plus a few tensors; with
    `quantization`, at the rounded model plus a block in float32. Raises ModelError naming the tensor that is missing,
    of the wrong shape or of an unreadable type. `progress` draws a bar on stderr.
    """
    if config.architecture == "transformers":
        from procengine.models.transformers_model import load_transformers

        logger.info("%s: no implementation of ours, so transformers' modules run, with our attention", config.name)
        return load_transformers(config, dtype, device, operations)
    implementation = find_implementation(config.architecture)
    with torch.inference_mode():
        source = open_weights(config)
        # Before anything is allocated: sizes that the configuration claims and the file does not have cost nothing.
        meta = NewTensors(dtype, "meta")
        needed = list(destinations(implementation(config, meta, operations)))
        _check(source, needed, config)
        new = NewTensors(dtype, device)
        with _progress_bar(sum(tensor.numel() for _, tensor in needed), progress) as bar:
            if quantization == "none" or quantization == "stored":  # as a GGUF file's blocks, which are floats in torch
                model = implementation(config, new, operations)
                _fill(model, source, bar)
            else:
                assert quantization != "int14", "of encoders alone"
                model = implementation(config, new, operations, in_layers=meta)
                _fill_rounded(model, source, quantization, new, bar)
    return model


def _fill(model: LoadableDecoder, source: WeightSource, bar: tqdm) -> None:
    _read_all(source, list(destinations(model)), bar)
    model.settle_outer()
    for layer in model.layers:
        layer.settle()


def _fill_rounded(model: LoadableDecoder, source: WeightSource, kind: WeightKind, new: NewTensors, bar: tqdm) -> None:
    """Layer by layer, each in float32 first."""
    _read_all(source, list(model.outer_destinations()), bar)
    model.settle_outer()
    for index in range(model.num_layers):
        layer = model.replace_layer(index, NewTensors(torch.float32, new.device))
        _read_all(source, list(_in_layer(model, index, layer)), bar)
        layer.settle()
        layer.quantize(kind, new.dtype)
    # Four bits would harm the head most.
    model.quantize_head("int8" if kind == "int4" else kind)


def destinations(model: LoadableDecoder) -> Iterator[tuple[str, Tensor]]:
    """Every checkpoint tensor that the model needs, with the (slice of a) tensor it fills."""
    yield from model.outer_destinations()
    for index, layer in enumerate(model.layers):
        yield from _in_layer(model, index, layer)


def _in_layer(model: LoadableDecoder, index: int, layer: DecoderLayer) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in layer.destinations():
        yield model.layer_prefix(index) + name, tensor


@contextmanager
def _progress_bar(total: int, progress: bool) -> Iterator[tqdm]:
    from tqdm import tqdm  # not where this module is imported: scripts/gpu_check reads weights where there is none

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
