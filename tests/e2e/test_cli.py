"""The command line with the real model, as the README shows it. (The commands themselves: tests/procs/test_cli.py.)"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from procengine import Client
from tests.e2e.smollm2 import P1, P2, P5, greedy

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("smollm2_gguf")]

_COMMAND = [str(Path(sys.executable).with_name("procengine"))]
_MODEL = ["smollm2-135m"]
_EXACT = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch, procengine_home: Path) -> Iterator[Path]:
    """Groups of this test alone; short, as socket paths must be. Models are the user's own."""
    with tempfile.TemporaryDirectory(prefix="pe-") as folder:
        monkeypatch.setenv("PROCENGINE_RUN_DIR", folder)
        monkeypatch.setenv("PROCENGINE_HOME", str(procengine_home))
        yield Path(folder)


def run(*arguments: str, cwd: Path, stdin: str = "") -> str:
    """What the command prints; it must succeed."""
    done = subprocess.run(
        [*_COMMAND, *arguments], cwd=cwd, input=stdin, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_generate_json(run_dir: Path, tmp_path: Path) -> None:
    out = run("generate", *_MODEL, P1.text, "-", "--json", "--max-tokens", "4", *_EXACT, cwd=tmp_path, stdin=P2.text)
    answers: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines()]
    for prompt, answer in zip((P1, P2), answers, strict=True):
        assert answer["prompt"] == prompt.text
        assert len(answer["prompt_token_ids"]) == prompt.num_tokens
        (output,) = answer["outputs"]
        assert (output["index"], output["token_ids"]) == (0, prompt.token_ids[:4])
        assert prompt.completion.startswith(output["text"])
        assert (output["finish_reason"], output["stop_reason"], output["logprobs"]) == ("length", None, None)
        assert answer["usage"] == {
            "prompt_tokens": prompt.num_tokens,
            "completion_tokens": 4,
            "total_tokens": prompt.num_tokens + 4,
            "cached_tokens": 0,
        }
    assert not any(path.is_dir() for path in run_dir.iterdir())


def test_generate_text_of_a_chat(run_dir: Path, tmp_path: Path) -> None:
    assert run("generate", *_MODEL, P5.text, "--chat", *_EXACT, cwd=tmp_path) == P5.completion + "\n"


def test_serve_ps_chat_and_a_client(run_dir: Path, tmp_path: Path) -> None:
    with subprocess.Popen(
        [*_COMMAND, "serve", *_MODEL, *_EXACT], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as served:
        assert served.stdout is not None
        try:
            ready = json.loads(served.stdout.readline())
            assert (ready["event"], ready["name"], ready["model"]) == ("ready", "smollm2-135m", "smollm2-135m")
            assert ready["num_blocks"] > 0
            assert run("chat", P5.text, "--temperature", "0", cwd=tmp_path) == P5.completion + "\n"
            with Client() as client:
                assert client.generate(P1.text, greedy(4)).outputs[0].token_ids == P1.token_ids
            check_processes(json.loads(run("ps", "--json", cwd=tmp_path)), ready["pids"])
        finally:
            served.send_signal(signal.SIGTERM)
            _, log = served.communicate(timeout=20)
    assert served.returncode == 0
    assert "Traceback" not in log
    assert not any(Path(f"/proc/{pid}").exists() for pid in ready["pids"].values())
    assert not any(path.is_dir() for path in run_dir.iterdir())


def check_processes(groups: list[dict[str, Any]], pids: dict[str, int]) -> None:
    (group,) = groups
    by_role = {process["role"]: process for process in group["processes"]}
    assert {process["pid"] for process in group["processes"]} == set(pids.values())
    assert (by_role["supervisor"]["pid"], by_role["worker"]["pid"]) == (pids["supervisor"], pids["worker-0"])
    for role in ("frontend", "output"):  # what they may have at most, with the model's tokenizer in them
        assert 0 < by_role[role]["rss_bytes"] <= 120 * 2**20
