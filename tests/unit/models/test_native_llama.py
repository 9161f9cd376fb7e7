"""The native forward pass against torch in float32 with the very weights that were packed, and against itself."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from procengine.config import KVCacheDType, ModelConfig, Quantization
from procengine.errors import ModelError
from procengine.kernels.decoder.native import Decoder
from procengine.kernels.linear.packed import PackedMatrix, gate_up_order
from procengine.kernels.native import library
from procengine.kernels.operations import TORCH_OPERATIONS
from procengine.models.llama import LlamaModel
from procengine.models.loader import load_model
from procengine.models.mlp import Mlp
from procengine.models.new_tensors import Matrix, NewTensors, as_floats
from procengine.models.packed_llama import load_packed
from procengine.models.weights import open_weights
from procengine.native_executor import NativeModel
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.model_configs import replace as replace_config
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.gguf_files import write_gguf
from tests.unit.models.tiny_models import KINDS, save_tiny_model

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 101, "initializer_range": 0.15}
HEAD_DIM: dict[str, dict[str, Any]] = {
    "llama-head-dim": {"head_dim": 24},
    **{kind: {"head_dim": 32} for kind in ("mistral-window", "qwen3")},  # what AMX has tiles for
}
SEQUENCES = [[(7 * i * i + 3 * i + row) % 97 for i in range(length)] for row, length in enumerate((23, 40, 9))]
WHOLE = [{0: 23}, {1: 40}, {2: 9}]
CHUNKS: list[dict[int, int]] = [
    *({0: 5}, {0: 1, 1: 16}, {0: 3, 1: 1, 2: 8}, {0: 1, 1: 11, 2: 1}, {0: 12}, {0: 1, 1: 5}),
    *({1: 1} for _ in range(7)),
]
# How far logits may be from those of float32 arithmetic with the same weights, at the worst position: bf16 rounds
# activations to 8 bits, the others to 7 and a sign within a group of 32, and random models hand every error on. What a
# missing bias or a wrong position does is several times larger.
CLOSENESS = {"none": 0.05, "int8": 0.15, "int4": 0.15}


class Loaded(NamedTuple):
    config: ModelConfig
    decoder: Decoder
    native: NativeModel
    reference: TorchModel


def load(config: ModelConfig, quantization: Quantization, kv_dtype: KVCacheDType = "bfloat16") -> Loaded:
    decoder = load_packed(config, open_weights(config), quantization, num_threads=2, progress=False)
    return Loaded(
        config, decoder, NativeModel(decoder, config.num_layers, kv_dtype), TorchModel(unpacked(config, decoder))
    )


def unpacked(config: ModelConfig, decoder: Decoder) -> LlamaModel:
    """A model in float32 with the weights that a decoder computes with."""
    order = torch.from_numpy(gate_up_order(config.intermediate_size))
    model = LlamaModel(config, NewTensors(torch.float32, "cpu"), TORCH_OPERATIONS)

    def fill(tensor: Matrix | None, values: NDArray[np.float32] | None, order: Any = slice(None)) -> None:
        assert (tensor is None) == (values is None)
        if tensor is not None:
            as_floats(tensor).copy_(torch.from_numpy(values)[order])

    def whole(*parts: PackedMatrix) -> NDArray[np.float32]:
        return np.concatenate([part.unpack() for part in parts])

    fill(model.embedding, whole(decoder.embedding))
    fill(model.final_norm, decoder.final_norm)
    fill(model.lm_head, whole(decoder.head))
    for own, layer in zip(model.layers, decoder.layers, strict=True):
        assert isinstance(own.mlp, Mlp)
        fill(own.input_norm, layer.input_norm)
        fill(own.mlp_norm, layer.post_attention_norm)
        fill(own.attention.qkv, whole(*layer.qkv))
        fill(own.attention.output, whole(layer.output))
        for name in ("qkv_bias", "q_norm", "k_norm", "output_bias"):
            fill(getattr(own.attention, name), getattr(layer, name))
        fill(own.mlp.gate_up, whole(layer.gate_up), order)
        fill(own.mlp.gate_up_bias, layer.gate_up_bias, order)
        fill(own.mlp.down, whole(layer.down))
        fill(own.mlp.down_bias, layer.down_bias)
    return model


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    found = {}
    for kind in KINDS:
        folder: Path = tmp_path_factory.mktemp(kind)
        oracle = save_tiny_model(kind, folder, **SIZES, **HEAD_DIM.get(kind, {}))
        found[kind] = model_config_from_hf(oracle.config, folder)
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    """Of the worst row, as a share of its spread."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_torch_with_the_same_weights(
    kind: str, quantization: Quantization, configs: dict[str, ModelConfig]
) -> None:
    model = load(configs[kind], quantization)
    expected = ExecutorRun(model.reference, model.config, SEQUENCES).run(WHOLE)
    kv_dtypes: tuple[KVCacheDType, ...] = ("float32", "bfloat16")
    for kv_dtype in kv_dtypes:
        found = ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype=kv_dtype).run(WHOLE)
        for ours, theirs in zip(found, expected, strict=True):
            assert distance(ours, theirs) < CLOSENESS[quantization]


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("block_size", [2, 8, 16, 32])
@pytest.mark.parametrize("kind", ["llama-tied", "mistral-window", "qwen2", "qwen3"])
def test_a_row_is_the_same_bit_by_bit_however_it_is_batched_and_cut(
    kind: str, block_size: int, quantization: Quantization, configs: dict[str, ModelConfig]
) -> None:
    model = load(configs[kind], quantization)

    def run(plan: list[dict[int, int]]) -> list[Tensor]:
        own = ExecutorRun(model.native, model.config, SEQUENCES, block_size=block_size, kv_dtype="bfloat16")
        return own.run(plan)

    whole = run(WHOLE)
    for plan in (
        CHUNKS,
        [{0: 23, 1: 40, 2: 9}],
        [{row: 1 for row in range(3) if i < len(SEQUENCES[row])} for i in range(40)],
    ):
        for ours, alone in zip(run(plan), whole, strict=True):
            assert torch.equal(ours, alone)


