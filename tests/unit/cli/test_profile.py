"""Command lines of `procengine trace` and `profile` that make no sense; what they do is in tests/procs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from procengine.cli.main import main


@pytest.fixture(autouse=True)
def _no_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv("PROCENGINE_RUN_DIR", directory)
        yield


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("trace", "--seconds", "0"), "--seconds: must be more than 0 and at most 600, got 0"),
        (("trace", "--seconds", "nan"), "--seconds: must be more than 0 and at most 600, got nan"),
        (("trace", "-o", "/no/such/folder/t"), "--output: there is no folder /no/such/folder to write t to"),
        (("trace", "-o", "/tmp"), "--output: /tmp is a folder; name a file"),
        (("trace", "nobody"), "no group 'nobody' is running"),
        (("trace", "tcp://127.0.0.1:9"), "only a group on this machine can be read"),
        (("profile", "--group", "nobody"), "no group 'nobody' is running"),
        (("profile", "--seconds", "1e9"), "--seconds: must be more than 0 and at most 600, got 1e+09"),
        (("profile", "--num-prompts", "3"), "--num-prompts: belongs to a load of our own; give MODEL"),
        (("profile", "--async-depth", "1"), "--async-depth: belongs to a group that is launched; give MODEL"),
        (("profile", "m", "--group", "g"), "--group: MODEL launches a group of its own; give one of the two"),
        (("profile", "m", "--seconds", "3"), "--seconds: belongs to a running group"),
        (("profile", "m", "--input-len", "0"), "--input-len: must be at least 1, got 0"),
        (("profile", "m", "-o", "/etc/hostname"), "--output: /etc/hostname is a file; name a folder"),
        (("profile", "/no/such/model"), "no such model"),
    ],
)
def test_what_makes_no_sense_is_refused(
    arguments: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[]"])
def test_prompts_that_cannot_be_read(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(content)
    assert main(["profile", "m", "--prompts", str(path), "--device", "mock"]) == 1
    assert capsys.readouterr().err.startswith("procengine: error: --prompts: ")


@pytest.mark.parametrize("command", ["trace", "profile"])
def test_arguments_are_parsed_without_numpy(command: str) -> None:
    code = (
        f"import sys; from procengine.cli.main import _parser; _parser({command!r}); "
        "sys.exit(bool({'numpy', 'matplotlib', 'torch', 'zmq'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
