"""What config.json and the files of sentence-transformers say of an encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.model_source import resolve_model
from procengine.safetensors_file import SafetensorsFile

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "vocab_size": 100,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
}


def write_weights(path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(np.uint64(len(header)).tobytes() + header + bytes(4))
    assert SafetensorsFile(path).tensors


def resolve(folder: Path, **changes: Any) -> ModelConfig:
    write_weights(folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(BERT | changes))
    return resolve_model(str(folder), folder)


def classifier(folder: Path, **changes: Any) -> ModelConfig:
    return resolve(folder, architectures=["BertForSequenceClassification"], **changes)


def test_an_encoder_without_files_pools_as_sentence_transformers_does(tmp_path: Path) -> None:
    config = resolve(tmp_path)
    assert (config.pooling, config.normalize, config.prompts, config.max_seq_length) == ("mean", False, {}, None)
    assert config.workflows == ("embed", "hidden_states")
    assert config.max_position_embeddings == 512


def test_roberta_positions_begin_behind_the_padding(tmp_path: Path) -> None:
    config = resolve(tmp_path, architectures=["XLMRobertaModel"], max_position_embeddings=514, type_vocab_size=1)
    assert config.encoder is not None
    assert (config.max_position_embeddings, config.encoder.position_offset) == (512, 2)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"num_labels": 1}, "sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}}, "softmax"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, "identity"),
        (
            {"id2label": {"0": "a"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            "identity",
        ),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            "sigmoid",
        ),
    ],
)
def test_scores_are_what_the_files_say(changes: dict[str, Any], activation: str, tmp_path: Path) -> None:
    head = classifier(tmp_path, **changes).head
    assert head is not None and head.activation == activation


def test_labels_are_named_and_one_label_makes_a_cross_encoder(tmp_path: Path) -> None:
    config = classifier(tmp_path, id2label={"1": "good", "0": "bad", "3": "odd"})
    assert config.head is not None and config.head.labels == ("bad", "good", "LABEL_2", "odd")
    assert config.workflows == ("embed", "hidden_states", "classify")
    assert classifier(tmp_path, num_labels=1).workflows == ("embed", "hidden_states", "classify", "score", "reward")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
        ({"is_decoder": True}, "configured as a decoder"),
        ({"hidden_size": 50}, "hidden_size 50 does not make 4 heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"architectures": ["ModernBertModel"], "layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        (
            {"architectures": ["BertForSequenceClassification"], "sbert_ce_default_activation_function": "Tanh"},
            "'Tanh'",
        ),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(tmp_path, **changes)


def test_a_module_that_is_not_known_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(
        json.dumps([{"type": "sentence_transformers.models.Dense", "path": "3_Dense"}])
    )
    with pytest.raises(ModelError, match="Dense is not supported"):
        resolve(tmp_path)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(ModelError, match=r"modules\.json: cannot be read"):
        resolve(tmp_path)


def test_prompts_may_be_empty(tmp_path: Path) -> None:
    """Qwen3-Embedding names one for documents that says nothing."""
    prompts = {"query": "Query: ", "document": "", "none": None}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    assert resolve(tmp_path).prompts == {"query": "Query: ", "document": "", "none": ""}


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_layers_beside_the_encoder_bring_their_workflows(suffix: str, tmp_path: Path) -> None:
    (tmp_path / f"sparse_linear.{suffix}").touch()
    config = resolve(tmp_path, architectures=["XLMRobertaModel"])
    assert config.workflows == ("embed", "hidden_states", "embed_sparse")
    assert (config.sparse_linear, config.colbert_linear) == (str(tmp_path / f"sparse_linear.{suffix}"), "")
    (tmp_path / f"colbert_linear.{suffix}").touch()
    assert resolve(tmp_path, architectures=["XLMRobertaModel"]).workflows[-2:] == ("embed_sparse", "embed_multi")
