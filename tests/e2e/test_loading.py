"""LOD-01, LOD-02 and LOD-04 of shared/cases.md: the GGUF file and a safetensors copy of it are the same model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend

from procengine import LLM
from procengine.errors import StartupError
from procengine.models.loader import read_into
from procengine.models.weights import open_weights
from tests.e2e.oracle import next_logprobs
from tests.e2e.running_group import RunningGroup
from tests.e2e.smollm2 import P1, P2, P3, P4, SMOLLM2_OPTIONS, greedy

pytestmark = pytest.mark.model

_PROMPTS = [P1, P2, P3, P4]
_SMALL = SMOLLM2_OPTIONS | {"num_blocks": 64}


def check_continuations(llm: LLM) -> None:
    params = [greedy(len(prompt.token_ids)) for prompt in _PROMPTS]
    outputs = llm.generate([prompt.text for prompt in _PROMPTS], params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == [prompt.token_ids for prompt in _PROMPTS]


def variant(copy: Path, folder: Path, **changes: Any) -> Path:
    """The copy with another config.json (None removes a key); the large files are links."""
    folder.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        os.link((copy / name).resolve(), folder / name)
    config = json.loads((copy / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


# --- LOD-01


def test_lod_01_every_tensor_is_the_one_of_the_safetensors_copy(smollm2: RunningGroup, smollm2_oracle: Any) -> None:
    source = open_weights(smollm2.config.model)
    expected = dict(smollm2_oracle.named_parameters())  # the tied head is no parameter of its own
    assert set(source.names) == set(expected)
    for name, tensor in expected.items():
        found = torch.empty(source.shape(name))
        read_into(source, name, found)
        assert torch.equal(found, tensor), name


def test_lod_01_the_safetensors_copy_gives_the_same_continuations(smollm2_copy: Path) -> None:
    with LLM(str(smollm2_copy), **_SMALL) as llm:
        check_continuations(llm)


def test_lod_01_a_long_text_is_as_likely_as_transformers_says(smollm2: RunningGroup, smollm2_oracle: Any) -> None:
    """Short prompts can look fine with wrong rows. The perplexity itself is in tests/unit/models/test_smollm2.py."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")[:2048]
    result = smollm2.client.generate(text, greedy(1, logprobs=20))
    assert len(result.prompt_token_ids) >= 200
    (found,) = result.outputs[0].logprobs or []
    expected = next_logprobs(smollm2_oracle, result.prompt_token_ids)
    assert list(found) == expected.topk(20).indices.tolist()
    assert [entry.logprob for entry in found.values()] == pytest.approx(expected[list(found)].tolist(), abs=1e-3)


# --- LOD-02


def test_lod_02_an_equal_head_beside_tied_embeddings(smollm2_copy: Path, smollm2_oracle: Any, tmp_path: Path) -> None:
    folder = variant(smollm2_copy, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    head = smollm2_oracle.get_input_embeddings().weight.detach()
    save_file({"lm_head.weight": head}, folder / "model-00002-of-00002.safetensors")
    names = [name for name, _ in smollm2_oracle.named_parameters()]
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    weight_map["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with LLM(str(folder), **_SMALL) as llm:
        check_continuations(llm)


@pytest.mark.parametrize("tie", [False, None], ids=["tie-false", "no-key-which-means-false-for-llama"])
def test_lod_02_an_untied_head_that_is_not_there(tie: bool | None, smollm2_copy: Path, tmp_path: Path) -> None:
    folder = variant(smollm2_copy, tmp_path / "model", tie_word_embeddings=tie)
    with pytest.raises(StartupError, match=r"lm_head\.weight is missing"):
        LLM(str(folder), **_SMALL)


# --- LOD-04


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  3", "a|ĠĠ|3"),
        ("x =    42", "x|Ġ=|ĠĠĠĠ|4|2"),
        ("\n\n1. one", "ĊĊ|1|.|Ġone"),
        ("if x:\n    1", "if|Ġx|:|ĊĠĠĠĠ|1"),
        ("2024 and 1999", "2|0|2|4|Ġand|Ġ|1|9|9|9"),
    ],
)
def test_lod_04_the_model_sees_the_tokens_of_its_pre_tokenizer(text: str, expected: str, smollm2: RunningGroup) -> None:
    backend = Backend.from_file(smollm2.config.model.tokenizer_path)
    result = smollm2.client.generate(text, greedy(1))
    assert "|".join(backend.id_to_token(token) or "?" for token in result.prompt_token_ids) == expected


def test_lod_04_digits_of_other_scripts_stand_alone_too(smollm2: RunningGroup) -> None:
    backend = Backend.from_file(smollm2.config.model.tokenizer_path)
    text = "½ ² ٣٤"
    result = smollm2.client.generate(text, greedy(1))
    assert backend.decode(result.prompt_token_ids) == text
    # Alone or beside others, each digit gets the same tokens: nothing was merged over it.
    alone = [smollm2.client.generate(digit, greedy(1)).prompt_token_ids for digit in ("½", "²", "٣", "٤")]
    space = smollm2.client.generate(" ", greedy(1)).prompt_token_ids
    assert result.prompt_token_ids == [*alone[0], *space, *alone[1], *space, *alone[2], *alone[3]]
