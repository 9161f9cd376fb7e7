"""Every type of tensor that a GGUF file may hold, from the file to greedy tokens: the native engine against its weights
as the `gguf` package dequantises them, run in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GGMLType
from numpy.typing import NDArray
from safetensors.torch import load_file

from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.kernels.linear.packed import GGML_FORMATS
from procengine.kernels.native import library
from procengine.models.loader import load_model
from procengine.models.packed_llama import load_packed
from procengine.models.weights import open_weights
from procengine.native_executor import NativeModel
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf, replace
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.gguf_files import write_gguf
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import PROMPTS, Engine, TinyModel

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")

TYPES = [
    *(GGMLType.F16, GGMLType.BF16, GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.Q8_0),
    *(GGMLType.Q2_K, GGMLType.Q3_K, GGMLType.Q4_K, GGMLType.Q5_K, GGMLType.Q6_K, GGMLType.IQ4_XS),
]
# Like Q2_K, they are dequantised by the package and packed as bf16.
RARE_TYPES = [
    *(GGMLType.F32, GGMLType.IQ1_S, GGMLType.IQ1_M, GGMLType.IQ2_XXS, GGMLType.IQ2_XS, GGMLType.IQ2_S),
    *(GGMLType.IQ3_XXS, GGMLType.IQ3_S, GGMLType.IQ4_NL, GGMLType.TQ1_0, GGMLType.TQ2_0, GGMLType.MXFP4),
]
# Where blocks have the fp16 scales of their scales and of their mins, and how far the latter shift: to around zero.
MINS = {GGMLType.Q2_K: (80, 82, 1.5), GGMLType.Q4_K: (0, 2, 7.5), GGMLType.Q5_K: (0, 2, 15.5)}
SIZES: dict[str, Any] = {  # rows are whole blocks of 256
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MAX_TOKENS = 10
# As a share of what is computed: activations are rounded to bf16 or to int8. A nibble in the wrong place gives about 1.
CLOSENESS = 0.05


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("llama")
    oracle = save_tiny_model("llama", folder, **SIZES, initializer_range=0.08)
    return model_config_from_hf(oracle.config, folder)


def random_blocks(ggml_type: GGMLType, count: int) -> NDArray[np.uint8]:
    """Blocks of random bits that stand for numbers of the size of weights; most do not. Repeated when there are few."""
    generator = np.random.default_rng(ggml_type.value)
    bits = generator.integers(0, 256, (2000, GGML_QUANT_SIZES[ggml_type][1]), dtype=np.uint8)
    if ggml_type in MINS:
        scale_at, min_at, half_range = MINS[ggml_type]
        scales = np.exp2(generator.uniform(-13, -6, len(bits)))
        for at, halves in ((scale_at, scales), (min_at, scales * half_range)):
            bits[:, at : at + 2] = halves.astype(np.float16)[:, None].view(np.uint8)
    with np.errstate(all="ignore"):
        values = gguf.dequantize(bits, ggml_type).reshape(len(bits), -1).astype(np.float64)
        means, deviations = values.mean(axis=1), values.std(axis=1)
    usable = bits[(deviations > 0.02) & (deviations < 0.08) & (abs(means) < deviations / 2)]  # false for NaN
    assert len(usable) > 10, len(usable)
    found: NDArray[np.uint8] = usable[generator.integers(0, len(usable), count)]
    return found


def quantized(values: NDArray[np.float32], ggml_type: GGMLType) -> NDArray[Any]:
    """By the package, or random blocks where it only reads them."""
    try:
        return np.asarray(gguf.quantize(values, ggml_type))
    except NotImplementedError:
        count = values.size // GGML_QUANT_SIZES[ggml_type][0]
        return random_blocks(ggml_type, count).reshape(values.shape[0], -1)


def save(source: ModelConfig, ggml_type: GGMLType, path: Path, **options: Any) -> ModelConfig:
    tensors = load_file(Path(source.path) / "model.safetensors")
    heads = (source.num_heads, source.num_kv_heads)
    write_gguf(path, "llama", tensors, heads, ggml_type, quantize=quantized, **options)
    return replace(source, path=str(path), format="gguf")


def load_both(config: ModelConfig) -> tuple[NativeModel, TorchModel]:
    decoder = load_packed(config, open_weights(config), "stored", num_threads=1, progress=False)
    exact = TorchModel(load_model(config, torch.float32, "cpu", progress=False))
    return NativeModel(decoder, config.num_layers, "float32"), exact


def check(config: ModelConfig) -> NativeModel:
    """Logits of prompts, and greedy tokens through scheduler and runner."""
    native, exact = load_both(config)
    whole = [{row: len(prompt)} for row, prompt in enumerate(PROMPTS)]
    found, expected = (ExecutorRun(model, config, PROMPTS).run(whole) for model in (native, exact))
    for ours, theirs in zip(found, expected, strict=True):
        distances = (ours - theirs).norm(dim=1) / theirs.norm(dim=1)
        assert float(distances.mean()) < CLOSENESS
        assert float(distances.max()) < 4 * CLOSENESS  # a random model hands an error on, larger here than there
    engine = Engine(TinyModel(config, native), max_num_batched_tokens=16)
    for prompt in PROMPTS:
        engine.add(prompt, MAX_TOKENS)
    engine.run()
    num_best = 0
    for key, prompt in enumerate(PROMPTS):
        sequence = [*prompt, *engine.tokens[key]]
        (logits,) = ExecutorRun(exact, config, [sequence]).run([{0: len(sequence)}])
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(engine.tokens[key])[:, None])[:, 0]
        assert bool((rows.amax(1) - chosen <= 2 * CLOSENESS * rows.norm(dim=1)).all()), "far from the best token"
        num_best += int((rows.argmax(1) == torch.tensor(engine.tokens[key])).sum())
    assert num_best > len(PROMPTS) * MAX_TOKENS * 0.8
    return native


@pytest.mark.parametrize(
    "ggml_type",
    [*TYPES, *(pytest.param(rare, marks=pytest.mark.slow) for rare in RARE_TYPES)],
    ids=lambda ggml_type: ggml_type.name,
)
def test_tokens_are_those_of_the_dequantised_weights(ggml_type: GGMLType, source: ModelConfig, tmp_path: Path) -> None:
    native = check(save(source, ggml_type, tmp_path / "model.gguf"))
    packed = GGML_FORMATS.get(ggml_type.name)
    assert native.facts["quantization"] == ("bf16" if packed is None else packed.kind)


@pytest.mark.parametrize(
    ("narrow", "wide"), [("Q4_K", "Q6_K"), ("Q4_0", "Q5_1"), ("Q5_0", "Q8_0"), ("Q3_K", "Q5_K"), ("Q4_K", "F16")]
)
def test_tokens_of_files_of_mixed_types(narrow: str, wide: str, source: ModelConfig, tmp_path: Path) -> None:
    """As llama.cpp mixes them: in more bits the head and some matrices of a layer, some of which share a packed one."""
    parts = ("v_proj", "down_proj", "layers.0.mlp.gate_proj", "lm_head")
    names = load_file(Path(source.path) / "model.safetensors")
    types = {name: GGMLType[wide] for name in names if any(part in name for part in parts)}
    check(save(source, GGMLType[narrow], tmp_path / "model.gguf", types=types))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("ggml_type", [GGMLType.Q8_1, GGMLType.Q8_K])
def test_a_type_that_nobody_can_read_is_named_with_its_tensor(
    ggml_type: GGMLType, name: str, source: ModelConfig, tmp_path: Path
) -> None:
    def blocks(values: NDArray[np.float32], own_type: GGMLType) -> NDArray[Any]:
        size, num_bytes = GGML_QUANT_SIZES[own_type]
        zeros = np.zeros((values.shape[0], values.shape[1] // size * num_bytes), np.uint8)
        return zeros if own_type == ggml_type else np.asarray(gguf.quantize(values, own_type))

    tensors = load_file(Path(source.path) / "model.safetensors")
    path, heads = tmp_path / "model.gguf", (source.num_heads, source.num_kv_heads)
    write_gguf(path, "llama", tensors, heads, GGMLType.Q8_0, types={name: ggml_type}, quantize=blocks)
    config = replace(source, path=str(path), format="gguf")
    with pytest.raises(ModelError, match=f"tensor {name} has the unsupported type {ggml_type.name}"):
        load_packed(config, open_weights(config), "stored", num_threads=1, progress=False)
