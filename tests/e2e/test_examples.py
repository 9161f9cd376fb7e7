"""The examples whose answers have a form, on a model with weights (a tiny one, made of random numbers)."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from tests.e2e.running_group import RunningGroup
from tests.e2e.test_tool_calls import MARKERS, make_folder

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningGroup]:
    folder = make_folder(tmp_path_factory.mktemp("examples") / "model", MARKERS["hermes"])
    with RunningGroup(folder) as running:
        yield running


def run(name: str, group: RunningGroup, patch: pytest.MonkeyPatch) -> dict[str, object]:
    patch.setattr(sys, "argv", [f"{name}.py", group.endpoint])
    return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_json_schema(group: RunningGroup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    names = run("json_schema", group, monkeypatch)
    jsonschema.validate(json.loads(capsys.readouterr().out), names["SCHEMA"])


def test_chat_with_tools(
    group: RunningGroup, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("chat_with_tools", group, monkeypatch)
    assert "get_weather({" in capsys.readouterr().out
