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
from procengine.executor import Model
from procengine.kv_tensors import kv_block_bytes
from procengine.messages import EmbedInput, StepInput
from procengine.step_output import EmbedOutput, StepOutput
from procengine.workflows import WORKFLOWS, load_part

__all__ = ["Device"]


class Device:
    """Loads the model at once, and the parts of a workflow when its first step comes."""

    def __init__(self, config: EngineConfig, *, shows_progress: bool) -> None:
        self.config = config
        self.torch_device = _torch_device(config)
        self.kv_dtype: torch.dtype = getattr(torch, config.worker.kv_cache_dtype)
        load = _load_native if config.worker.kernels == "native" else _load_torch
        self.model: Model = load(config, self.torch_device, shows_progress)
        self.num_blocks = _num_blocks(config, self.kv_dtype)
        self._runners: dict[str, Any] = {}
        if "generate" in config.model.workflows:  # its KV pool must be known to fit before anybody counts on it
            self._open_runner("generate")

    @property
    def facts(self) -> dict[str, int | float | str]:
        """For the log."""
        worker = self.config.worker
        own = {"device": str(self.torch_device), "dtype": worker.dtype, "kv_cache_dtype": worker.kv_cache_dtype}
        return {**own, **self.model.facts, "threads": worker.threads}

    def run(self, header: StepInput | EmbedInput, payload: NDArray[np.int32]) -> Iterator[StepOutput | EmbedOutput]:
        """The outputs of a step."""
        runner = self._runners.get(header.workflow) or self._open_runner(header.workflow)
        outputs: Iterator[StepOutput | EmbedOutput] = runner.run(header, payload)
        return outputs

    def forget_slots(self) -> None:
        """No slot has a request: the weights stay, and so does the KV pool, whose blocks nobody refers to now."""
        runner = self._runners.get("generate")
        if runner is not None:
            runner.forget_slots()

    def _open_runner(self, workflow: str) -> Any:
        runner = load_part(WORKFLOWS[workflow].forward)(self)
        self._runners[workflow] = runner
        return runner


def _load_torch(config: EngineConfig, device: torch.device, progress: bool) -> Model:
    from procengine.models.loader import load_model
    from procengine.torch_executor import TorchModel

    torch.set_num_threads(config.worker.threads)
    return TorchModel(load_model(config.model, getattr(torch, config.worker.dtype), device, progress))


def _load_native(config: EngineConfig, _device: torch.device, progress: bool) -> Model:
    from procengine.kernels.native.library import set_num_threads
    from procengine.models.loader import open_weights
    from procengine.models.packed_llama import load_packed
    from procengine.native_executor import NativeModel

    threads = config.worker.threads
    torch.set_num_threads(1)  # what is left to torch is small, and the cores belong to the kernels' own threads
    set_num_threads(min(threads, 256))
    source, quantization = open_weights(config.model), config.worker.quantization
    decoder = load_packed(config.model, source, quantization, num_threads=threads, progress=progress)
    return NativeModel(decoder, config.model.num_layers, getattr(torch, config.worker.kv_cache_dtype))


def _torch_device(config: EngineConfig) -> torch.device:
    if config.worker.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device here")
    return torch.device(config.worker.device)


def _num_blocks(config: EngineConfig, dtype: torch.dtype) -> int:
    """What was asked for, else what fits the memory, but never more than all slots can use."""
    if config.cache.num_blocks is not None:
        return config.cache.num_blocks
    scheduler, block_size = config.scheduler, config.cache.block_size
    usable = scheduler.max_num_seqs * -(-scheduler.max_model_len // block_size)
    fitting = config.cache.memory_bytes // kv_block_bytes(config.model, block_size, dtype)
    if fitting < 1:
        raise ConfigError(f"kv_cache_memory: {config.cache.memory_bytes} bytes hold no block of {block_size} tokens")
    return int(min(usable, fitting))
