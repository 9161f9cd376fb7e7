"""`procengine config`: what holds, and who said so."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from procengine.cli.main import main
from procengine.engine_args import OPTIONS


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROCENGINE_MAX_N", "3")
    monkeypatch.setenv("PROCENGINE_API_KEY", "s3cret")
    monkeypatch.setenv("PROCENGINE_PROT", "1")


def test_effective_shows_each_option_with_its_source(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "options.toml"
    file.write_text("max_num_seqs = 64\n")
    assert main(["config", "--effective", "smollm2-135m", "--port", "8000", "--config", str(file)]) == 0
    captured = capsys.readouterr()
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in captured.out.splitlines()}
    assert rows.keys() == OPTIONS.keys()
    assert rows["model"] == "smollm2-135m command line --model"
    assert rows["port"] == "8000 command line --port"
    assert rows["max_n"] == "3 environment PROCENGINE_MAX_N"
    assert rows["max_num_seqs"] == f"64 file {file}"
    assert rows["workers"] == "1 default"
    assert rows["request_timeout"] == "off default"
    assert "s3cret" not in captured.out
    assert captured.err == "procengine: PROCENGINE_PROT is no option; did you mean PROCENGINE_PORT?\n"


def test_changed_shows_what_is_no_default_and_json_is_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--changed", "--json", "--workers", "2"]) == 0
    shown = msgspec.json.decode(capsys.readouterr().out)
    assert shown.keys() == {"workers", "max_n", "api_key"}
    assert shown["workers"] == {"value": 2, "source": "command line", "where": "--workers"}
    assert shown["api_key"]["value"] == "***"


def test_value_out_of_range_is_shown_and_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--changed", "--workers", "99"]) == 1
    assert "workers: must be between 1 and 64, got 99" in capsys.readouterr().err
