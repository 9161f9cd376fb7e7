"""What is left of a device's memory for keys and values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from procengine.config import (
    CacheConfig,
    EngineConfig,
    GroupConfig,
    KVCacheDType,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from procengine.decode_graphs import graph_sizes
from procengine.device import Device
from procengine.errors import ConfigError
from procengine.kernels.lora import AdapterBlocks
from procengine.kernels.operations import TORCH_OPERATIONS
from procengine.memory_profile import largest_steps, left_for_cache
from procengine.models.llama import LlamaModel
from procengine.models.lora_bank import LoraBank, LoraPass
from procengine.models.new_tensors import NewTensors
from procengine.torch_executor import TorchModel

CONFIG = ModelConfig(
    name="tiny",
    path="",
    format="safetensors",
    architecture="llama",
    vocab_size=97,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=128,
)


class Memory:
    """1000 bytes, and what is said of them."""

    def __init__(self, used: int, peaks: list[int]) -> None:
        self._used = used
        self._peaks = iter(peaks)

    def total(self) -> int:
        return 1000

    def used(self) -> int:
        return self._used

    def peak_of(self, work: Callable[[], object]) -> int:
        work()
        return next(self._peaks)


def test_what_is_left_is_what_may_be_used_without_weights_and_steps() -> None:
    done: list[str] = []
    steps = [lambda: done.append("prompts"), lambda: done.append("decode")]
    assert left_for_cache(Memory(300, [100, 50]), steps, 0.9) == 450
    assert done == ["prompts", "decode"]


def test_nothing_left_is_an_error_that_says_what_to_lower() -> None:
    with pytest.raises(ConfigError, match="lower max_num_batched_tokens or max_num_seqs, raise gpu_memory_utilization"):
        left_for_cache(Memory(850, [100]), [lambda: None], 0.9)


def tiny(folder: Path, kv_cache_dtype: KVCacheDType = "float32", **cache: Any) -> tuple[TorchModel, EngineConfig]:
    model = TorchModel(LlamaModel(CONFIG, NewTensors(torch.float32, "cpu"), TORCH_OPERATIONS), graph_sizes(5))
    scheduler = SchedulerConfig(max_num_seqs=5, max_num_batched_tokens=300, max_model_len=128, max_embed_tokens=300)
    worker = WorkerConfig(kv_cache_dtype=kv_cache_dtype)
    return model, EngineConfig(CONFIG, GroupConfig("g", str(folder)), CacheConfig(**cache), scheduler, worker)


@pytest.mark.parametrize("kv_cache_dtype", ["float32", "int8", "fp8"])
def test_the_largest_steps_run(tmp_path: Path, kv_cache_dtype: KVCacheDType) -> None:
    """More tokens than one sequence may have, and as many rows as the largest graph."""
    model, config = tiny(tmp_path, kv_cache_dtype)
    steps = largest_steps(model, config)
    assert len(steps) == 2
    for step in steps:
        step()


def sliding(config: EngineConfig, **cache: Any) -> EngineConfig:
    """The same of a model whose first layer has a window and whose second sees all tokens."""
    replace = msgspec.structs.replace
    model = replace(config.model, sliding_window=16, decoder=replace(config.model.decoder, global_layers=(1,)))
    return replace(config, model=model, cache=CacheConfig(**cache))


def test_groups_of_layers_divide_the_pool(tmp_path: Path) -> None:
    model, config = tiny(tmp_path)
    num_bytes = 2 * 2 * 16 * 2 * 4 * 4 * 20  # keys and values of both layers, in 20 blocks
    assert Device(config, model, num_bytes).num_blocks == 20
    device = Device(sliding(config), model, num_bytes)
    assert device.num_blocks == 40
    assert (device.facts["kv_groups"], device.facts["kv_pool_mb"]) == (2, round(num_bytes / 1e6, 1))
    for step in largest_steps(model, device.config):
        step()


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_numbers_of_8_bits_take_a_byte_and_a_share_of_their_scale(tmp_path: Path, kv_cache_dtype: KVCacheDType) -> None:
    model, config = tiny(tmp_path, kv_cache_dtype)
    num_bytes = 2 * 2 * 16 * 2 * (4 + 4) * 20  # heads of 4 dimensions: as many bytes of scales
    device = Device(config, model, num_bytes)
    assert (device.num_blocks, device.facts["kv_pool_mb"]) == (20, round(num_bytes / 1e6, 1))
    assert device.facts["kv_cache_dtype"] == kv_cache_dtype


def test_a_pool_without_a_block_for_each_group_is_an_error(tmp_path: Path) -> None:
    model, config = tiny(tmp_path)
    with pytest.raises(ConfigError, match="num_blocks: 1 are not one for each of the 2 groups of layers that tiny has"):
        Device(sliding(config, num_blocks=1), model, 0)
    with pytest.raises(ConfigError, match=r"kv_cache_memory: 2000 bytes hold no block for each of the 2 groups"):
        Device(sliding(config), model, 2000)
    with pytest.raises(ConfigError, match=r"kv_cache_memory: 2000 bytes hold no block of 16 tokens"):
        Device(config, model, 2000)


def test_all_tokens_of_the_largest_prompt_step_have_adapters_where_the_model_takes_some(tmp_path: Path) -> None:
    class Seen(LoraBank):
        num_tokens = 0

        def during(self, blocks: AdapterBlocks[torch.Tensor]) -> LoraPass:
            self.num_tokens = blocks.tokens.numel()
            return super().during(blocks)

    bank = Seen(CONFIG, LoraConfig(max_loras=2), torch.float32, torch.device("cpu"))
    plain, config = tiny(tmp_path)
    largest_steps(TorchModel(plain.model, bank=bank), config)[0]()
    assert bank.num_tokens == 300


def test_no_memory_for_the_pool_says_what_to_lower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("Tried to allocate 20 GiB")

    model, config = tiny(tmp_path, num_blocks=10)
    monkeypatch.setattr(type(model.arrays), "new", no_memory)
    with pytest.raises(ConfigError, match=r"10 KV blocks .* lower num_blocks.* allocate 20 GiB"):
        Device(config, model, 0)
