"""A step never looks at what is on the device: it runs where tensors have shapes and no values at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from procengine.config import LoraConfig, ModelConfig
from procengine.decode_graphs import graph_sizes
from procengine.device_streams import Event, HostStreams
from procengine.kernels.backends import Conditions
from procengine.kernels.operations import TORCH_OPERATIONS, open_operations
from procengine.kernels.pooling import reference as pooling
from procengine.models.llama import LlamaModel
from procengine.models.lora_bank import LoraBank
from procengine.models.new_tensors import NewTensors
from procengine.request import RowRules, RowSampling
from procengine.row_features import (
    ADAPTER,
    BAD_WORDS,
    BIAS,
    EARLY_STOPS,
    GRAMMAR,
    MIN_P,
    PENALTIES,
    RANDOM,
    TOP_K,
    TOP_P,
)
from procengine.torch_arrays import TorchArrays
from procengine.torch_executor import TorchModel
from tests.unit.runner_engine import PROMPTS, VOCAB, Engine, TinyModel
from tests.unit.simulated_worker import ToyMasks

META = torch.device("meta")
CONFIG = ModelConfig(
    name="tiny",
    path="",
    format="safetensors",
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
)


class NoValues(HostStreams):
    """Results are zeros, and nothing goes in: all copies that wait for nobody are these."""

    def copy_in_order(self, source: Tensor, target: Tensor) -> None:
        assert source.shape == target.shape

    def copy_in(self, source: Tensor, target: Tensor, after: Event | None) -> Event:
        assert source.shape == target.shape
        return self.mark()

    def copy_out(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Event:
        for _, target in pairs:
            target.zero_()
        return self.mark()


class NoNumbers(TorchFunctionMode):
    """Refuses to assign a plain number to places that a tensor names: torch brings it to a GPU by a copy that waits."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__setitem__" and not isinstance(args[2], Tensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(one, Tensor) for one in index), f"{args[2]} is assigned to indexed places"
        return func(*args, **(kwargs or {}))


class NoCopies(TorchDispatchMode):
    """Refuses any copy between host and device, of which those of `Streams` are none here."""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        if name in ("_to_copy", "copy_"):
            ends = {(one if isinstance(one, Tensor) else result).device.type for one in (*args[:2], result)}
            assert len(ends) == 1, f"{name} between {ends}"
        return result


class AnyToken(ToyMasks):
    """Masks, whatever token comes back."""

    def allows(self, token: int) -> bool:
        return True


@pytest.fixture(scope="module")
def model() -> TinyModel:
    # Attention over prompts in plain torch is the one operation that may look: backends for a GPU do not.
    operations = replace(TORCH_OPERATIONS, paged_attention=lambda q, *_: torch.empty_like(q))
    bank = LoraBank(CONFIG, LoraConfig(max_loras=2), torch.float32, META)
    loaded = TorchModel(LlamaModel(CONFIG, NewTensors(torch.float32, META), operations), bank=bank)
    loaded.arrays = TorchArrays(META, operations, NoValues())
    return TinyModel(CONFIG, loaded)


EVERYTHING = RANDOM | TOP_K | TOP_P | MIN_P | PENALTIES | BIAS | BAD_WORDS | EARLY_STOPS


@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"decode_steps": 3}, {"num_speculative_tokens": 3}))],
    ids=str,
)
def test_steps_of_every_kind_need_no_value(model: TinyModel, options: dict[str, Any]) -> None:
    engine = Engine(model, max_num_batched_tokens=24, num_blocks=40, **options)
    engine.add(PROMPTS[0], 6)
    engine.add(PROMPTS[1], 6, RowSampling(1, 0.9, features=RANDOM))
    values: dict[str, Any] = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2}
    rules = RowRules(((3, 1.0),), None, (1, 2), ((4, 5), (6,)))
    every = RowSampling(2, 0.9, features=EVERYTHING, num_logprobs=3, **values)
    engine.add(PROMPTS[2], 6, every, rules=rules, min_position=43, num_prompt_logprobs=2)
    engine.add(PROMPTS[3], 6, RowSampling(3, features=GRAMMAR), grammar=AnyToken())
    engine.add(PROMPTS[0], 6, RowSampling(4, features=ADAPTER), adapter=1)
    with NoNumbers(), NoCopies():  # type: ignore[no-untyped-call]
        engine.run()
    assert [len(tokens) for tokens in engine.tokens.values()] == [6] * 5


@pytest.mark.parametrize("pool", [pooling.pool_last, pooling.pool_mean])
def test_pooling_needs_no_value(pool: Any) -> None:
    bounds = torch.empty(4, dtype=torch.int32, device=META)
    with NoNumbers(), NoCopies():  # type: ignore[no-untyped-call]
        assert pool(torch.empty(9, 5, device=META), bounds).shape == (3, 5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("sizes", [(), graph_sizes(8)], ids=["eager", "graphs"])
def test_steps_on_a_gpu_synchronise_nothing(sizes: tuple[int, ...]) -> None:
    operations = open_operations("triton", Conditions("cuda"))
    loaded = TorchModel(LlamaModel(CONFIG, NewTensors(torch.float32, "cuda"), operations), sizes)
    for is_strict in (False, True):  # the first time compiles, and takes the memory that then goes round
        engine = Engine(TinyModel(CONFIG, loaded), max_num_batched_tokens=24)
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, 20, RowSampling(number, 0.9 * (number % 2), features=RANDOM * (number % 2)))
        torch.cuda.set_sync_debug_mode("error" if is_strict else "default")
        try:
            engine.run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
