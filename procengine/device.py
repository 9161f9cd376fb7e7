"""`Device`: a torch device that runs steps: the model, the size of the KV pool, a runner for each workflow in use.

Owns: the choice of device and of the number of blocks. Never does: run a step itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.kv_tensors import kv_block_bytes
from procengine.messages import EmbedInput, StepInput
from procengine.models.llama import LlamaModel
from procengine.models.loader import load_model
from procengine.step_output import EmbedOutput, StepOutput
from procengine.workflows import WORKFLOWS, load_part

__all__ = ["Device"]


class Device:
    """Loads the model at once, and the parts of a workflow when its first step comes."""

    def __init__(self, config: EngineConfig, *, shows_progress: bool) -> None:
        torch.set_num_threads(config.worker.threads)
        self.config = config
        self.torch_device = _torch_device(config)
        self.dtype: torch.dtype = getattr(torch, config.worker.dtype)
        self.model = load_model(config.model, self.dtype, self.torch_device, progress=shows_progress)
        self.num_blocks = _num_blocks(config, self.model, self.dtype)
        self._runners: dict[str, Any] = {}
        if "generate" in config.model.workflows:  # its KV pool must be known to fit before anybody counts on it
            self._open_runner("generate")

    @property
    def facts(self) -> dict[str, int | float | str]:
        """For the log."""
        worker = self.config.worker
        return {"device": str(self.torch_device), "dtype": worker.dtype, "threads": worker.threads}

    def run(self, header: StepInput | EmbedInput, payload: NDArray[np.int32]) -> Iterator[StepOutput | EmbedOutput]:
        """The outputs of a step."""
        runner = self._runners.get(header.workflow) or self._open_runner(header.workflow)
        outputs: Iterator[StepOutput | EmbedOutput] = runner.run(header, payload)
        return outputs

    def _open_runner(self, workflow: str) -> Any:
        runner = load_part(WORKFLOWS[workflow].forward)(self)
        self._runners[workflow] = runner
        return runner


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
