"""Loading: what is missing, misshapen, tied, sharded or unreadable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.models.loader import load_model
from procengine.models.registry import IMPLEMENTATIONS, find_implementation
from tests.model_configs import model_config_from_hf, replace
from tests.unit.models.paged_forward import forward_whole
from tests.unit.models.tiny_models import save_tiny_model

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def load(config: ModelConfig) -> torch.Tensor:
    return forward_whole(load_model(config, torch.float32, "cpu", progress=False), TOKENS)


def saved(kind: str, folder: Path) -> ModelConfig:
    return model_config_from_hf(save_tiny_model(kind, folder).config, folder)


def edit(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Add or replace tensors of model.safetensors; None removes one."""
    tensors: dict[str, Any] = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


def test_lod_02_tied_without_a_head_uses_the_embedding(tmp_path: Path) -> None:
    config = saved("llama-tied", tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    model = load_model(config, torch.float32, "cpu", progress=False)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    identity = torch.eye(config.hidden_size)
    torch.testing.assert_close(model.compute_logits(identity), embedding.T)


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_lod_02_tied_with_a_head_of_its_own_ignores_it_as_hugging_face_does(tmp_path: Path, scale: float) -> None:
    config = saved("llama-tied", tmp_path)
    before = load(config)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit(tmp_path, {"lm_head.weight": embedding.clone() * scale})
    assert torch.equal(load(config), before)


def test_lod_02_untied_without_a_head_is_an_error_naming_it(tmp_path: Path) -> None:
    config = replace(saved("llama-tied", tmp_path), tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        load(config)


@pytest.mark.parametrize(
    "name",
    ["model.embed_tokens.weight", "model.layers.2.self_attn.k_proj.bias", "model.layers.0.mlp.up_proj.weight"],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    config = saved("llama-biases", tmp_path)
    edit(tmp_path, {name: None})
    with pytest.raises(ModelError, match=f"{name} is missing"):
        load(config)


@pytest.mark.parametrize("shape", [(8, 31), (16, 32), (32, 8), (8 * 32,)])
def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path, shape: tuple[int, ...]) -> None:
    config = replace(saved("llama", tmp_path), num_kv_heads=1)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit(
        tmp_path,
        {
            f"model.layers.{layer}.self_attn.{part}_proj.weight": torch.zeros(8, 32)
            for layer in range(3)
            for part in "kv"
        },
    )
    edit(tmp_path, {name: torch.zeros(shape)})
    with pytest.raises(ModelError) as caught:
        load(config)
    message = str(caught.value)
    assert name in message
    assert str(list(shape)) in message
    assert "[8, 32]" in message


def test_a_quantised_tensor_is_named_with_its_type(tmp_path: Path) -> None:
    config = saved("llama", tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    edit(tmp_path, {name: torch.zeros(32, 44, dtype=torch.int8)})
    with pytest.raises(ModelError, match=f"{name} is stored as I8"):
        load(config)


def test_sizes_that_the_file_does_not_have_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    config = replace(saved("llama", tmp_path), vocab_size=1 << 24, hidden_size=1 << 20)  # 64 TiB of embedding
    with pytest.raises(ModelError, match=r"embed_tokens\.weight has shape"):
        load(config)


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    config = saved("llama", whole)
    save_tiny_model("llama", shards, max_shard_size="20KB")
    assert len(list(shards.glob("*.safetensors"))) > 1
    assert torch.equal(load(replace(config, path=str(shards))), load(config))


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    oracle = save_tiny_model("llama", tmp_path, max_shard_size="20KB")
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(ModelError, match=first.name):
        load(model_config_from_hf(oracle.config, tmp_path))


@pytest.mark.parametrize("index", ["[]", "{", "{}", '{"weight_map": 3}'])
def test_a_broken_index_is_named(tmp_path: Path, index: str) -> None:
    config = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="not a safetensors index"):
        load(config)


def test_a_folder_without_weights_and_a_broken_file_are_errors(tmp_path: Path) -> None:
    config = saved("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(json.dumps({"not": "safetensors"}).encode())
    with pytest.raises(ModelError, match="not a safetensors file"):
        load(config)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds neither"):
        load(config)


def test_names_without_the_wrapper_prefix_are_found(tmp_path: Path) -> None:
    config = saved("qwen3", tmp_path)
    before = load(config)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("model."): t.clone() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    assert torch.equal(load(config), before)


def test_progress_goes_to_stderr_and_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = saved("llama", tmp_path)
    capsys.readouterr()  # transformers' own bar
    load_model(config, torch.float32, "cpu", progress=False)
    assert capsys.readouterr() == ("", "")
    load_model(config, torch.float32, "cpu", progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Loading weights: 100%" in err


@pytest.mark.parametrize("architecture", IMPLEMENTATIONS)
def test_every_registered_architecture_can_be_imported(architecture: str) -> None:
    assert callable(find_implementation(architecture))


def test_an_unknown_architecture_is_refused_with_the_choices() -> None:
    with pytest.raises(ModelError, match="'mamba'; there are: gemma2, gemma3, gpt2, granite, llama, mistral"):
        find_implementation("mamba")
