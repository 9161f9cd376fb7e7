"""What was converted from a GGUF file is kept, mended, and safe with several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from procengine.errors import ModelError
from procengine.model_source import resolve_model
from procengine.tokenizer import Tokenizer
from tests.model_files import write_gguf


def test_gguf_conversion_is_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = resolve_model(str(path), tmp_path / "home")
    with monkeypatch.context() as patch:
        patch.setattr("procengine.gguf_file.GGUFFile", None)  # a warm start does not open the file
        assert resolve_model(str(path), tmp_path / "home") == first
        patch.chdir(tmp_path)
        assert resolve_model("m.gguf", tmp_path / "home").name == "m.gguf"
    os.utime(path, ns=(1, 1))
    second = resolve_model(str(path), tmp_path / "home")
    assert second.tokenizer_path != first.tokenizer_path


@pytest.mark.parametrize("broken", ["model.json", "tokenizer.json"])
def test_gguf_cache_mends_itself(tmp_path: Path, broken: str) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    first = resolve_model(str(path), tmp_path / "home")
    file = Path(first.tokenizer_path).parent / broken
    file.unlink() if broken == "tokenizer.json" else file.write_text('{"of": "another version"}')
    assert resolve_model(str(path), tmp_path / "home") == first
    assert file.is_file()


def _resolve_in_child(path: str, home: str, queue: multiprocessing.Queue[str]) -> None:
    config = resolve_model(path, Path(home))
    queue.put(json.dumps([config.tokenizer_path, Tokenizer.load(config.tokenizer_path).encode("cat 12")]))


def test_gguf_cache_is_safe_with_several_processes(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[str] = context.Queue()
    children = [
        context.Process(target=_resolve_in_child, args=(str(path), str(tmp_path / "h"), queue)) for _ in range(3)
    ]
    for child in children:
        child.start()
    answers = {queue.get(timeout=30) for _ in children}
    for child in children:
        child.join(timeout=30)
    assert len(answers) == 1
    folder = Path(json.loads(answers.pop())[0]).parent
    assert sorted(file.name for file in folder.iterdir()) == ["model.json", "tokenizer.json"]  # nothing half-written


def test_unwritable_home_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    (tmp_path / "home").write_text("a file, not a folder")
    with pytest.raises(ModelError, match="cannot be written there"):
        resolve_model(str(path), tmp_path / "home")
