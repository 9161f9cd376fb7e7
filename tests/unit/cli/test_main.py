"""The command line's frame: commands, exit statuses, error lines."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import procengine
from procengine.cli.main import _COMMANDS, main
from procengine.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory without groups. Those of `tmp_path` are too long for socket paths."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("PROCENGINE_RUN_DIR", directory)
        yield Path(directory)


def test_version_is_the_distribution_s(capsys: pytest.CaptureFixture[str]) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"procengine {declared}\n"
    assert procengine.__version__ == declared


@pytest.mark.parametrize("command", _COMMANDS)
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"usage: procengine {command}" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["dance"], ["generate"], ["ps", "--colour"], ["bench", "speed", "m"]])
def test_wrong_command_line_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert "usage: procengine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["chat", "hi"], "no group is running; start one with `procengine serve MODEL`"),
        (["chat", "--group", "x"], "no group 'x' is running; running: none"),
        (["generate", "/no/such/model", "hi"], "no such model"),
        (["generate", "m", "hi", "--temperature", "-1"], "temperature: must be finite and 0 or more, got -1.0"),
        (["generate", "m", "hi", "--n", "0"], "n: must be at least 1, got 0"),
        (["generate", "m", "hi", "--regex", "a", "--choice", "b"], "structured_outputs: give exactly one of"),
        (["generate", "m", "hi", "--json-schema", "/no/such/file"], "--json-schema: /no/such/file cannot be read"),
        (["serve"], "model: none is given; name one on the command line, as `model` in a file, or in PROCENGINE_MODEL"),
        (["serve", "--config", "/no/such/file"], "/no/such/file: cannot be read"),
        (["serve", "m", "--async-depth", "9"], "async_depth: must be between 1 and 3, got 9"),
        (["bench", "latency", "m", "--num-prompts", "0"], "--num-prompts: must be at least 1, got 0"),
    ],
)
def test_error_is_one_clear_line(
    argv: list[str], line: str, no_groups: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("procengine: error: ")
    assert line in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (ConfigError("wrong"), 1)])
def test_exit_status_says_what_happened(error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("procengine.cli.ps.run", fail)
    assert main(["ps"]) == status


def test_import_of_the_package_loads_nothing_heavy(tmp_path: Path) -> None:
    code = "import sys, procengine; print(*sorted({'msgspec', 'zmq', 'numpy', 'asyncio', 'tqdm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_every_public_name_can_be_had() -> None:
    assert [name for name in procengine.__all__ if getattr(procengine, name, None) is None] == []
    with pytest.raises(AttributeError):
        procengine.__getattr__("nothing")
