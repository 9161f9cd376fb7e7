"""Decoders without an implementation here, on transformers' modules with our attention: the same logits and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from procengine.config import ModelConfig
from procengine.decoder_sizes import why_not_decoder
from procengine.errors import ModelError
from procengine.model_source import resolve_model
from procengine.models.loader import load_model
from procengine.torch_executor import TorchModel
from tests import tiny_tokenizers
from tests.unit.models.executor_run import ExecutorRun
from tests.unit.models.test_families import (
    CHUNKS,
    CROWDED,
    SEQUENCES,
    _one_thread,
    assert_best,
    assert_states,
    generate,
    oracle_logits,
)
from tests.unit.runner_engine import VOCAB, TinyModel

__all__ = ["_one_thread"]

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Parallel blocks and interleaved rotary pairs with a scale on the logits; partial rotary positions and layer norms;
# a window in every other layer.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "stablelm": ("StableLm", {}),
    "cohere2": ("Cohere2", {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}),
}


def save(prefix: str, folder: Path, **changes: Any) -> tuple[Any, ModelConfig]:
    import transformers

    config = getattr(transformers, f"{prefix}Config")(**{**_SIZES, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(5)
        oracle = getattr(transformers, f"{prefix}ForCausalLM")(config).eval().float()
    oracle.save_pretrained(folder)
    tiny_tokenizers.byte_level().backend.save(str(folder / "tokenizer.json"))
    return oracle, resolve_model(str(folder), folder / "home")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prefix, changes = MODELS[name]
    oracle, config = save(prefix, tmp_path, **changes)
    assert config.architecture == "transformers" and why_not_decoder(config) is not None
    with caplog.at_level("INFO"):
        loaded = TorchModel(load_model(config, torch.float32, "cpu", progress=False))
    assert "transformers' modules run" in caplog.text
    found = ExecutorRun(loaded, config, SEQUENCES).run(CHUNKS)
    for logits, sequence in zip(found, SEQUENCES, strict=True):
        torch.testing.assert_close(logits, oracle_logits(oracle, sequence), atol=1e-4, rtol=1e-4)
    assert_states(oracle, TinyModel(config, loaded))
    assert_best(oracle, generate(TinyModel(config, loaded), 1, **CROWDED))


@pytest.mark.parametrize(
    ("prefix", "changes", "message"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}, "takes no positions"),
        ("DeepseekV3", {"first_k_dense_replace": 2, "num_key_value_heads": 4}, "are not of"),
    ],
)
def test_what_our_attention_cannot_stand_for_is_refused(
    prefix: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, config = save(prefix, tmp_path, **changes)
    with pytest.raises(ModelError, match=f"cannot be run by transformers' modules.*{message}"):
        load_model(config, torch.float32, "cpu", progress=False)


def test_a_missing_tensor_is_named_and_not_made_up(tmp_path: Path) -> None:
    _, config = save("StableLm", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    save_file({key: tensor for key, tensor in load_file(path).items() if key != name}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} is missing"):
        load_model(config, torch.float32, "cpu", progress=False)
