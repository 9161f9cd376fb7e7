"""What a group writes down when a process of it dies, and what becomes of that."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from procengine import Client, SamplingParams
from procengine.crash.record import CrashRecord, decode_record
from tests.procs.harness import PATIENCE_S, Served, as_ids, cli, has_line, wait_until
from tests.procs.raw_client import RawClient, body

_STEP_MS = 5


def records_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.crash")) if folder.is_dir() else []


def read(path: Path) -> CrashRecord:
    return decode_record(path.read_bytes(), path.name)


def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(cli(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def has_tokens(raw: RawClient, *request_ids: str) -> bool:
    raw.receive(0.01)
    return all(raw.deltas(request_id) for request_id in request_ids)


def start_load(raw: RawClient) -> None:
    """Three that have ended, in order, then three that run for long."""
    for number in range(3):
        raw.submit(f"short {number}", body(as_ids(5 + number, 10 * number), max_tokens=6, stop=["no such text"]))
        raw.wait_end(f"short {number}")
    raw.submit("many", body(as_ids(9, 50), max_tokens=150, n=2, temperature=1.0))
    raw.submit("long", body(as_ids(17, 60), max_tokens=150))
    wait_until(lambda: has_tokens(raw, "many", "long"), "both run", 30.0)


@pytest.mark.parametrize(
    "role",
    ["worker-0", pytest.param("output", marks=pytest.mark.slow), pytest.param("frontend", marks=pytest.mark.slow)],
)
def test_a_death_leaves_a_record_and_its_requests_run_again_as_they_did(
    serve: Callable[..., Served], tmp_path: Path, role: str
) -> None:
    folder = tmp_path / "crashes"
    group = serve("--crash-dir", folder, "--mock-step-ms", _STEP_MS)
    with RawClient(group.endpoint, drops_repeats=True) as raw:
        start_load(raw)
        os.kill(group.pids[role], signal.SIGKILL)
        (path,) = wait_until(lambda: records_in(folder), "there is a record", 30.0)
        record = read(path)
        assert f"{role} (pid {group.pids[role]}) was killed by SIGKILL" in record.reason
        wait_until(lambda: has_line(group.log, "crash record: ", str(path)), "the log says where it is", 30.0)
        if role != "frontend":  # clients see no more of it than of any other death
            raw.wait_end("long", 30.0)
    assert record.config["group"]["name"] == group.name and record.versions["procengine"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(record.steps["step_sent"].to_rows()) > 10 and len(record.steps["request_admitted"].to_rows()) >= 6
    if role == "frontend":
        assert not record.requests  # they were its state
        return
    assert [(one.request_id, one.index) for one in record.requests] == [
        *((f"short {number}", 0) for number in range(3)), ("many", 0), ("many", 1), ("long", 0),
    ]  # fmt: skip
    assert [one.ended for one in record.requests] == ["length"] * 3 + [""] * 3
    assert all(one.output.count for one in record.requests) and record.requests[5].prompt.to_list() == as_ids(17, 60)
    done = run_cli("replay", path, "--fast")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": same: ") == 6 and "6 the same, 0 different, 0 not compared" in done.stdout


def test_on_demand_at_the_recorded_times_and_what_differs_is_said(serve: Callable[..., Served], tmp_path: Path) -> None:
    group = serve("--crash-dir", tmp_path / "crashes", "--mock-step-ms", _STEP_MS)
    path = tmp_path / "asked.crash"
    with RawClient(group.endpoint) as raw:
        start_load(raw)
        with group.paused("worker-0"):  # or all of it might have ended before the command has even started
            done = run_cli("record", group.name, "-o", path)
        assert done.returncode == 0 and str(path) in done.stdout, done.stderr
        assert read(path).reason == "asked for" and not records_in(tmp_path / "crashes")
        raw.wait_end("long", 30.0)
    assert run_cli("replay", path).returncode == 0
    # On this group the keys, of which mock tokens are made, are others by now.
    done = run_cli("replay", path, "--group", group.name, "--fast")
    assert done.returncode == 1 and "DIFFERENT: token 0 was " in done.stdout, done.stdout + done.stderr
    shown = run_cli("replay", path, "--show")
    assert shown.returncode == 0 and "6 requests, 3 of them running" in shown.stdout


def test_redacted_prompts_leave_lengths_and_digests(serve: Callable[..., Served], tmp_path: Path) -> None:
    group = serve("--crash-dir", tmp_path / "crashes", "--redact-prompts")
    secret = "the treasure lies under the oak"
    with Client(group.endpoint) as client:
        params = SamplingParams(temperature=0.0, max_tokens=5, stop="buried", logit_bias={77: 1.0})
        for cache_salt in ("salt of one", "salt of one", ""):
            client.generate(secret, params, cache_salt=cache_salt)
        assert run_cli("record", group.name, "-o", tmp_path / "r.crash").returncode == 0
    data = (tmp_path / "r.crash").read_bytes()
    record = read(tmp_path / "r.crash")
    assert not any(word.encode() in data for word in ("treasure", "buried", "salt of one"))
    first, second, third = record.requests
    assert first.prompt == second.prompt and first.prompt.ids is None and first.prompt.count == len(secret)
    assert first.body["cache_salt"] == second.body["cache_salt"] and "cache_salt" not in third.body
    assert first.output.count == 5 and "redacted" in first.body["sampling_params"]["logit_bias"]
    assert first.body["sampling_params"]["max_tokens"] == 5
    done = run_cli("replay", tmp_path / "r.crash")
    assert done.returncode == 1 and "--redact-prompts" in done.stderr


def test_records_are_bounded_in_number_and_a_disk_that_takes_none_is_a_line_in_the_log(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    folder = tmp_path / "crashes"
    group = serve("--crash-dir", folder, "--crash-records", 2)
    for _ in range(4):
        assert run_cli("record", group.name).returncode == 0
    assert len(records_in(folder)) == 2
    full = serve("--crash-dir", "/dev/full/crashes", name="full")
    os.kill(full.pids["worker-0"], signal.SIGKILL)
    wait_until(lambda: has_line(full.log, "no crash record could be written: /dev/full"), "the log says so", 30.0)
    assert full.next_event()["event"] == "restarted"
    done = run_cli("record", "full")
    assert done.returncode == 1 and "Not a directory" in done.stderr
    off = serve("--crash-dir", tmp_path / "none", "--crash-seconds", 0, name="off")
    os.kill(off.pids["worker-0"], signal.SIGKILL)
    assert off.next_event()["event"] == "restarted" and not (tmp_path / "none").exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"\xff" * 100, b"\x91" * 100_000, b"{}"])
def test_what_is_no_record_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.crash"
    path.write_bytes(content)
    done = run_cli("replay", path)
    assert done.returncode == 1 and "x.crash: not a crash record" in done.stderr and len(done.stderr.splitlines()) == 1
    assert run_cli("replay", tmp_path / "absent").returncode == 1
