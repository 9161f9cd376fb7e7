"""`procengine bench` against groups of the mock device: the figures add up to what was asked for."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from procengine.bench.faults import FIGURES
from procengine.bench.stages import STAGES
from procengine.bench.startup import PHASES
from tests.procs.harness import MAX_MODEL_LEN, Served, cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--mock-step-ms", 1, name="bench")


def bench(*arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(cli("bench", *arguments), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stderr
    return done


def figures_of(*arguments: object) -> dict[str, Any]:
    return dict(json.loads(bench(*arguments, "--json").stdout))


def test_throughput_of_a_private_group(model: Path) -> None:
    figures = figures_of(
        "throughput",
        model,
        *("--device", "mock", "--mock-step-ms", 0, "--num-prompts", 12, "--max-num-seqs", 4),
        *("--input-len", 32, "--output-len", 40),
    )
    assert (figures["num_requests"], figures["num_failed"]) == (12, 0)
    assert (figures["num_prompt_tokens"], figures["num_output_tokens"]) == (12 * 32, 12 * 40)
    assert figures["output_tokens_per_s"] * figures["wall_s"] == pytest.approx(12 * 40)
    assert figures["output_tokens"] == 12 * 40 and figures["num_steps"] >= 3 * 40, "the group's own counters, reset"
    assert figures["config"]["scheduler"]["max_num_seqs"] == 4
    assert figures["ttft_ms"]["p50"] <= figures["e2el_ms"]["p50"] <= 1e3 * figures["wall_s"]
    assert "lateness_ms" not in figures


def test_depth_compares_each_variant_with_the_first(model: Path) -> None:
    variants = ("--async-depth 1", "--decode-steps 4")
    figures = figures_of(
        *("depth", model, "--device", "mock", "--mock-step-ms", 1, "--max-num-seqs", 4),
        *("--batch-sizes", "1,3", "--output-len", 24, "--runs", 1),
        *(f"--variant={variant}" for variant in variants),
    )
    rows = figures["rows"]
    assert [(row["batch_size"], row["name"]) for row in rows] == [(size, name) for size in (1, 3) for name in variants]
    assert [row["ratio"] for row in rows[::2]] == [1.0, 1.0]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["tokens_per_s"] / rows[rows.index(row) // 2 * 2]["tokens_per_s"])
        assert row["pass_ms"] >= 1 and 0 <= row["idle_share"] < 1
        assert sum(row["idle_share_by_cause"].values()) == pytest.approx(row["idle_share"])
        (run,) = row["runs"]
        assert 8 <= run["num_passes"] <= 24 - 1 - 4, "without the prompt's, the first ones, and those of a late arrival"


@pytest.mark.slow
def test_latency_of_a_private_group_sends_one_request_after_the_other(model: Path) -> None:
    figures = figures_of("latency", model, "--device", "mock", "--num-prompts", 3, "--output-len", 4)
    assert (figures["num_requests"], figures["num_output_tokens"], figures["peak_concurrency"]) == (3, 12, 1)


def test_closed_loop_keeps_to_its_limit(group: Served) -> None:
    figures = figures_of(
        "serve",
        *("--group", group.name, "--max-concurrency", 3, "--num-prompts", 30, "--input-len", 16, "--output-len", 5),
        *("--random-range-ratio", 0.5, "--seed", 1),
    )
    assert (figures["num_requests"], figures["num_failed"], figures["request_rate"]) == (30, 0, "inf")
    assert 1 <= figures["peak_concurrency"] <= 3
    assert 30 * 8 <= figures["num_prompt_tokens"] <= 30 * 24
    assert 30 * 2 <= figures["num_output_tokens"] <= 30 * 8
    assert "config" not in figures and "num_steps" not in figures, "the counters of a running group are left alone"


def test_open_loop_reports_lateness_and_goodput_and_draws(group: Served, tmp_path: Path) -> None:
    path = tmp_path / "run.png"
    figures = figures_of(
        "serve",
        *("--group", group.endpoint, "--request-rate", 200, "--burstiness", 0.5, "--num-prompts", 40),
        *("--input-len", 8, "--output-len", 4, "--plot", path, "--goodput", "e2el:60000", "ttft:60000"),
        *("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "25,99"),
    )
    assert (figures["num_requests"], figures["num_prompt_tokens"], figures["num_output_tokens"]) == (40, 320, 160)
    assert 0 <= figures["lateness_ms"]["p50"] <= figures["lateness_ms"]["p99"] <= figures["lateness_ms"]["max"]
    assert figures["lateness_ms"]["mean"] <= figures["ttft_ms"]["mean"], "waiting to be sent is part of the latency"
    assert figures["goodput"]["share"] == 1 and figures["goodput"]["requests_per_s"] == figures["requests_per_s"]
    assert list(figures["ttft_ms"]) == ["mean", "p25", "p50", "p99"] and "itl_ms" not in figures
    assert path.read_bytes().startswith(b"\x89PNG")


def test_shared_prefixes_are_found_in_the_cache(group: Served) -> None:
    """One after the other, so that a prefix is in the cache when it comes again."""
    figures = figures_of(
        "serve",
        *("--group", group.name, "--dataset-name", "prefix", "--prefix-len", 64, "--num-prefixes", 2),
        *("--num-prompts", 10, "--input-len", 8, "--output-len", 2, "--max-concurrency", 1, "--seed", 5),
    )
    assert figures["num_prompt_tokens"] == 10 * 72
    assert figures["num_cached_tokens"] == 8 * 64, "all but the first of each prefix"


def write_trace(path: Path, rows: list[tuple[str, int, int]]) -> Path:
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_trace_is_replayed_at_its_times_and_lengths(group: Served, tmp_path: Path) -> None:
    rows = [("2023-11-16 18:15:46.0", 30, 3), ("2023-11-16 18:15:46.5000000", 5, 7), ("2023-11-16 18:15:48.0", 90, 1)]
    trace = ("--dataset-name", "trace", "--dataset-path", write_trace(tmp_path / "t.csv", rows))
    figures = figures_of("serve", "--group", group.name, *trace, "--time-scale", 0.25)
    assert (figures["num_requests"], figures["num_prompt_tokens"], figures["num_output_tokens"]) == (3, 125, 11)
    assert figures["wall_s"] >= 0.5, "two seconds of the trace"
    assert figures["lateness_ms"]["max"] >= 0


def test_trace_that_does_not_fit_is_refused_or_left_out(group: Served, tmp_path: Path) -> None:
    rows = [("0", MAX_MODEL_LEN, 1), ("0.1", 4, 2), ("0.2", 0, 2)]
    trace = ("--dataset-name", "trace", "--dataset-path", write_trace(tmp_path / "t.csv", rows))
    error = bench("serve", "--group", group.name, *trace, status=1).stderr
    assert f"t.csv line 2: {MAX_MODEL_LEN} tokens of prompt and 1 of answer make {MAX_MODEL_LEN + 1}" in error
    done = bench("serve", "--group", group.name, *trace, "--skip-unfit", "--json")
    assert "left out: 2 of 3 requests do not fit" in done.stderr
    assert json.loads(done.stdout)["num_requests"] == 1


def test_refused_requests_are_counted_and_named(group: Served, tmp_path: Path) -> None:
    """A text's length is known to the group alone."""
    path = tmp_path / "d.jsonl"
    lines = [
        {"prompt": "x" * (MAX_MODEL_LEN + 1)},
        {"prompt": "hello", "output_tokens": 3},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt_token_ids": [70, 71]},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    dataset = ("--dataset-name", "jsonl", "--dataset-path", path, "--output-len", 4)
    figures = figures_of("serve", "--group", group.name, *dataset, "--goodput", "e2el:60000")
    assert (figures["num_requests"], figures["num_failed"], figures["num_output_tokens"]) == (4, 1, 3 + 4 + 4)
    assert "max_model_len" in figures["errors"][0] and figures["goodput"]["share"] == 0.75


@pytest.mark.slow
def test_throughput_with_a_failed_request_is_an_error(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["x" * (MAX_MODEL_LEN + 1), "fine"]))
    done = bench("throughput", model, "--device", "mock", "--prompts", path, "--output-len", 4, status=1)
    assert "of the benchmark failed" in done.stderr and "max_model_len" in done.stderr and done.stdout == ""


