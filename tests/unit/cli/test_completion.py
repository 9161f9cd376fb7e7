"""Completion scripts, run by the shells they are for."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from procengine.cli.completion_bash import bash_script
from procengine.cli.completion_fish import fish_script
from procengine.cli.completion_tree import Node, nodes_of, read_tree
from procengine.cli.completion_zsh import zsh_script
from procengine.cli.main import main, whole_parser

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tree() -> Node:
    return read_tree(whole_parser())


@pytest.fixture(scope="module")
def command() -> Iterator[Path]:
    """A folder with `procengine` as an installed one would be, without a model or a group."""
    with tempfile.TemporaryDirectory(prefix="pe", dir="/tmp") as folder:
        script = Path(folder) / "bin" / "procengine"
        script.parent.mkdir()
        call = "import sys; from procengine.cli.main import main; sys.exit(main())"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{call}" "$@"\n')
        script.chmod(0o755)
        (Path(folder) / "home" / "models" / "someone--tiny").mkdir(parents=True)
        yield Path(folder)


def environment(command: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{command / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PROCENGINE_HOME": str(command / "home"),
        "PROCENGINE_RUN_DIR": str(command / "run"),
        "HOME": str(command),
    }


BASH = r"""
source "$1"
while IFS= read -r line; do
  eval "COMP_WORDS=(procengine $line)"; COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _procengine
  echo "${COMPREPLY[*]}"
done
"""


def in_bash(script: str, command: Path, lines: Sequence[str]) -> list[list[str]]:
    """What bash offers at the end of each line."""
    path = command / "script.bash"
    path.write_text(script)
    done = subprocess.run(
        ["bash", "--norc", "-c", BASH, "bash", str(path)],
        input="".join(f"{line}\n" for line in lines),
        env=environment(command),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


# A line, whose last word is being written ("" is none yet), and what may stand there.
CASES = [
    ("se", ["serve"]),
    ("serve --dev", ["--device"]),
    ("serve --device ''", ["auto", "cpu", "cuda", "mock"]),
    ("serve --device = c", ["cpu", "cuda"]),
    ("serve --max-num-seqs ''", []),
    ("serve smollm2-135m --max-num-seqs 3 --ssl-", ["--ssl-certfile", "--ssl-keyfile"]),
    ("serve --config pypro", ["pyproject.toml"]),
    ("serve smol", ["smollm2-135m"]),
    ("serve someone", ["someone/tiny"]),
    ("serve --port 8000 pypro", ["pyproject.toml"]),
    ("bench thr", ["throughput"]),
    ("bench serve --dataset-name ''", ["random", "prefix", "jsonl", "trace"]),
    ("restart wor", ["worker-0"]),
    ("restart --group ''", []),
    ("keys ''", ["new", "add"]),
    ("completion ''", ["bash", "zsh", "fish"]),
    ("no-such-command ''", []),
]


def test_bash_offers_what_may_stand_there(tree: Node, command: Path) -> None:
    offered = in_bash(bash_script(tree), command, [line for line, _ in CASES])
    assert dict(zip([line for line, _ in CASES], offered, strict=True)) == dict(CASES)


def test_bash_offers_every_command_and_every_flag(tree: Node, command: Path) -> None:
    nodes = list(nodes_of(tree))
    offered = in_bash(bash_script(tree), command, [f"{' '.join(node.path)} -" for node in nodes])
    for node, flags in zip(nodes, offered, strict=True):
        assert flags == [name for flag in node.flags for name in flag.names], node.path
    parents = [node for node in nodes if node.children]
    offered = in_bash(bash_script(tree), command, [f"{' '.join(node.path)} ''" for node in parents])
    assert offered == [[child.path[-1] for child in node.children] for node in parents]


def test_every_flag_of_a_file_folder_group_or_model_is_known_as_one(tree: Node) -> None:
    sources = {
        name: flag.values.source
        for node in nodes_of(tree)
        for flag in node.flags
        if flag.values is not None and flag.values.source
        for name in flag.names
    }
    expected = {"--group": "groups", "--config": "files", "--crash-dir": "folders", "-i": "files"}
    assert sources.items() >= expected.items()


@pytest.mark.parametrize("what", ["models", "groups"])
def test_names_are_listed_one_a_line(
    what: str, command: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in environment(command).items():
        monkeypatch.setenv(name, value)
    assert main(["completion", "--list", what]) == 0
    names = capsys.readouterr().out.splitlines()
    assert set(names) >= {"models": {"smollm2-135m", "someone/tiny"}, "groups": set()}[what] and names == sorted(names)


def test_script_is_printed_without_loading_what_commands_run_on() -> None:
    heavy = {"torch", "numpy", "zmq", "asyncio", "tqdm", "rich", "tokenizers", "procengine.client"}
    code = (
        "import sys; from procengine.cli.main import main; main(['completion', 'bash']);"
        f"print(*sorted({heavy} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""
    assert done.stdout.endswith("complete -F _procengine procengine\n")


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_offers_what_may_stand_there(tree: Node, command: Path) -> None:
    path = command / "script.fish"
    path.write_text(fish_script(tree))
    for line, expected in (
        ("procengine se", ["serve"]),
        ("procengine serve --devi", ["--device"]),
        ("procengine serve --device m", ["mock"]),
        ("procengine serve smol", ["smollm2-135m"]),
        ("procengine bench thr", ["throughput"]),
    ):
        code = f"source {path}; complete -C '{line}'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", code], env=environment(command), capture_output=True, text=True, check=True
        )
        assert [offer.split("\t")[0] for offer in done.stdout.splitlines()] == expected


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_what_is_begun(tree: Node, command: Path) -> None:
    path = command / "script.zsh"
    path.write_text(zsh_script(tree))
    begun = {
        "procengine se": "procengine serve ",
        "procengine serve --devi": "procengine serve --device ",
        "procengine serve --device m": "procengine serve --device mock ",
        "procengine serve smol": "procengine serve smollm2-135m ",
        "procengine bench thr": "procengine bench throughput ",
        "procengine keys n": "procengine keys new ",
    }
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe("zsh", ["zsh", "-f", "-i"], {**environment(command), "TERM": "dumb"})
    try:
        os.write(terminal, f"autoload -Uz compinit; compinit -u -D; source {path}; echo READY$((1+1))\n".encode())
        _read_until(terminal, "READY2")
        for line, completed in begun.items():
            os.write(terminal, f"{line}\t".encode())
            _read_until(terminal, completed)
            os.write(terminal, b"\x15")  # forget the line
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _read_until(terminal: int, text: str) -> None:
    seen, end_s = "", time.monotonic() + 60
    while text not in seen:
        assert time.monotonic() < end_s, f"{text!r} did not come, but {seen!r}"
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
