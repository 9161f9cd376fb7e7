"""resolve_model: what a name may be, and where it leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from procengine.errors import ModelError
from procengine.model_source import resolve_model
from tests.model_files import LLAMA, write_folder, write_gguf


def test_names_that_lead_nowhere_list_what_was_tried(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"'nope'.*folder or \.gguf.*smollm2-135m.*org/name"):
        resolve_model("nope", tmp_path)
    for name in ("smollm2-135m", "org/model"):
        with pytest.raises(ModelError, match=f"procengine pull {name}"):
            resolve_model(name, tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither a config\.json nor a \.gguf"):
        resolve_model(str(tmp_path / "empty"), tmp_path)
    (tmp_path / "weights.bin").touch()
    with pytest.raises(ModelError, match=r"folder or a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"), tmp_path)


def test_folder_of_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    write_gguf(tmp_path / "m" / "a.gguf")
    assert resolve_model(str(tmp_path / "m"), tmp_path).format == "gguf"
    (tmp_path / "m" / "config.json").write_text("{}")  # beside a GGUF and no weights of its own, it says nothing
    assert resolve_model(str(tmp_path / "m"), tmp_path).format == "gguf"
    write_gguf(tmp_path / "m" / "b.gguf")
    with pytest.raises(ModelError, match=r"several GGUF files.*a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path / "m"), tmp_path)


def test_pulled_models_are_found_by_their_names(tmp_path: Path) -> None:
    write_folder(tmp_path / "models" / "org--model", LLAMA)
    config = resolve_model("org/model", tmp_path)
    assert config.name == "org/model" and config.path == str(tmp_path / "models" / "org--model")
    (tmp_path / "models" / "smollm2-135m").mkdir()
    write_gguf(tmp_path / "models" / "smollm2-135m" / "any.gguf")
    config = resolve_model("smollm2-135m", tmp_path)
    assert config.name == "smollm2-135m" and config.path.endswith("any.gguf")
