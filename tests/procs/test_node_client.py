"""The protocol, spoken by another language: examples/node, which was written from docs/PROTOCOL.md alone."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from procengine.mock_runner import mock_token
from tests.client_homes import node_folder
from tests.procs.harness import VOCAB_SIZE, Served, as_ids, finish, key_of, tokens_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "node"
STEP_MS = 2


class NodeClient:
    """One command of examples/node/main.mjs, and the lines that it prints."""

    def __init__(self, folder: Path, endpoint: str, command: str, *arguments: Any) -> None:
        texts = [json.dumps(argument) for argument in arguments]
        self._process = subprocess.Popen(
            ["node", folder / "main.mjs", endpoint, command, *texts], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        self.welcome = self.next()

    def next(self) -> Any:
        """The next line; fails with what node says if there is none."""
        line = self._lines.readline()
        assert line, self._stderr()
        return json.loads(line)

    def rest(self) -> list[Any]:
        """What it prints until it ends."""
        lines = [json.loads(line) for line in self._lines]
        self.status = finish(self._process, 20)
        assert not (said := self._stderr()), said
        return lines

    def _stderr(self) -> str:
        assert self._process.stderr is not None
        return self._process.stderr.read().decode(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._lines, self._process.stderr):
            assert pipe is not None
            pipe.close()


Run = Callable[..., NodeClient]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return node_folder(tmp_path_factory.mktemp("node") / "client", *EXAMPLE.glob("*.mjs"))


@pytest.fixture(scope="module")
def group(folder: Path, serve_module: Callable[..., Served]) -> Served:
    return serve_module("--mock-step-ms", STEP_MS, "--listen", "tcp://127.0.0.1:0")


def token_ids(lines: list[Any]) -> list[int]:
    return [token_id for line in lines for token_id in line["tokenIds"]]


def run(folder: Path, group: Served, *arguments: Any, endpoint: str = "endpoint") -> list[Any]:
    with NodeClient(folder, group.ready[endpoint], *arguments) as client:
        assert client.welcome["model"] == group.ready["model"]
        return client.rest()


@pytest.mark.parametrize("endpoint", ["endpoint", pytest.param("tcp", marks=pytest.mark.slow)])
def test_stream_brings_each_token_as_it_comes(folder: Path, group: Served, endpoint: str) -> None:
    lines = run(folder, group, "stream", {"prompt_token_ids": as_ids(5)}, {"max_tokens": 40}, endpoint=endpoint)
    assert len(lines) > 10 and token_ids(lines) == tokens_of(key_of(token_ids(lines)[0], 5), 5, 40)
    assert [line["finishReason"] for line in lines] == [None] * (len(lines) - 1) + ["length"]
    assert lines[0]["promptTokenIds"] == as_ids(5) and lines[-1]["times"]


def test_whole_answers_vectors_and_counters(folder: Path, group: Served) -> None:
    turns = {"messages": [{"role": "user", "content": "日本"}]}
    params = {"max_tokens": 6, "n": 2, "temperature": 1, "seed": 7, "logprobs": 1, "stop": ["\u0000"]}
    ((first, second),) = run(folder, group, "generate", turns, params)
    assert [first["index"], second["index"]] == [0, 1]
    assert all(len(one["tokenIds"]) == len(one["logprobs"]) == 6 for one in (first, second))
    ((*vector,),) = run(folder, group, "embed", {"prompt": "hello"})
    assert len(vector) == 8 and all(struct.unpack("<f", struct.pack("<f", x))[0] == x for x in vector)
    (stats,) = run(folder, group, "stats")
    assert stats["num_steps"] > 0


def test_aborted_and_refused(folder: Path, group: Served) -> None:
    lines = run(folder, group, "abort", {"prompt": "hello"}, {"max_tokens": 2000}, 3)
    assert lines[-1]["finishReason"] == "abort" and len(token_ids(lines)) < 1000
    for params, text in (({"max_tokens": 0}, "max_tokens"), ({"nonsense": 1}, "nonsense")):
        (error,) = run(folder, group, "generate", {"prompt": "hello"}, params)
        assert error["error"] == "invalid_request" and text in error["message"]


@pytest.mark.slow
def test_stream_outlives_the_output_process_but_not_the_frontend(folder: Path, serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", 10)
    body, params = {"prompt_token_ids": as_ids(5)}, {"max_tokens": 100}
    with NodeClient(folder, group.ready["endpoint"], "stream", body, params) as client:
        lines = [client.next() for _ in range(5)]
        os.kill(group.ready["pids"]["output"], signal.SIGKILL)
        lines += client.rest()
        assert token_ids(lines) == tokens_of(0, 5, 100), "every token once"
        assert lines[-1]["finishReason"] == "length"
    with (
        NodeClient(folder, group.ready["endpoint"], "stream", body, {"max_tokens": 2000}) as begun,
        NodeClient(folder, group.ready["endpoint"], "generate", body, {"max_tokens": 500}) as unseen,
    ):
        begun.next()
        os.kill(group.ready["pids"]["frontend"], signal.SIGKILL)
        assert begun.rest()[-1]["error"] == "lost"
        ((choice,),) = unseen.rest()
    first_key = 1 << 40  # of the second frontend
    assert choice["key"] >= first_key and choice["finishReason"] == "length"
    assert choice["tokenIds"] == [int(mock_token(choice["key"], 5 + at, VOCAB_SIZE)) for at in range(500)]
