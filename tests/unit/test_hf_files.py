"""HuggingFaceFolder: the files beside config.json, and what is said when one is missing or broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from procengine.errors import ModelError
from procengine.model_source import resolve_model
from tests.model_files import LLAMA, resolve, without, write_folder


def test_chat_template_sources(tmp_path: Path) -> None:
    assert resolve(tmp_path, LLAMA).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert resolve(tmp_path, LLAMA, tokenizer_config__json={"chat_template": named}).chat_template == "D"
    assert resolve(tmp_path, LLAMA, tokenizer_config__json={"chat_template": "C"}).chat_template == "C"
    assert resolve(tmp_path, LLAMA, chat_template__jinja="J\n").chat_template == "J\n"


def test_sharded_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        resolve_model(str(folder), tmp_path)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"not there: model-2\.safetensors"):
        resolve_model(str(folder), tmp_path)
    (folder / "model-2.safetensors").touch()
    assert resolve_model(str(folder), tmp_path).num_layers == 2


def test_files_of_torch_are_taken_where_there_is_no_other_and_only_whole(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", without(LLAMA, "dtype"))
    (folder / "model.safetensors").rename(folder / "kept")
    torch.save({"w": torch.ones(2, dtype=torch.float16)}, folder / "pytorch_model.bin")
    assert resolve_model(str(folder), tmp_path).weights_dtype == "float16"
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(ModelError, match=r"of the other kind only pytorch_model\.bin is read"):
        resolve_model(str(folder), tmp_path)


@pytest.mark.parametrize(("code", "dtype"), [("F32", "float32"), ("BF16", "bfloat16"), ("F16", "float16")])
def test_dtype_from_the_weights_when_the_config_has_none(tmp_path: Path, code: str, dtype: str) -> None:
    folder = write_folder(tmp_path / "m", without(LLAMA, "dtype"))
    header = json.dumps({"__metadata__": {"format": "pt"}, "w": {"dtype": code, "shape": [0], "data_offsets": [0, 0]}})
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    assert resolve_model(str(folder), tmp_path).weights_dtype == dtype
    (folder / "model.safetensors").write_bytes(b"\xff" * 30)
    with pytest.raises(ModelError, match="not a safetensors file"):
        resolve_model(str(folder), tmp_path)


def test_emb_02_pooling_comes_from_the_files(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    assert resolve_model(str(folder), tmp_path).pooling == "last"
    (folder / "1_Pooling").mkdir()
    for content, expected in [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False, "include_prompt": True}, "mean"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ]:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        assert resolve_model(str(folder), tmp_path).pooling == expected
    for content in ({"pooling_mode_cls_token": True}, {"pooling_mode": "max"}, {"embedding_dimension": 64}):
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(content))
        with pytest.raises(ModelError, match="1_Pooling"):
            resolve_model(str(folder), tmp_path)


def test_missing_or_broken_files_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        resolve_model(str(folder), tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        resolve_model(str(folder), tmp_path)
