"""GGUF files against the safetensors copy of the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as GGMLType
from torch import Tensor

from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.models.gguf_weights import GGUFWeights
from procengine.models.loader import load_model, read_into
from tests.model_configs import model_config_from_hf, replace
from tests.unit.models.gguf_files import write_gguf
from tests.unit.models.paged_forward import forward_whole
from tests.unit.models.tiny_models import save_tiny_model

TOKENS = [(11 * i + 5) % 97 for i in range(30)]


def parameters(oracle: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in oracle.named_parameters()}


def save_both(kind: str, tmp_path: Path, architecture: str) -> tuple[ModelConfig, ModelConfig]:
    """The safetensors and the GGUF copy of a tiny model."""
    oracle = save_tiny_model(kind, tmp_path)
    config = model_config_from_hf(oracle.config, tmp_path)
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture, parameters(oracle), (config.num_heads, config.num_kv_heads))
    return config, replace(config, format="gguf", path=str(path))


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("llama", "llama"),
        ("llama-tied", "llama"),
        ("llama-biases", "llama"),
        ("llama-head-dim", "llama"),
        ("mistral-window", "llama"),  # llama.cpp's converter calls Mistral llama, and permutes it
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
    ],
)
def test_lod_01_a_gguf_file_gives_exactly_the_logits_of_its_safetensors_copy(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    plain, quantised = save_both(kind, tmp_path, architecture)
    expected = forward_whole(load_model(plain, torch.float32, "cpu", progress=False), TOKENS)
    found = forward_whole(load_model(quantised, torch.float32, "cpu", progress=False), TOKENS)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("ggml_type", "cosine"),
    [
        (GGMLType.F32, 0.999999),
        (GGMLType.F16, 0.999999),
        (GGMLType.BF16, 0.9999),
        (GGMLType.Q8_0, 0.9999),
        (GGMLType.Q4_0, 0.98),
        (GGMLType.Q4_1, 0.98),
    ],
)
def test_matrices_of_every_type_come_out_right_side_up(
    ggml_type: GGMLType, cosine: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(5000, 256, generator=generator),  # more than one chunk
        "model.layers.0.self_attn.q_proj.weight": torch.randn(256, 256, generator=generator),
        "model.layers.0.self_attn.k_proj.weight": torch.randn(64, 256, generator=generator),
        "model.layers.0.self_attn.q_proj.bias": torch.randn(256, generator=generator),
        "model.layers.11.mlp.down_proj.weight": torch.randn(3, 256, generator=generator),
    }
    write_gguf(tmp_path / "x.gguf", "llama", tensors, (8, 2), ggml_type)
    source = GGUFWeights(tmp_path / "x.gguf", 8, 2)
    assert set(source.names) == set(tensors)
    for name, tensor in tensors.items():
        assert source.shape(name) == tuple(tensor.shape)
        destination = torch.empty(tensor.shape, dtype=dtype)
        read_into(source, name, destination)
        rows = torch.cosine_similarity(destination.float().view(-1, 32), tensor.view(-1, 32))
        assert float(rows.min()) > min(cosine, 0.9999 if dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("ggml_type", [GGMLType.Q4_K, GGMLType.Q6_K])
def test_k_quants_are_decoded_by_the_gguf_package(ggml_type: GGMLType, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[ggml_type]
    raw = np.random.default_rng(0).integers(0, 60, (6, 2 * size), dtype=np.uint8)  # small bytes: no NaN in the scales
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=ggml_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    destination = torch.empty(6, 2 * block)
    read_into(GGUFWeights(tmp_path / "x.gguf", 1, 1), "model.layers.0.mlp.up_proj.weight", destination)
    assert torch.equal(destination, torch.from_numpy(gguf.dequantize(raw, ggml_type)))


def test_a_type_that_cannot_be_decoded_is_an_error_with_its_name(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", "llama", {}, (1, 1), extra={"output_norm.weight": np.zeros(8, dtype=np.int32)})
    with pytest.raises(ModelError, match=r"model\.norm\.weight .* I32"):
        read_into(GGUFWeights(tmp_path / "x.gguf", 1, 1), "model.norm.weight", torch.empty(8))
