"""`procengine trace` and `profile` on live groups of the mock device."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from procengine import RequestOutput, SamplingParams
from procengine.client_bodies import Prompt
from procengine.groups import find_group
from procengine.profiling.bubbles import overlap_share
from procengine.profiling.capture import Capture, Joined, join_capture, only_request
from procengine.profiling.chrome_trace import encode_trace
from procengine.profiling.recording import Recording
from procengine.profiling.steps import LOOP_STAGES, worker_times
from procengine.profiling.summary import summarize
from tests.procs.harness import PATIENCE_S, Served, cli, has_line, wait_until
from tests.unit.profiling.trace_reader import bubble_share, check_trace, load_slices, read_trace

STEP_MS = 5
OUTPUT_LEN = 40


def greedy(num_tokens: int = OUTPUT_LEN) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--mock-step-ms", STEP_MS, "--decode-steps", 2, "--workers", 2, name="profiled")


@pytest.fixture(scope="module")
def recorded(group: Served) -> tuple[Joined, list[RequestOutput]]:
    """Two rounds of requests, so that the workers run dry between them, and what the group noted."""
    recording = Recording(find_group(group.endpoint))
    outputs: list[RequestOutput] = []
    with group.client() as client:
        for number in range(2):
            prompts: list[Prompt] = [f"text number {number}", list(range(64, 164)), [100 + number, 101], [300]]
            outputs += client.generate(prompts, greedy())
            wait_until(lambda: client.stats()["num_unfinished"] == 0, "the frontend knows that all have ended")

    def everything_is_written() -> Joined | None:  # the answer was on its way before its record was
        joined = join_capture(recording.stop())
        return joined if len(joined.requests) == len(outputs) else None

    joined = wait_until(everything_is_written, "a record of each request's end")
    assert joined is not None
    return joined, outputs


def test_stages_of_a_request_add_up_to_what_its_client_saw(recorded: tuple[Joined, list[RequestOutput]]) -> None:
    joined, outputs = recorded
    requests = joined.requests
    assert (requests.stages_ns >= 0).all()
    assert (requests.stages_ns.sum(axis=1) == requests.e2e_ns).all()
    assert requests.finish_reasons == ["length"] * len(outputs)
    for output in outputs:
        (row,) = np.flatnonzero([request_id == output.request_id for request_id in requests.ids])
        assert output.metrics is not None
        # The client's last stage ends when the message is with it, ours when it is with the socket.
        until_delivery_ms = output.metrics.e2e_ms - output.metrics.deliver_ms
        ours_ms = requests.stages_ns[row, :6].sum() / 1e6
        assert ours_ms == pytest.approx(until_delivery_ms, rel=0.02)


def test_phases_of_the_workers_add_up_to_their_time(recorded: tuple[Joined, list[RequestOutput]]) -> None:
    joined, _ = recorded
    workers = worker_times(joined.passes)
    assert [worker.rank for worker in workers] == [0, 1]
    for worker in workers:
        own = joined.passes.of_rank(worker.rank)
        assert worker.unknown_ns == 0
        assert worker.busy_ns + worker.idle_ns == worker.total_ns == own["done_ns"][-1] - own["started_ns"][0]
        assert worker.forward_ns >= len(own) * STEP_MS * 10**6  # the mock device sleeps for as long
        parts = joined.bubbles.of_rank(worker.rank)
        assert (parts.parts_ns >= 0).all() and parts.durations_ns.sum() == worker.idle_ns
    firsts = joined.passes.where(joined.passes["micro_step"] == 0)
    round_trips = np.sum([firsts.durations(stage) for stage in LOOP_STAGES], axis=0)
    assert (round_trips == firsts["applied_ns"] - firsts["plan_ns"]).all()
    overlap = overlap_share(joined.passes)
    assert overlap is not None and 0 < overlap <= 1


def test_a_worker_between_two_rounds_waits_for_requests(recorded: tuple[Joined, list[RequestOutput]]) -> None:
    joined, _ = recorded
    for rank in (0, 1):
        assert joined.bubbles.of_rank(rank).ns_by_cause["no request"] > 0


def test_a_trace_is_valid_and_sql_over_it_says_what_the_summary_says(
    recorded: tuple[Joined, list[RequestOutput]],
) -> None:
    joined, outputs = recorded
    events = read_trace(encode_trace(joined))
    check_trace(events)
    db = load_slices(events)
    assert bubble_share(db) == pytest.approx(summarize(joined)["bubble_share"], abs=1e-9)
    by_cause = dict(
        db.execute("select substr(name, 7), sum(dur) from slice where name like 'wait: %' group by name").fetchall()
    )
    assert by_cause == {cause: ns for cause, ns in joined.bubbles.ns_by_cause.items() if ns}
    processes = {process for (process,) in db.execute("select distinct process from slice")}
    assert processes == {"requests", "frontend", "worker-0", "worker-1", "output"}
    names = {name for (name,) in db.execute("select name from slice where process = 'requests' and depth = 0")}
    assert names == {output.request_id for output in outputs}
    arrows = [event for event in events if event["ph"] == "s" and event["cat"] == "request"]
    assert len(arrows) == len(outputs)


def test_one_request_of_the_capture(recorded: tuple[Joined, list[RequestOutput]]) -> None:
    joined, outputs = recorded
    alone = only_request(joined, outputs[0].request_id)
    check_trace(read_trace(encode_trace(alone)))
    assert alone.requests.ids == [outputs[0].request_id]
    # It got a token from every pass but perhaps the last ones; the other round's are not among them.
    (rank,) = alone.requests.ranks.tolist()
    assert set(alone.passes["rank"].tolist()) == {rank}
    assert OUTPUT_LEN <= len(alone.passes) < len(joined.passes.of_rank(rank))
    second_round_ns = int(np.sort(joined.requests.bounds_ns[:, 0])[len(outputs) // 2])
    assert (alone.passes["done_ns"] < second_round_ns).all()


# --- the commands


@pytest.fixture
def load(group: Served) -> Iterator[None]:
    """Somebody who asks all the time."""
    is_over = threading.Event()
    prompts: list[Prompt] = ["abc", [100, 101]]

    def ask() -> None:
        with group.client() as client:
            while not is_over.is_set():
                client.generate(prompts, greedy(10))

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    is_over.set()
    thread.join()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(cli(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, check=False)


@pytest.mark.usefixtures("load")
def test_trace_writes_a_file(group: Served, tmp_path: Path) -> None:
    done = run("trace", group.name, "--seconds", 0.6, "-o", tmp_path / "t.json.gz")
    assert done.returncode == 0, done.stderr
    assert "passes of 2 workers" in done.stdout and "records were overwritten" not in done.stderr
    events = read_trace(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    check_trace(events)
    (passes,) = load_slices(events).execute("select count(*) from slice where name like 'step %'").fetchone()
    assert passes >= 10


def test_trace_of_one_request_looks_into_the_past(group: Served, tmp_path: Path) -> None:
    with group.client() as client:
        output = client.generate("long ago", greedy(5), request_id="the-one")
    assert output.request_id == "the-one"
    path = tmp_path / "t.json"  # not compressed

    def is_there() -> bool:  # its end may not be written yet: it is shown as under way
        done = run("trace", group.name, "--request", "the-one", "--seconds", 0, "-o", path)
        assert done.returncode == 0, done.stderr
        events = read_trace(path.read_bytes())
        check_trace(events)
        (slice_of_it,) = [e for e in events if e["ph"] == "X" and e["name"] == "the-one"]
        return bool(slice_of_it["args"]["finish reason"] == "length")

    wait_until(is_there, "the request's end is recorded")
    assert json.loads(path.read_bytes())["otherData"]["group"] == group.name


@pytest.mark.usefixtures("load")
def test_profile_watches_a_running_group(group: Served, tmp_path: Path) -> None:
    done = run("profile", "--group", group.name, "--seconds", 0.6, "-o", tmp_path / "new" / "report")
    assert done.returncode == 0, done.stderr
    assert has_line(done.stdout, "worker-0: busy", "waiting")
    assert has_line(done.stdout, "overlap:") and has_line(done.stdout, "CPU of one core: ", "frontend")
    summary = json.loads((tmp_path / "new" / "report" / "summary.json").read_bytes())
    assert summary["group"] == group.name and summary["num_passes"] > 10 and summary["num_lost_records"] == 0
    assert set(summary["cpu"]) == set(group.pids)
    assert "<title>procengine profile</title>" in (tmp_path / "new" / "report" / "report.html").read_text()


def test_profile_of_an_idle_group_says_that_nobody_asks(group: Served) -> None:
    done = run("profile", "--group", group.name, "--seconds", 0.1, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_passes"] == 0
    assert "no forward pass" in run("profile", "--group", group.name, "--seconds", 0.1).stdout


def test_profile_puts_a_load_on_a_group_of_its_own(model: Path, tmp_path: Path) -> None:
    load = ("--num-prompts", 6, "--input-len", 20, "--output-len", 12, "--warmup", 1)
    done = run("profile", model, "--device", "mock", "--mock-step-ms", 1, *load, "--json", "-o", tmp_path)
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_bytes())
    requests = summary["requests"]
    assert (requests["num_ended"], requests["num_output_tokens"]) == (6, 6 * 12)  # without the warm-up
    assert requests["finish_reasons"] == {"length": 6}


def test_a_group_that_ends_while_it_is_watched(serve: Callable[..., Served], tmp_path: Path) -> None:
    group = serve("--mock-step-ms", 1, name="short")
    with group.client() as client:
        watcher = subprocess.Popen(
            cli("trace", "short", "--seconds", 60, "--past", "-o", tmp_path / "t.json.gz"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert watcher.stderr is not None and watcher.stdout is not None
        assert "watching group short" in watcher.stderr.readline()
        client.generate("x", greedy(20))
    group.stop()
    with watcher:
        out, error = watcher.communicate(timeout=PATIENCE_S)
    assert watcher.returncode == 0
    assert "group short ended after" in error
    assert "passes of 1 worker, 1 request (" in out
    check_trace(read_trace(gzip.decompress((tmp_path / "t.json.gz").read_bytes())))


def test_a_worker_that_is_restarted_while_it_is_watched(serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", 1, name="mended")
    recording = Recording(find_group(group.endpoint))
    with group.client() as client:
        client.generate("x", greedy(20))
        os.kill(group.pids["worker-0"], signal.SIGKILL)
        (output,) = client.generate(["y"], greedy(20))  # waits until it is back
        assert output.outputs[0].finish_reason == "length"

    def has_seen_it() -> Capture | None:
        capture = recording.stop()
        return capture if capture.restarted and len(join_capture(capture).requests) == 2 else None

    capture = wait_until(has_seen_it, "the new process is seen, and both requests")
    assert capture is not None and capture.restarted == ("worker-0",) and not capture.cut_short
    joined = join_capture(capture)
    assert set(joined.passes["epoch"].tolist()) == {0, 1}
    (worker,) = worker_times(joined.passes)
    assert worker.unknown_ns > 0
    assert worker.busy_ns + worker.idle_ns + worker.unknown_ns == worker.total_ns
    assert joined.bubbles.durations_ns.sum() == worker.idle_ns
    assert capture.cpu_s["worker-0"] > 0
    check_trace(read_trace(encode_trace(joined)))
    assert summarize(joined)["restarted"] == ["worker-0"]


def test_a_group_without_spans_cannot_be_watched(serve: Callable[..., Served]) -> None:
    serve("--span-records", 0, name="blind")
    for command in (("trace", "blind"), ("profile", "--group", "blind")):
        done = run(*command)
        assert done.returncode == 1
        assert "group blind keeps no spans: it was started with --span-records 0" in done.stderr


def test_records_that_were_overwritten_are_reported(serve: Callable[..., Served]) -> None:
    group = serve("--span-records", 16, name="tiny")
    recording = Recording(find_group(group.endpoint))
    with group.client() as client:
        client.generate("x", greedy(50))
    capture = recording.stop()
    assert capture.tables.num_lost > 0
    assert summarize(join_capture(capture))["num_lost_records"] == capture.tables.num_lost


def test_ctrl_c_keeps_what_there_is(group: Served, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    watcher = subprocess.Popen(
        cli("trace", group.name, "--seconds", 60, "-o", path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with watcher:
        assert watcher.stderr is not None
        assert "watching group" in watcher.stderr.readline()
        with group.client() as client:
            client.generate("x", greedy(5))
        watcher.send_signal(signal.SIGINT)
        out, error = watcher.communicate(timeout=PATIENCE_S)
    assert (watcher.returncode, error) == (0, "")
    assert "passes of" in out
    check_trace(read_trace(path.read_bytes()))
