"""`scripts/bench peers` with engines of a few lines: turns, who is stopped meanwhile, failures; and the script."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from procengine.bench.peers.answers import EngineError
from procengine.bench.peers.loads import WORKLOADS, Load, PromptSource, Workload
from procengine.bench.peers.other_load import OtherLoad
from procengine.bench.peers.process import EngineProcess
from procengine.bench.peers.results import EngineResult, EngineSpec
from procengine.bench.peers.session import Limits, run_session
from tests.procs.harness import is_running, wait_until

ROOT = Path(__file__).resolve().parents[2]
TEXT = np.random.default_rng(0).integers(0, 500, 60_000).astype(np.int32)
LIMITS = Limits(start_s=60, run_s=60, idle_s=1.0, settle_s=0.0)
NUM_WARMUPS = 2

# It notes each run in a journal, with the states of all other engines: those named "spinner*" it first sees stopped.
FAKE = """
import json, os, pathlib, subprocess, sys, time
scripts, folder, name, mood = sys.argv[1:]
sys.path.insert(0, scripts)
from engine_loop import serve
folder, num_runs = pathlib.Path(folder), 0

def state(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"

def states():
    others = [file for file in folder.glob("*.pids") if file.stem != name]
    return {file.stem: "".join(map(state, file.read_text().split())) for file in others}

def all_stopped(found):
    return all(set(state) == {"T"} for other, state in found.items() if other.startswith("spinner"))

def run(load):
    global num_runs
    num_runs += 1
    print("noise on stdout")
    if num_runs == 4:
        if mood == "raises":
            raise RuntimeError("out of luck")
        if mood == "exits":
            os._exit(3)
        if mood == "hangs":
            time.sleep(600)
    deadline = time.monotonic() + 20
    while not all_stopped(found := states()) and time.monotonic() < deadline:
        time.sleep(0.005)
    with (folder / "journal").open("a") as journal:
        journal.write(json.dumps({"name": name, "prompts": load["prompts"], "states": found}) + "\\n")
    count = load["output_len"] - (mood == "is short" and num_runs == 4)
    times = {"intended_s": 0.0, "submitted_s": 0.0, "token_times_s": [0.5], "token_counts": [count]}
    return [times] * len(load["prompts"])

def load():
    below = [subprocess.Popen(["sh", "-c", "while :; do :; done"]).pid] if mood == "spins" else []
    if mood == "does not load":
        sys.exit("no such model")
    (folder / f"{name}.pids").write_text(" ".join(map(str, [os.getpid(), *below])))
    return "1.2", "int8", run

serve(load)
"""


def fake(folder: Path, name: str, mood: str, workloads: str = "w2 w3") -> EngineSpec:
    script = folder / "fake.py"
    script.write_text(FAKE)
    command = [sys.executable, str(script), str(ROOT / "scripts" / "peers"), str(folder), name, mood]
    return EngineSpec(name, "8-bit", command, frozenset(workloads.split()), is_ours=name == "ours")


def run_fakes(folder: Path, *specs: EngineSpec, workloads: str = "w2 w3") -> dict[str, EngineResult]:
    chosen: list[Workload] = [WORKLOADS[name] for name in workloads.split()]
    progress: list[str] = []
    results = run_session(specs, chosen, range(3), PromptSource(TEXT, 0), folder, LIMITS, progress.append)
    for file in folder.glob("*.pids"):
        for pid in map(int, file.read_text().split()):
            wait_until(lambda pid=pid: not is_running(pid), f"{file.stem} has ended")  # type: ignore[misc]
    return {result.spec.name: result for result in results}


def measured(folder: Path) -> list[dict[str, Any]]:
    """The journal without the warm-ups of each engine."""
    seen: Counter[str] = Counter()
    entries = [dict(json.loads(line)) for line in (folder / "journal").read_text().splitlines()]
    for entry in entries:
        seen[entry["name"]] += 1
        entry["is_measured"] = seen[entry["name"]] > NUM_WARMUPS
    return [entry for entry in entries if entry["is_measured"]]


def test_engines_alternate_and_one_that_spins_is_stopped_while_the_other_runs(tmp_path: Path) -> None:
    results = run_fakes(tmp_path, fake(tmp_path, "ours", "is calm"), fake(tmp_path, "spinner", "spins"))
    journal = measured(tmp_path)
    forth, back = ["ours", "spinner"], ["spinner", "ours"]
    assert [entry["name"] for entry in journal] == [*forth, *forth, *back, *back, *forth, *forth], "runs of w2 and w3"
    for first, second in zip(journal[::2], journal[1::2], strict=True):
        assert first["prompts"] == second["prompts"], "the same for every engine"
    assert len({json.dumps(entry["prompts"]) for entry in journal}) == 6, "new ones in each run"

    spinner, ours = results["spinner"], results["ours"]
    assert spinner.is_stopped_when_idle and spinner.idle_share > 0.05
    assert not ours.is_stopped_when_idle
    assert {entry["states"]["spinner"] for entry in journal if entry["name"] == "ours"} == {"TT"}, "and its child"
    assert "T" not in {entry["states"]["ours"] for entry in journal if entry["name"] == "spinner"}
    assert (ours.version, ours.precision, ours.error) == ("1.2", "int8", None)
    assert ours.peak_rss_mib > 1
    runs = [run for run in ours.runs_by_workload["w2"] if run is not None]
    assert [run["wall_s"] for run in runs] == [0.5] * 3
    assert all(run["others_cores"] >= 0 for run in runs)


@pytest.mark.parametrize(
    ("mood", "message"),
    [
        ("raises", "RuntimeError: out of luck"),
        ("exits", "it has ended"),
        ("is short", "request 0 has 0 tokens at 1 times, 1 were asked for"),
    ],
)
def test_engine_that_fails_drops_out_and_the_others_go_on(tmp_path: Path, mood: str, message: str) -> None:
    """Its fourth run is the second that counts."""
    results = run_fakes(tmp_path, fake(tmp_path, "broken", mood), fake(tmp_path, "ours", "is calm"), workloads="w3")
    assert message in (results["broken"].error or "")
    assert [run is None for run in results["broken"].runs_by_workload["w3"]] == [False, True, True]
    assert [run is None for run in results["ours"].runs_by_workload["w3"]] == [False] * 3
    assert results["ours"].error is None


def test_engine_that_does_not_load_says_why_and_one_that_cannot_run_this_is_left_out(tmp_path: Path) -> None:
    absent, partial = fake(tmp_path, "absent", "does not load"), fake(tmp_path, "partial", "is calm", "w3")
    results = run_fakes(tmp_path, absent, partial)
    assert "it has ended\n    no such model" in (results["absent"].error or "")
    assert [run is None for run in results["partial"].runs_by_workload["w2"]] == [True] * 3
    assert [run is None for run in results["partial"].runs_by_workload["w3"]] == [False] * 3
    assert results["partial"].error is None


def test_interrupt_keeps_what_was_measured(tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line.startswith("run 2, w3, b"):  # the second run begins with the last engine
            raise KeyboardInterrupt

    specs = [fake(tmp_path, name, "is calm") for name in ("a", "b")]
    results = run_session(specs, [WORKLOADS["w3"]], range(3), PromptSource(TEXT, 0), tmp_path, LIMITS, interrupt)
    assert [len(result.runs_by_workload["w3"]) for result in results] == [1, 2]
    assert all(result.error is None for result in results)
    for pid in (int((tmp_path / f"{name}.pids").read_text()) for name in ("a", "b")):
        assert not is_running(pid)


@contextlib.contextmanager
def started(spec: EngineSpec, folder: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(spec, folder / "log")
    try:
        yield process
    finally:
        process.close(wait_s=0)


def test_engine_that_hangs_is_given_up_at_its_limit(tmp_path: Path) -> None:
    load = Load([[1, 2, 3]], 2)
    with started(fake(tmp_path, "fake", "hangs"), tmp_path) as process:
        process.wait_ready(60)
        for _ in range(3):
            process.run(load, 60)
        with pytest.raises(EngineError, match=r"no answer within 0.1 s"):
            process.run(load, 0.1)
    assert not is_running(process.pid)


def test_engine_that_is_stopped_does_not_survive_the_end(tmp_path: Path) -> None:
    with started(fake(tmp_path, "spinner", "spins"), tmp_path) as process:
        process.wait_ready(60)
        pids = list(map(int, (tmp_path / "spinner.pids").read_text().split()))
        process.pause()
    for pid in pids:
        wait_until(lambda pid=pid: not is_running(pid), "it is gone")  # type: ignore[misc]


def test_script_skips_what_is_not_installed_and_measures_a_group(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, ROOT / "scripts" / "compare_peers.py", "--model", model, "--runs", "1"),
            *("--workloads", "w3,w5", "--peers", "openvino-int8,llama-cpp-q4_1"),
            *("--options", "--device mock --async-depth 1"),
            *("--json", tmp_path / "all.json"),
        ],
        env={**os.environ, "PEERS_HOME": str(tmp_path / "nothing")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name, venv in (("openvino-int8", "ov"), ("llama-cpp-q4_1", "lcp")):
        assert f"skipped: {name}: there is no {tmp_path / 'nothing' / venv / 'bin' / 'python'}" in done.stderr
    assert "procengine --device mock --async-depth 1" in done.stdout and "not measured" in done.stdout
    whole = json.loads((tmp_path / "all.json").read_text())
    assert [engine["error"] for engine in whole["engines"]] == [None]
    for engine in whole["engines"]:
        for run in engine["runs_by_workload"]["w5"]:
            assert run["num_output_tokens"] == 64 * 64 and run["peak_concurrency"] <= 16
            assert run["num_cached_tokens"] == 0


def test_load_of_others_is_what_neither_engine_nor_comparison_use(tmp_path: Path) -> None:
    with started(fake(tmp_path, "spinner", "spins"), tmp_path) as process:
        process.wait_ready(60)
        of_a_stranger = OtherLoad(lambda: 0.0)
        begin_s = process.cpu_s()
        wait_until(lambda: process.cpu_s() > begin_s + 0.5, "it has used half a second")
        assert of_a_stranger.cores() > 0
    used = iter([0.0, 1e9])  # of an engine that says it used far more than there is
    assert OtherLoad(lambda: next(used)).cores() == 0.0
