"""Each file in examples/ runs, as a user would run it: against a running group, or with one of its own."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import procengine
from procengine.llm import LLM
from tests.procs.harness import Served

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ON_MOCK = ("streaming", "async_batch", "embeddings", "http_openai")
WITH_OWN_GROUP = ("one_shot",)
WITH_WEIGHTS = ("json_schema", "chat_with_tools")  # in tests/e2e: the mock device obeys no grammar


def run(name: str, *arguments: object, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--port", 0, "--max-queued-requests", 8, name="examples")


def test_every_example_is_run_by_a_test_and_described() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*ON_MOCK, *WITH_OWN_GROUP, *WITH_WEIGHTS}
    described = (EXAMPLES / "README.md").read_text()
    assert all(f"({name}.py)" in described for name in names)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "http_openai" else name for name in ON_MOCK]
)
def test_example_runs_against_a_group(
    name: str, group: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openai") if name == "http_openai" else None
    where = group.ready["http"] if name == "http_openai" else group.ready["name"]
    run(name, where, patch=monkeypatch)
    printed = capsys.readouterr().out
    if name == "async_batch":
        assert [line.startswith(f"A fact about the number {at}:") for at, line in enumerate(printed.splitlines())] == (
            [True] * 32
        )
    if name == "embeddings":
        assert len(printed.splitlines()) == 3
    if name == "streaming":
        assert printed.endswith("[length]\n")
    assert len(printed) > 60


@pytest.mark.slow
def test_example_with_a_group_of_its_own_leaves_nothing_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(procengine, "LLM", functools.partial(LLM, device="mock"), raising=False)
    run("one_shot", model, patch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all(line.endswith("(length)") for line in lines)
