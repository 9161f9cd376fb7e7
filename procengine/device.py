"""Opens a torch device: loads the model, sizes the KV cache, makes the runners of its workflows.

Owns: the choice of device and of the number of blocks. Never does: run a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.messages import EmbedInput, StepInput
from procengine.models.llama import LlamaModel
from procengine.models.loader import load_model
from procengine.runner import GenerateRunner, KVCache, kv_block_bytes
from procengine.step_output import EmbedOutput, StepOutput
from procengine.workflows import WORKFLOWS, load_part

__all__ = ["open_device"]

Run = Callable[[StepInput | EmbedInput, NDArray[np.int32]], Iterator[StepOutput | EmbedOutput]]


def open_device(config: EngineConfig, *, shows_progress: bool) -> tuple[Run, int, dict[str, int | float | str]]:
    """A function that runs steps, the number of KV blocks, and facts for the log."""
    device = _torch_device(config)
    torch.set_num_threads(config.worker.threads)
    dtype: torch.dtype = getattr(torch, config.worker.dtype)
    model = load_model(config.model, dtype, device, progress=shows_progress)
    num_blocks = _num_blocks(config, model, dtype)
    generate = GenerateRunner(
        model,
        KVCache(model, num_blocks, config.cache.block_size, dtype, device),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.scheduler.max_model_len,
        depth=config.scheduler.async_depth,
        device=device,
    )
    embed: Any = None

    def run(header: StepInput | EmbedInput, payload: NDArray[np.int32]) -> Iterator[StepOutput | EmbedOutput]:
        nonlocal embed
        if isinstance(header, StepInput):
            return generate.run(header, payload)
        if embed is None:  # a group that never embeds never imports it
            embed = load_part(WORKFLOWS["embed"].forward)(model, config.model.pooling, device)
        outputs: Iterator[EmbedOutput] = embed.run(header, payload)
        return outputs

    return run, num_blocks, {"device": str(device), "dtype": config.worker.dtype, "threads": config.worker.threads}


def _torch_device(config: EngineConfig) -> torch.device:
    if config.worker.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device here")
    return torch.device(config.worker.device)


def _num_blocks(config: EngineConfig, model: LlamaModel, dtype: torch.dtype) -> int:
    """What was asked for, else what fits the memory, but never more than all slots can use."""
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    scheduler, block_size = config.scheduler, config.cache.block_size
    usable = scheduler.max_num_seqs * -(-scheduler.max_model_len // block_size)
    fitting = config.cache.memory_bytes // kv_block_bytes(model, block_size, dtype)
    if fitting < 1:
        raise ConfigError(f"kv_cache_memory: {config.cache.memory_bytes} bytes hold no block of {block_size} tokens")
    return int(min(usable, fitting))