@pytest.mark.parametrize("isa", list(library.Isa))
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_each_instruction_set_gives_the_logits(
    isa: library.Isa, quantization: Quantization, configs: dict[str, ModelConfig]
) -> None:
    if isa > library.best_isa():
        pytest.skip(f"this CPU has no {isa.name}")
    model = load(configs["qwen3"], quantization)
    expected = ExecutorRun(model.reference, model.config, SEQUENCES).run(CHUNKS)
    with library.forced_isa(isa):
        found = ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype="bfloat16").run(CHUNKS)
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs) < CLOSENESS[quantization]


@pytest.mark.parametrize("isa", list(library.Isa))
def test_a_cache_of_int8_gives_nearly_the_logits_and_the_same_bits_however_cut(
    isa: library.Isa, configs: dict[str, ModelConfig]
) -> None:
    if isa > library.best_isa():
        pytest.skip(f"this CPU has no {isa.name}")
    for kind in ("llama", "mistral-window"):
        model = load(configs[kind], "int8")
        expected = ExecutorRun(model.reference, model.config, SEQUENCES).run(WHOLE)
        with library.forced_isa(isa):
            whole, cut = (
                ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype="int8").run(plan)
                for plan in (WHOLE, CHUNKS)
            )
        for ours, again, theirs in zip(whole, cut, expected, strict=True):
            assert distance(ours, theirs) < 2 * CLOSENESS["int8"]
            assert torch.equal(ours, again)


def test_more_threads_change_nothing(configs: dict[str, ModelConfig]) -> None:
    model = load(configs["llama"], "int8")
    found = []
    before = library.num_threads()
    for count in (1, 2, 5):
        library.set_num_threads(count)
        found.append(ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype="bfloat16").run(CHUNKS))
    library.set_num_threads(before)
    for other in found[1:]:
        for ours, single in zip(other, found[0], strict=True):
            assert torch.equal(ours, single)


def test_hidden_states_are_computed_for_the_tokens_asked_for(configs: dict[str, ModelConfig]) -> None:
    model = load(configs["llama"], "int8")
    step = {0: 1, 1: 13, 2: 7}
    runs = [ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype="bfloat16") for _ in range(4)]
    every = runs[0].step(step)
    for run, wanted in zip(runs[1:], ([0, 13, 20], [2, 3, 4, 9, 14, 15], []), strict=True):
        assert torch.equal(run.step(step, wanted), every[wanted])
        after = run.step({0: 1, 1: 5, 2: 2}), runs[0].executor  # the cache holds all tokens all the same
        assert after[0].isfinite().all()


def test_long_prompts_go_through_in_blocks_of_tokens(configs: dict[str, ModelConfig]) -> None:
    config = replace_config(configs["llama"], max_position_embeddings=2048)
    model = load(config, "int8")
    sequences = [[(5 * i * i + i + row) % 97 for i in range(700)] for row in range(2)]

    def run(plan: list[dict[int, int]]) -> list[Tensor]:
        return ExecutorRun(model.native, config, sequences, block_size=16, kv_dtype="bfloat16").run(plan)

    for ours, alone in zip(run([{0: 700, 1: 700}]), run([{0: 350}, {0: 350}, {1: 512}, {1: 188}]), strict=True):
        assert torch.equal(ours, alone)


