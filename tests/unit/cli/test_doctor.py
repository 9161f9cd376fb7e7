"""`procengine doctor`: what it finds, what it says to do, and how it ends."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from procengine.cli import doctor
from procengine.cli.main import main


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home with a model, and a run directory short enough."""
    (tmp_path / "home" / "models" / "tiny").mkdir(parents=True)
    monkeypatch.setenv("PROCENGINE_HOME", str(tmp_path / "home"))
    with tempfile.TemporaryDirectory(prefix="pe-", dir="/tmp") as short:
        monkeypatch.setenv("PROCENGINE_RUN_DIR", short)
        yield tmp_path


def found() -> dict[str, doctor.Finding]:
    return {finding.subject: finding for finding in doctor.examine()}


def test_a_machine_that_runs_these_tests_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert main(["doctor", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    findings = {finding["subject"]: finding for finding in json.loads(last)}
    assert {"python", "torch", "cpu", "memory", "gpu", "open files", "sockets", "models", "groups"} <= set(findings)
    assert not [finding for finding in findings.values() if finding["state"] == "problem"]
    assert "tiny" in findings["models"]["found"] and findings["groups"]["found"] == "none running"
    assert any(line.startswith("ok       python") for line in lines)


def test_no_directory_for_sockets_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", "/tmp/" + 100 * "x")
        assert (found()["sockets"].state, main(["doctor"])) == ("problem", 1)
        assert "PROCENGINE_RUN_DIR" in found()["sockets"].advice


def test_an_empty_home_says_how_to_get_a_model(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCENGINE_HOME", str(places / "not" / "there"))
    assert found()["models"][:2] == ("note", "models")
    assert found()["models"].advice == "procengine pull smollm2-135m"
    assert not (places / "not").exists()


def test_few_files_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1 << 20))
    assert found()["open files"].state == "ok", "a group raises the soft limit itself"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    assert found()["open files"].state == "note"
    assert "enough for 320 clients" in found()["open files"].advice and "ulimit -Hn" in found()["open files"].advice


def test_a_missing_package_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("no-such-package",))
    assert found()["no-such-package"] == ("problem", "no-such-package", "not installed", "pip install no-such-package")


def test_it_imports_no_torch() -> None:
    program = "import sys; from procengine.cli.main import main; main(['doctor']); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
