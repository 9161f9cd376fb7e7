"""`Device`: what runs steps: the model, the size of the KV pool, a runner for each workflow in use.

Owns: the number of blocks, and which of the two ways the model is loaded. Never does: run a step itself, or load torch
where the native kernels do the work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A
from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.executor import Model
from procengine.kv_tensors import kv_block_bytes
from procengine.layer_groups import LayerGroups, layer_groups
from procengine.messages import EmbedInput, StepInput
from procengine.step_memory import StepMemoryError
from procengine.step_output import EmbedOutput, StepOutput
from procengine.workflows import find_workflow, load_part

if TYPE_CHECKING:
    from procengine.models.decoder import Decoder
    from procengine.models.label_weights import LabelWeights
    from procengine.models.lora_bank import LoraBank
    from procengine.models.lora_weights import LoraWeights
    from procengine.torch_executor import TorchModel

__all__ = ["Device", "open_device"]

logger = logging.getLogger(__name__)


class Device(Generic[A]):
    """Has the model, and loads the parts of a workflow when its first step comes."""

    def __init__(self, config: EngineConfig, model: Model[A], cache_bytes: int, bank: LoraBank | None = None) -> None:
        """The KV pool takes `cache_bytes` at most, unless the configuration says how many blocks it has. `bank`: of the
        adapters that the model takes."""
        self.config = config
        self.model = model
        self.label_weights = _label_weights(config)
        self._bank = bank
        self.groups = layer_groups(config.model, config.scheduler.max_model_len)
        self.num_blocks = _num_blocks(config, self.groups, cache_bytes)
        self._runners: dict[str, Any] = {}
        if "generate" in config.model.workflows:  # its KV pool must be known to fit before anybody counts on it
            try:
                self._open_runner("generate")
            except model.arrays.memory_errors as error:
                raise ConfigError(
                    f"{config.worker.device} has no memory for {self.num_blocks} KV blocks beside the weights; "
                    f"lower num_blocks, kv_cache_memory or gpu_memory_utilization ({error})"
                ) from error

    @property
    def facts(self) -> dict[str, int | float | str]:
        """For the log."""
        worker = self.config.worker
        block_bytes = _block_bytes(self.config, self.groups)
        own = {"device": worker.device, "dtype": worker.dtype, "kv_cache_dtype": worker.kv_cache_dtype}
        pool = {"kv_pool_mb": round(self.num_blocks * block_bytes / 1e6, 1), "kv_groups": self.groups.num_groups}
        return {**own, **pool, **self.model.facts, "threads": worker.threads}

    def run(self, header: StepInput | EmbedInput, payload: NDArray[np.int32]) -> Iterator[StepOutput | EmbedOutput]:
        """The outputs of a step.

        Raises StepMemoryError, behind what it has given, if the device's memory does not suffice. Then no slot counts
        any more: `forget_slots` comes before the next step.
        """
        runner = self._runners.get(header.workflow) or self._open_runner(header.workflow)
        try:
            yield from runner.run(header, payload)
        except self.model.arrays.memory_errors as error:
            text = (
                f"the device ran out of memory in a step of {header.num_tokens} tokens in {header.num_rows} rows; "
                f"lower max_num_batched_tokens, max_num_seqs or gpu_memory_utilization ({error})"
            )
            logger.error("%s", text)
            raise StepMemoryError(text, runner.keys_of(header, payload)) from error

    def forget_slots(self) -> None:
        """No slot has a request: the weights stay, and so does the KV pool, whose blocks nobody refers to now."""
        runner = self._runners.get("generate")
        if runner is not None:
            runner.forget_slots()

    def read_adapter(self, path: str) -> LoraWeights:
        """The LoRA adapter in a folder, checked against the model. On any thread. Raises ModelError."""
        from procengine.models.lora_weights import read_lora_weights

        return read_lora_weights(Path(path), self.config.model, self.config.lora.max_rank)

    def place_adapter(self, place: int, weights: LoraWeights) -> None:
        """Steps from here on find this adapter in this place."""
        assert self._bank is not None, "adapters are off"
        self._bank.put(place, weights)

    def _open_runner(self, workflow: str) -> Any:
        runner = load_part(find_workflow(workflow).forward)(self)
        self._runners[workflow] = runner
        return runner


def _label_weights(config: EngineConfig) -> LabelWeights | None:
    """Read with the model, so that a file that lacks them is known at the start."""
    if config.model.head is None:
        return None
    from procengine.models.label_weights import read_label_weights
    from procengine.models.weights import open_weights

    return read_label_weights(config.model, open_weights(config.model))


def open_device(config: EngineConfig, *, shows_progress: bool) -> Device[Any]:
    """A device with the model loaded."""
    if config.worker.kernels == "native":
        return Device(config, _load_native(config, shows_progress), config.cache.memory_bytes or 0)
    model = _load_torch(config, shows_progress)
    return Device(config, model, _cache_bytes(config, model), model.bank)


def _cache_bytes(config: EngineConfig, model: TorchModel) -> int:
    if config.cache.memory_bytes is not None:
        return config.cache.memory_bytes
    if config.cache.num_blocks is not None:
        return 0  # nobody asks
    from procengine.memory_profile import CudaMemory, largest_steps, left_for_cache

    return left_for_cache(CudaMemory(), largest_steps(model, config), config.cache.gpu_memory_utilization)


def _load_torch(config: EngineConfig, progress: bool) -> TorchModel:
    import torch

    from procengine.kernels.backends import FP8_CAPABILITY, Conditions
    from procengine.kernels.operations import open_operations
    from procengine.models.loader import load_model
    from procengine.torch_executor import TorchModel

    worker, model = config.worker, config.model
    if worker.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device here")
    torch.set_num_threads(worker.threads)
    capability = torch.cuda.get_device_capability() if worker.device == "cuda" else None
    quantized_cache = worker.kv_cache_dtype if worker.kv_cache_dtype in ("int8", "fp8") else None
    conditions = Conditions(
        worker.device, worker.dtype, config.cache.block_size, model.head_dim, quantized_cache, capability
    )
    if worker.quantization == "fp8" and capability is not None and capability < FP8_CAPABILITY:
        raise ConfigError("quantization: this GPU has no fp8 (it takes compute capability 8.9); int8 is as large")
    operations = open_operations(worker.attention_backend, conditions)  # before the slow part: it may not be possible
    try:
        dtype = getattr(torch, worker.dtype)
        loaded = load_model(model, dtype, worker.device, progress, operations, worker.quantization)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{worker.device} has no memory for the weights of {model.name} in {worker.dtype}: take a smaller "
            f"model, or a device with nothing else on it ({error})"
        ) from error
    sizes = _graph_sizes(config, operations.names["attention"])
    return TorchModel(loaded, sizes, nvtx=config.profiling.nvtx, bank=_open_bank(config, loaded))


def _open_bank(config: EngineConfig, loaded: Decoder) -> LoraBank | None:
    """Room for adapters, taken before the KV pool is measured."""
    if not config.lora.is_on:
        return None
    from procengine.models.lora_bank import LoraBank

    bank = LoraBank(config.model, config.lora, loaded.dtype, loaded.device)
    logger.info(
        "adapters: room for %d of rank %d (%.1f MB); torch computes them, and steps that have one are no graphs",
        config.lora.max_loras,
        config.lora.max_rank,
        bank.num_bytes / 1e6,
    )
    return bank


def _graph_sizes(config: EngineConfig, attention: str) -> tuple[int, ...]:
    from procengine.decode_graphs import graph_sizes

    if not config.worker.uses_graphs:
        return ()
    if config.model.architecture == "transformers":
        logger.info("no graphs: transformers' modules may look at values, which a graph cannot")
        return ()
    if config.model.decoder.experts is not None:
        logger.info("no graphs: which experts a step needs is known when it is routed, which a graph cannot wait for")
        return ()
    if config.worker.device == "cuda" and attention == "torch":
        logger.info(
            "no graphs: attention by torch is launched for the longest row of a step, which a graph cannot know"
        )
        return ()
    return graph_sizes(config.scheduler.max_num_seqs)


def _load_native(config: EngineConfig, progress: bool) -> Model[Any]:
    from procengine.kernels.native.library import set_num_threads
    from procengine.models.packed_llama import load_packed
    from procengine.models.weights import open_weights
    from procengine.native_executor import NativeModel

    worker, threads = config.worker, config.worker.threads
    set_num_threads(min(threads, 256))
    source = open_weights(config.model)
    decoder = load_packed(config.model, source, worker.quantization, num_threads=threads, progress=progress)
    return NativeModel(decoder, config.model.num_layers, worker.kv_cache_dtype)


def _num_blocks(config: EngineConfig, groups: LayerGroups, cache_bytes: int) -> int:
    """What was asked for, else what fits the memory, but never more than all slots can use."""
    scheduler, block_size, each = config.scheduler, config.cache.block_size, groups.num_groups
    if config.cache.num_blocks is not None:
        if config.cache.num_blocks < each:
            raise ConfigError(
                f"num_blocks: {config.cache.num_blocks} are not one for each of the {each} groups of layers that "
                f"{config.model.name} has"
            )
        return config.cache.num_blocks
    usable = scheduler.max_num_seqs * -(-scheduler.max_model_len // block_size) * each
    fitting = cache_bytes // _block_bytes(config, groups)
    if fitting < each:
        blocks = "no block" if each == 1 else f"no block for each of the {each} groups of layers"
        raise ConfigError(f"kv_cache_memory: {cache_bytes} bytes hold {blocks} of {block_size} tokens")
    return int(min(usable, fitting))


def _block_bytes(config: EngineConfig, groups: LayerGroups) -> int:
    dtype, num_layers = config.worker.kv_cache_dtype, groups.layers_per_block
    return kv_block_bytes(config.model, config.cache.block_size, dtype, num_layers)
