"""How much of a GPU's memory is left for keys and values: measured, by running the largest steps there may be.

Owns: these steps, and the arithmetic. Never does: allocate the KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.executor import ForwardBatch
from procengine.kernels.lora import AdapterBlocks, adapter_blocks
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kv_tensors import KVTensors
from procengine.layer_groups import layer_groups
from procengine.torch_executor import TorchModel

__all__ = ["CudaMemory", "DeviceMemory", "largest_steps", "left_for_cache"]

logger = logging.getLogger(__name__)

_Work = Callable[[], object]
_GIB = 1 << 30


class DeviceMemory(Protocol):
    """The memory of one device, in bytes."""

    def total(self) -> int: ...

    def used(self) -> int:
        """By anybody, other processes included, what is kept for later allocations not."""
        ...

    def peak_of(self, work: _Work) -> int:
        """The most that the work takes at once."""
        ...


class CudaMemory:
    """DeviceMemory of a GPU."""

    def total(self) -> int:
        return torch.cuda.mem_get_info()[1]

    def used(self) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def peak_of(self, work: _Work) -> int:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved() - before


def left_for_cache(memory: DeviceMemory, steps: Sequence[_Work], utilization: float) -> int:
    """Bytes, once the weights are loaded. Raises ConfigError, saying what to lower, if nothing is left."""
    peaks = [memory.peak_of(step) for step in steps]
    used, total = memory.used(), memory.total()  # afterwards: libraries have taken their workspaces by now
    left = int(total * utilization) - used - sum(peaks)
    logger.info(
        "memory: %.2f GiB of %.2f GiB are used (weights among them), the largest steps take %.2f GiB, "
        "%.2f GiB are left for the KV cache",
        *(bytes_ / _GIB for bytes_ in (used, total, sum(peaks), max(0, left))),
    )
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_utilization: {utilization} of {total / _GIB:.2f} GiB leaves nothing for the KV cache: weights "
            f"and whatever else is there take {used / _GIB:.2f} GiB, the largest steps {sum(peaks) / _GIB:.2f} GiB; "
            "lower max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization, or take a smaller model"
        )
    return left


def largest_steps(model: TorchModel, config: EngineConfig) -> list[_Work]:
    """A step of prompts that fills the token budget and samples a full batch; and, where there are graphs, which keep
    their memory, the largest of them."""
    steps: list[_Work] = [torch.inference_mode()(lambda: _prompt_step(model, config))]
    if model.graph_sizes:
        steps.append(torch.inference_mode()(lambda: _decode_step(model, config, max(model.graph_sizes))))
    return steps


def _prompt_step(model: TorchModel, config: EngineConfig) -> None:
    scheduler, device = config.scheduler, model.arrays.device
    num_tokens = scheduler.max_num_batched_tokens
    if "embed" in config.model.workflows:
        num_tokens = max(num_tokens, scheduler.max_embed_tokens)
    longest = min(num_tokens, scheduler.max_model_len)
    bounds = [*range(0, num_tokens, longest), num_tokens]
    positions = torch.arange(num_tokens, device=device) % longest
    starts = torch.tensor(bounds, dtype=torch.int32, device=device)
    input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    hidden = model.encode(input_ids, positions, starts, longest, adapters=_adapters(model, num_tokens))
    _sample(model, config, hidden[: scheduler.max_num_seqs])


def _adapters(model: TorchModel, num_tokens: int) -> AdapterBlocks[Tensor] | None:
    """Of tokens all of which have one, if the model takes any."""
    blocks = None if model.bank is None else adapter_blocks(np.zeros(num_tokens, np.int32))
    if blocks is None:
        return None
    tokens, places, adapters = map(model.arrays.send, (blocks.tokens, blocks.places, blocks.adapters))
    return AdapterBlocks(tokens, places, adapters, blocks.width)


def _sample(model: TorchModel, config: EngineConfig, hidden: Tensor) -> None:
    """With all that makes copies of logits."""
    num_rows = hidden.shape[0]

    def column(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=hidden.device)

    reals, whole = torch.float32, torch.int64
    columns = SamplingColumns(
        column(1.0, reals),
        column(50, torch.int32),
        column(0.9, reals),
        column(0.1, reals),
        column(0, whole),
        column(0, whole),
    )
    logits = model.model.compute_logits(hidden)
    kept = logits + 0.0  # the model's own, for log probabilities, beside those that are changed
    features = SamplingFeatures.RANDOM | SamplingFeatures.TOP_K | SamplingFeatures.TOP_P | SamplingFeatures.MIN_P
    tokens = model.model.operations.sample(logits, columns, features)
    model.model.operations.gather_logprobs(kept, tokens, config.limits.max_logprobs)


def _decode_step(model: TorchModel, config: EngineConfig, num_rows: int) -> None:
    scheduler, block_size, arrays = config.scheduler, config.cache.block_size, model.arrays
    groups = layer_groups(config.model, scheduler.max_model_len)
    cache: KVTensors[Tensor] = KVTensors(config.model, 1, block_size, config.worker.kv_cache_dtype, arrays, groups)
    max_blocks = -(-scheduler.max_model_len // block_size)
    zeros = arrays.new([num_rows], "int64")
    batch = ForwardBatch(
        input_ids=zeros,
        positions=zeros,
        query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=arrays.device),
        seq_lens=arrays.new([num_rows], "int32", 1),
        slots=zeros,
        block_tables=arrays.new([groups.num_groups, scheduler.max_num_seqs + 1, max_blocks], "int32"),
        num_decode_rows=num_rows,
        max_query_len=1,
        max_seq_len=max_blocks * block_size,
        wanted=None,
    )
    model.open(cache).forward(batch)