def test_greedy_tokens_are_the_first_largest_logits(configs: dict[str, ModelConfig]) -> None:
    model = load(configs["llama"], "int8")
    run = ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype="bfloat16")
    hidden = run.step({0: 23, 1: 40})
    assert run.executor.greedy_tokens(hidden.numpy()).tolist() == run.head(hidden).argmax(1).tolist()
    assert run.executor.greedy_tokens(np.zeros((3, 64), np.float32)).tolist() == [0, 0, 0]  # all are equal: the first


def test_sequences_without_a_cache(configs: dict[str, ModelConfig]) -> None:
    model = load(configs["llama"], "int8")
    run = ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype="bfloat16")
    ids = np.array(list(chain.from_iterable(SEQUENCES)), np.int32)
    bounds = np.array([0, 23, 63, 72], np.int32)
    positions = np.concatenate([np.arange(len(sequence)) for sequence in SEQUENCES])
    found = torch.from_numpy(model.native.encode(ids, positions, bounds, 40))
    assert torch.equal(found, torch.cat([run.step({row: len(SEQUENCES[row])}) for row in range(3)]))


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_blocks_of_a_gguf_file_keep_their_values(
    architecture: str, ggml_type: str, tmp_path: Path, configs: dict[str, ModelConfig]
) -> None:
    source = configs[architecture]
    tensors = load_file(Path(source.path) / "model.safetensors")
    path = tmp_path / "model.gguf"
    heads = (source.num_heads, source.num_kv_heads)
    write_gguf(path, architecture, tensors, heads, gguf.GGMLQuantizationType[ggml_type])
    config = replace_config(source, path=str(path), format="gguf")
    decoder = load_packed(config, open_weights(config), "stored", num_threads=2, progress=False)
    found = unpacked(config, decoder)
    with torch.inference_mode():
        expected = load_model(config, torch.float32, "cpu", progress=False)
    assert isinstance(expected, LlamaModel)
    exact = ggml_type != "F16"  # which is kept in bf16
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert isinstance(ours.mlp, Mlp) and isinstance(theirs.mlp, Mlp)
        for own, other in (
            (ours.attention.qkv, theirs.attention.qkv),
            (ours.attention.output, theirs.attention.output),
            (ours.mlp.gate_up, theirs.mlp.gate_up),
            (ours.mlp.down, theirs.mlp.down),
        ):
            torch.testing.assert_close(own, other, rtol=0 if exact else 4e-3, atol=2e-6)
    torch.testing.assert_close(found.embedding, expected.embedding, rtol=0 if exact else 4e-3, atol=2e-6)


def test_parts_of_different_formats_stand_side_by_side(tmp_path: Path, configs: dict[str, ModelConfig]) -> None:
    """As in files of mixed quantisation: v in more bits than q and k, and gate in more than up."""
    source = configs["qwen2"]
    tensors = load_file(Path(source.path) / "model.safetensors")
    path = tmp_path / "model.gguf"
    wide = gguf.GGMLQuantizationType.Q8_0
    types = {name: wide for name in tensors if "v_proj" in name or "gate_proj" in name}
    heads = (source.num_heads, source.num_kv_heads)
    write_gguf(path, "qwen2", tensors, heads, gguf.GGMLQuantizationType.Q4_1, types=types)
    model = load(replace_config(source, path=str(path), format="gguf"), "stored")
    assert [len(layer.qkv) for layer in model.decoder.layers] == [2, 2, 2]
    assert model.decoder.formats == ["int4", "int8"]
    expected = ExecutorRun(model.reference, model.config, SEQUENCES).run(CHUNKS)
    found = ExecutorRun(model.native, model.config, SEQUENCES, kv_dtype="bfloat16").run(CHUNKS)
    for ours, theirs in zip(found, expected, strict=True):
        assert distance(ours, theirs) < CLOSENESS["int4"]


def test_a_missing_tensor_and_a_wrong_shape_are_named(configs: dict[str, ModelConfig]) -> None:
    config = configs["llama"]
    for changes, text in (
        ({"num_layers": 4}, "model.layers.3.*is missing"),
        ({"intermediate_size": 128}, r"gate_proj.weight has shape \[96, 64\], expected \[128, 64\]"),
        ({"qk_norm": True}, "q_norm.weight is missing"),
    ):
        changed = replace_config(config, **changes)
        with pytest.raises(ModelError, match=text):
            load_packed(changed, open_weights(changed), "int8", num_threads=1, progress=False)
