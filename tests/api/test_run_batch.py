"""`procengine run-batch`: a file of requests is answered, also in two goes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.procs.harness import Served, cli

CHAT = {"url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}}


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps({"method": "POST", **line}) + "\n" for line in lines))
    return path


def run(group: Served, source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = cli("run-batch", "-i", source, "-o", target, "--group", group.endpoint)
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def read(path: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def test_every_line_is_answered_and_a_cut_run_goes_on(group: Served, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"custom_id": f"c{at}", **CHAT} for at in range(40)]
    lines += [
        {"custom_id": "text", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 2}},
        {"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "a"}},
        {"custom_id": "bad", "url": "/v1/completions", "body": {"prompt": ""}},
        {"custom_id": "stream", "url": "/v1/completions", "body": {"prompt": "a", "stream": True}},
    ]
    source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    done = run(group, source, target)
    assert done.returncode == 1 and "44 requests answered, 2 of them with an error" in done.stderr, done.stderr
    found = read(target)
    assert set(found) == {line["custom_id"] for line in lines}
    for name in [*(f"c{at}" for at in range(40)), "text", "vector"]:
        assert found[name]["response"]["status_code"] == 200 and found[name]["error"] is None
    assert found["c0"]["response"]["body"]["usage"]["completion_tokens"] == 4
    assert found["bad"]["response"]["status_code"] == 400 and found["bad"]["error"]
    assert found["stream"]["response"] is None and "stream" in found["stream"]["error"]["message"]

    data = target.read_bytes()
    whole = b"\n".join(data.split(b"\n")[:10]) + b"\n"
    target.write_bytes(whole + data[len(whole) : len(whole) + 50])  # as a run that was killed leaves it
    again = run(group, source, target)
    assert "34 requests answered" in again.stderr and "10 were answered before" in again.stderr
    assert set(read(target)) == set(found) and target.read_bytes().startswith(whole)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"custom_id": "1"}\n', "line 1"),
        ("\n{}\n", "line 2"),
        ('{"custom_id": "1", "url": "/nope", "body": {}}\n', "url: must be one of"),
        ('{"custom_id": "1", "url": "/v1/completions", "body": {}}\n' * 2, "twice"),
        ("", "has no requests"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_runs(tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(text)
    command = cli("run-batch", "no-such-model", "-i", source, "-o", tmp_path / "out.jsonl")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and message in done.stderr


def test_an_output_that_is_something_else_is_not_touched(group: Served, tmp_path: Path) -> None:
    source, target = write(tmp_path / "in.jsonl", [{"custom_id": "1", **CHAT}]), tmp_path / "out.jsonl"
    target.write_text("precious\n")
    done = run(group, source, target)
    assert done.returncode == 1 and "not overwritten" in done.stderr and target.read_text() == "precious\n"
