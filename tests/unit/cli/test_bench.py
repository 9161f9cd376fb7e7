"""The options of `procengine bench`: what does not fit is refused before anything is launched."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from procengine.bench.workload import Lengths, random_requests
from procengine.cli.bench import _MODES
from procengine.cli.bench_load import _warmup_requests
from procengine.cli.main import main


@pytest.mark.parametrize("mode", _MODES)
def test_each_mode_has_help(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["bench", mode, "--help"])
    assert f"usage: procengine bench {mode}" in capsys.readouterr().out


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe4"}')
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{}\n')
    (tmp_path / "bad.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,x,3\n")
    (tmp_path / "bad.json").write_text("{}")
    return tmp_path


TRACE = ["--dataset-name", "trace", "--dataset-path", "FILES/bad.csv"]


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["throughput", "m", "--num-prompts", "0"], "--num-prompts: must be at least 1, got 0"),
        (["latency", "m", "--output-len", "-1"], "--output-len: must be at least 1, got -1"),
        (["serve", "m", "--request-rate", "0"], "--request-rate: must be more than 0, got 0.0"),
        (["serve", "m", "--request-rate", "nan"], "--request-rate: must be more than 0, got nan"),
        (["serve", "m", "--burstiness", "0"], "--burstiness: must be finite and more than 0, got 0.0"),
        (["serve", "m", "--max-concurrency", "0"], "--max-concurrency: must be at least 1, got 0"),
        (["serve", "m", "--random-range-ratio", "1"], "--random-range-ratio: must be at least 0 and less than 1"),
        (["serve", "m", "--num-prefixes", "0"], "--num-prefixes: must be at least 1, got 0"),
        (["serve", "m", "--seed", "-1"], "--seed: must be at least 0, got -1"),
        (["serve", "m", "--goodput", "speed:3"], "--goodput: must be METRIC:MS with one of ttft, tpot, e2el"),
        (["serve", "m", "--percentile-metrics", "x"], "--percentile-metrics: 'x' is none of"),
        (["serve", "m", "--metric-percentiles", "x"], "--metric-percentiles: must be numbers with commas between"),
        (["serve", "m", "--time-scale", "2"], "--time-scale: stretches the times of a trace; there is none"),
        (["serve", "m", "--request-rate", "5", *TRACE], "--request-rate: a trace has arrival times of its own"),
        (["serve", "m", "--dataset-name", "trace"], "--dataset-path: must be given with --dataset-name trace"),
        (["serve", "m", "--dataset-path", "x"], "--dataset-path: --dataset-name random reads no file, got x"),
        (["serve", "m", *TRACE], "bad.csv line 2: ContextTokens: must be a whole number of tokens, got 'x'"),
        (
            ["serve", "m", "--dataset-name", "jsonl", "--dataset-path", "FILES/bad.jsonl"],
            "bad.jsonl line 2: exactly one of prompt, prompt_token_ids and messages must be given, got none",
        ),
        (["serve", "m", "--dataset-name", "jsonl", "--dataset-path", "FILES/latin.jsonl"], "is no UTF-8 text"),
        (["serve", "m", "--dataset-name", "jsonl", "--dataset-path", "FILES/no"], "cannot be read: No such file"),
        (["throughput", "m", "--prompts", "FILES/bad.json"], "bad.json is no readable JSON list of texts"),
        (["throughput", "m", "--prompts", "FILES/no"], "--prompts: FILES/no cannot be read: No such file"),
        (["throughput", "m", "--prompts", "x", "--dataset-name", "prefix"], "--prompts: cannot be given together with"),
        (["serve", "m", "--plot", "x.svg"], "--plot: must be a .png file, got x.svg"),
        (["serve", "m", "--group", "g"], "--group: MODEL launches a group of its own; give one of the two"),
        (["serve", "--max-num-seqs", "4"], "--max-num-seqs: belongs to a group that is launched; give MODEL"),
        (["serve", "--no-enable-prefix-caching"], "--enable-prefix-caching: belongs to a group that is launched"),
        (["ipc", "--batch-sizes", "1,x"], "--batch-sizes: must be whole numbers with commas between, got '1,x'"),
        (["ipc", "--batch-sizes", "0"], "--batch-sizes: must be between 1 and 65536, got 0"),
        (["ipc", "--num-steps", "0"], "--num-steps: must be at least 1, got 0"),
        (["startup", "m", "--runs", "0"], "--runs: must be at least 1, got 0"),
        (["startup", "m", "--warmup", "-1"], "--warmup: must be at least 0, got -1"),
        (["depth", "m", "--runs", "0"], "--runs: must be at least 1, got 0"),
        (["depth", "m", "--output-len", "8"], "--output-len: must be at least 16, got 8"),
        (["depth", "m", "--batch-sizes", "1,x"], "--batch-sizes: must be whole numbers with commas between, got '1,x'"),
        (["depth", "m", "--batch-sizes", "300"], "--batch-sizes: must be between 1 and max_num_seqs (256), got 300"),
        (["depth", "m", "--variant", "--threads '2"], '--variant: "--threads \'2" cannot be read as options'),
        (["compare", "--pairs", "0", "throughput", "m"], "--pairs: must be at least 1, got 0"),
        (["compare", "--a-path", "FILES", "throughput", "m"], "--a-path: there is no procengine/__init__.py in FILES"),
        (["compare", "--metrics", ",", "throughput", "m"], "--metrics: must name at least one figure, got ','"),
    ],
)
def test_error_is_one_clear_line(argv: list[str], error: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *(word.replace("FILES", str(files)) for word in argv)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("procengine: error: ")
    assert error.replace("FILES", str(files)) in captured.err


def test_running_group_is_looked_for_when_no_model_is_given(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("procengine.groups.run_root", lambda: files)
    assert main(["bench", "serve"]) == 1
    assert "no group is running; start one with `procengine serve MODEL`" in capsys.readouterr().err


def test_warm_up_shares_no_prompt_with_a_run_of_any_seed() -> None:
    args = argparse.Namespace(input_len=4, warmup=3, seed=0)
    warmups = _warmup_requests(args, vocab_size=1000, max_model_len=64)
    assert [(request.num_prompt_tokens, request.max_tokens) for request in warmups] == [(4, 16)] * 3
    for seed in range(4):
        measured = random_requests(50, Lengths(4, 16), 1000, seed)
        assert not {str(request.prompt) for request in measured} & {str(request.prompt) for request in warmups}
    (tight, *_) = _warmup_requests(args, vocab_size=1000, max_model_len=5)
    assert tight.num_prompt_tokens is not None and tight.num_prompt_tokens + tight.max_tokens <= 5


def test_tree_that_is_not_imported_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "procengine").mkdir()
    (tmp_path / "procengine" / "__init__.py").write_text("raise SystemExit(1)\n")
    assert main(["bench", "compare", "--b-path", str(tmp_path), "throughput", "m"]) == 1
    assert f"--b-path: Python imports procengine from nowhere, not from {tmp_path}" in capsys.readouterr().err