@pytest.mark.slow
def test_startup_has_phases_that_add_up_and_all_processes(model: Path) -> None:
    figures = figures_of("startup", model, "--device", "mock", "--runs", 1, "--warmup", 0)
    assert all(figures[phase]["p50"] > 0 for phase in PHASES)
    assert figures["launch_s"]["p50"] + figures["children_s"]["p50"] == pytest.approx(figures["ready_s"]["p50"])
    assert set(figures["rss_mib"]) == set(figures["cpu_s"]) == {"supervisor", "worker-0", "frontend", "output"}
    assert all(5 < rss_mib < 200 for rss_mib in figures["rss_mib"].values())


def test_ipc_measures_every_stage_and_real_hops(model: Path) -> None:
    figures = figures_of("ipc", model, "--batch-sizes", "1,3", "--num-steps", 4)
    assert set(figures["us"]) == {*STAGES, "hop_step", "hop_result"}
    for sizes in figures["us"].values():
        assert set(sizes) == {"1", "3"}
        assert all(0 < found["p50"] <= found["p90"] <= found["p99"] for found in sizes.values())
    assert figures["num_bytes"]["step"]["1"] < figures["num_bytes"]["step"]["3"]


def test_comparison_runs_both_sides_by_turns_each_in_its_own_tree() -> None:
    result = figures_of(
        "compare",
        *("--pairs", 1, "--a", "--num-steps 3", "--b", "--num-steps 5", "--a-path", ROOT),
        *("--metrics", "num_steps,us.build.2.p50", "ipc", "--batch-sizes", 2),
    )
    (a,), (b,) = result["runs"]["A"], result["runs"]["B"]
    assert (a["num_steps"], b["num_steps"]) == (3, 5)
    assert result["metrics"]["num_steps"]["ratios"] == [pytest.approx(5 / 3)]
    expected = b["us"]["build"]["2"]["p50"] / a["us"]["build"]["2"]["p50"]
    assert result["metrics"]["us.build.2.p50"]["ratio_median"] == pytest.approx(expected)
    assert result["sides"]["A"]["path"] == str(ROOT)


def test_comparison_shows_what_a_failing_run_said() -> None:
    done = bench("compare", "--a", "--num-steps 0", "--b", "--num-steps 1", "ipc", status=1)
    assert "a run of A ended with status 1:" in done.stderr and "--num-steps: must be at least 1, got 0" in done.stderr


@pytest.mark.slow
def test_deaths_are_noticed_and_streams_move_again(model: Path) -> None:
    """Not how fast: the machine may be a slow one. The exit status says whether a figure is too large."""
    done = subprocess.run(
        cli("bench", "faults", model, "--device", "mock", "--runs", 2, "--json"),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    figures = json.loads(done.stdout)
    expected = set(FIGURES) - {"model_restart"}
    assert {name.removesuffix("_ms") for name in figures} - {"mode", "num_runs"} == expected
    assert all(0 < figures[f"{name}_ms"]["p50"] <= figures[f"{name}_ms"]["max"] for name in expected)
    assert (done.returncode == 1) == any(
        most_ms is not None and name in expected and figures[f"{name}_ms"]["p50"] > most_ms
        for name, (most_ms, _) in FIGURES.items()
    )
