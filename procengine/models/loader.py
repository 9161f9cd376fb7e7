"""From a ModelConfig to a model in torch that can run.

Owns: checking a checkpoint against the model and filling the weights. Never does: choose dtype, device or model.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.kernels.operations import TORCH_OPERATIONS, Operations
from procengine.models.decoder import Decoder
from procengine.models.new_tensors import NewTensors
from procengine.models.registry import find_implementation
from procengine.models.weights import WeightSource, open_weights

__all__ = ["load_model", "read_into"]


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str | torch.device,
    progress: bool,
    operations: Operations = TORCH_OPERATIONS,
) -> Decoder:
    """Read `config.path` and build the model, which computes with `operations`.

    Each tensor is decoded straight into its place, so memory peaks at the model plus a few tensors. Raises ModelError
    naming the tensor that is missing, of the wrong shape or of an unreadable type. `progress` draws a bar on stderr.
    """
    implementation = find_implementation(config.architecture)
    with torch.inference_mode():
        source = open_weights(config)
        # Before anything is allocated: sizes that the configuration claims and the file does not have cost nothing.
        _check(source, implementation(config, NewTensors(dtype, "meta"), operations).destinations(), config)
        model = implementation(config, NewTensors(dtype, device), operations)
        _read_all(source, list(model.destinations()), progress)
        model.settle()
    return model


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


def _read_all(source: WeightSource, destinations: list[tuple[str, Tensor]], progress: bool) -> None:
    """Decode in threads (numpy and torch release the GIL), the largest tensors first so that none is left over."""
    total = sum(destination.numel() for _, destination in destinations)
    largest_first = sorted(destinations, key=lambda item: -item[1].numel())
    with (
        ThreadPoolExecutor(max_workers=torch.get_num_threads(), thread_name_prefix="load") as pool,
        tqdm(total=total, desc="Loading weights", unit="", unit_scale=True, disable=not progress) as bar,
    ):
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
