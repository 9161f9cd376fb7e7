"""The metrics process of a live group: what it counts is what clients got, and its death is nobody else's."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from procengine import RequestOutput, SamplingParams
from procengine.cli.ps import ask_groups
from procengine.client_bodies import Prompt
from procengine.config import CacheConfig, EngineConfig, GroupConfig, SchedulerConfig, WorkerConfig
from procengine.errors import InvalidRequestError
from procengine.groups import find_group
from procengine.procs.metrics import _cache_labels
from procengine.profiling.requests import REQUEST_STAGES
from procengine.trace_context import TraceContext
from tests.model_configs import SMOLLM2
from tests.otlp_collector import Collector
from tests.procs.harness import PATIENCE_S, Served, cli, is_running, wait_until
from tests.procs.raw_client import RawClient, body

Labels = frozenset[tuple[str, str]]
Scrape = dict[tuple[str, Labels], float]
OWN = {"group", "model_name"}


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as response:
        return str(response.read().decode())


def scrape(group: Served) -> Scrape:
    """Every sample by name and its own labels."""
    return {
        (
            sample.name.removeprefix("procengine:"),
            frozenset((k, v) for k, v in sample.labels.items() if k not in OWN),
        ): (sample.value)
        for family in text_string_to_metric_families(fetch(group.ready["metrics"]))
        for sample in family.samples
    }


def total(found: Scrape, name: str, **labels: str) -> float:
    """All samples of a name that have these labels, added up."""
    return sum(value for (each, own), value in found.items() if each == name and set(labels.items()) <= own)


def test_the_label_of_the_caches_dtype_is_its_own() -> None:
    worker = WorkerConfig(dtype="bfloat16", kv_cache_dtype="int8")
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
    config = EngineConfig(SMOLLM2, GroupConfig("g", "/nowhere"), CacheConfig(block_size=8), scheduler, worker)
    labels = _cache_labels(config)
    assert (labels["cache_dtype"], labels["block_size"]) == ("int8", "8")


def is_up(group: Served, process: str) -> bool | None:
    """None: the metrics process has not heard of it yet."""
    value = scrape(group).get(("process_up", frozenset({("process", process)})))
    return None if value is None else value == 1


def settled(group: Served, num_ended: int, num_tokens: int) -> Scrape:
    """A scrape in which so many requests have ended, and tokens were generated.

    A client may have its answer before that is noted, and processes are read one after the other.
    """
    found: Scrape = {}

    def is_settled() -> bool:
        found.update(scrape(group))
        counts = total(found, "request_success_total"), total(found, "generation_tokens_total")
        return counts == (num_ended, num_tokens)

    wait_until(is_settled, lambda: f"{num_ended} ended requests and {num_tokens} tokens in {found}")
    return found


def wait_for_restarts(group: Served, number: int) -> None:
    wait_until(
        lambda: total(scrape(group), "process_restarts_total", process="metrics") == number, f"{number} restarts", 20
    )


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def metrics_pid(group: Served) -> int:
    statuses = ask_groups([find_group(group.endpoint)], 5.0)
    (status,) = statuses.values()
    return next(process.pid for process in status.processes if process.role == "metrics")


def test_counters_are_what_clients_got(serve: Callable[..., Served]) -> None:
    group = serve("--metrics-port", 0, "--workers", 2, "--decode-steps", 2)
    before = scrape(group)
    assert total(before, "generation_tokens_total") == total(before, "prompt_tokens_total") == 0
    assert total(before, "process_up") in (0, len(group.pids))  # the first status may not be there yet

    shared = list(range(100, 180))
    prompts: list[Prompt] = ["some text", "x", shared, list(range(200, 300))]
    with group.client() as client:
        outputs: list[RequestOutput] = client.generate(prompts, greedy(9))
        after = settled(group, 4, 4 * 9)
        client.generate(shared, greedy(5))  # its blocks are in the cache of one worker
        client.embed("a vector")
        last = settled(group, 6, 4 * 9 + 5)

    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    assert total(after, "prompt_tokens_total") == total(after, "prefix_cache_queries_total") == num_prompt
    assert total(after, "generation_tokens_total") == total(after, "request_generation_tokens_sum") == 4 * 9
    assert total(after, "request_success_total", finished_reason="length") == 4
    assert total(after, "e2e_request_latency_seconds_count") == total(after, "request_prompt_tokens_count") == 4
    assert total(after, "inter_token_latency_seconds_count") > 0
    assert total(after, "cache_config_info") == 1
    assert total(after, "lost_span_records_total") == 0

    assert total(last, "prefix_cache_hits_total") == 64  # the full blocks of 80 tokens but the last
    assert total(last, "request_success_total", finished_reason="stop") == 1
    assert total(last, "time_to_first_token_seconds_count") == 5  # a vector has no tokens
    for key, value in after.items():
        if key[0].endswith(("_total", "_bucket", "_count", "_sum")):
            assert last[key] >= value, key
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_steps_in_flight"):
        assert total(last, gauge) == 0


def test_gauges_show_what_is_under_way(serve: Callable[..., Served]) -> None:
    group = serve("--metrics-port", 0, "--max-num-seqs", 3, "--num-blocks", 64)
    with RawClient(group.endpoint) as client, group.paused("worker-0"):
        client.submit("r", body([70] * 15, max_tokens=5, n=8))  # one message: all are there for the first step
        client.stats()

        def is_seen() -> bool:
            found = scrape(group)
            return (total(found, "num_requests_running"), total(found, "num_requests_waiting")) == (3, 5)

        wait_until(is_seen, "three requests running and five waiting")
        found = scrape(group)
        assert total(found, "kv_cache_usage_perc") == pytest.approx(3 / 64)
        assert total(found, "num_steps_in_flight") >= 1
        wait_until(lambda: is_up(group, "worker-0") is False, "the worker is silent")
        with pytest.raises(urllib.error.HTTPError) as error:
            fetch(group.ready["metrics"].replace("/metrics", "/health"))
        assert error.value.code == 503
        assert json.loads(error.value.read())["processes"]["worker-0"] == "silent"
    wait_until(lambda: is_up(group, "worker-0"), "the worker answers")
    assert json.loads(fetch(group.ready["metrics"].replace("/metrics", "/health")))["status"] == "ok"


def test_its_death_ends_nothing_and_it_comes_back(serve: Callable[..., Served]) -> None:
    group = serve("--metrics-port", 0, "--mock-step-ms", 2)
    with group.client() as client:
        for number in range(1, 3):
            pid = metrics_pid(group)
            stream = client.stream([70, 71], greedy(200))
            next(stream)
            os.kill(pid, signal.SIGKILL)
            deltas = list(stream)
            assert deltas[-1].finish_reason == "length"
            # On the same port: connections wait while nobody is there. The rings still hold it all.
            settled(group, number, number * 200)
            wait_for_restarts(group, number)
        assert (
            "metrics" in group.log
            and "killed by SIGKILL" in group.log
            and "metrics is restarted, no request notices" in group.log
        )
        last = metrics_pid(group)
    group.signal(signal.SIGTERM)
    assert group.finish() == 0
    assert not is_running(last)  # the one that is not in the ready line


def test_tokens_are_counted_once_whatever_a_restarted_worker_computes_again(serve: Callable[..., Served]) -> None:
    group = serve("--metrics-port", 0, "--mock-step-ms", 2)
    with group.client() as client:
        stream = client.stream([70, 71], greedy(200))
        next(stream)
        os.kill(group.pids["worker-0"], signal.SIGKILL)
        assert list(stream)[-1].finish_reason == "length"
        client.generate([70], greedy(5))
    found = settled(group, 2, 205)
    assert total(found, "prompt_tokens_total") == 3
    wait_until(lambda: total(scrape(group), "process_restarts_total", process="worker-0") == 1, "one restart")
    assert total(scrape(group), "inter_token_latency_seconds_count") > 100  # passes of both are joined


def test_one_that_dies_too_often_is_given_up_and_the_group_goes_on(serve: Callable[..., Served]) -> None:
    group = serve("--metrics-port", 0, "--max-restarts", 1)
    os.kill(group.pids["metrics"], signal.SIGKILL)
    wait_for_restarts(group, 1)
    os.kill(metrics_pid(group), signal.SIGKILL)
    wait_until(lambda: "the group goes on without metrics" in group.log, "the supervisor gives up")
    with pytest.raises(urllib.error.URLError, match="refused"):
        fetch(group.ready["metrics"])
    with group.client() as client:
        assert client.generate("still here", greedy(3)).finished
    (status,) = ask_groups([find_group(group.endpoint)], 5.0).values()
    states = {process.role: process.state for process in status.processes}
    assert states == {**dict.fromkeys(("supervisor", "worker", "frontend", "output"), "ready"), "metrics": "dead"}
    os.kill(group.pids["worker-0"], signal.SIGKILL)  # a worker is restarted all the same
    with group.client() as client:
        assert client.generate("still here", greedy(3)).finished


def test_a_port_that_is_taken_is_an_error_before_anything_starts(serve: Callable[..., Served], model: Path) -> None:
    group = serve("--metrics-port", 0, name="first")
    port = group.ready["metrics"].split(":")[2].split("/")[0]
    done = subprocess.run(
        cli("serve", model, "--device", "mock", "--name", "second", "--metrics-port", port),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith(f"procengine: error: metrics_port: cannot listen on 127.0.0.1, port {port}: ")


def test_without_a_port_there_is_no_process(serve: Callable[..., Served]) -> None:
    group = serve()
    assert "metrics" not in group.pids and "metrics" not in group.ready


# --- traces


def ids_by_name(collector: Collector) -> dict[str, Any]:
    return {collector.attributes(s)["gen_ai.response.id"]: s for s in collector.spans if s.name.startswith("text_")}


def test_requests_become_trees_of_spans_inside_the_clients_own(serve: Callable[..., Served]) -> None:
    parent = TraceContext(2**126 + 77, 2**62 + 3, 1)
    with Collector() as collector:
        options = ("--otlp-endpoint", collector.base_url, "--mock-step-ms", 2)
        group = serve(*options, env={"OTEL_BSP_SCHEDULE_DELAY": "100"})  # ms; the SDK's own is 5 s
        assert "metrics" in group.pids and "metrics" not in group.ready  # the process, but no port
        with group.client() as client:
            output = client.generate("some text", greedy(4), request_id="traced", traceparent=str(parent))
            client.generate("some text", greedy(4), request_id="alone")
        wait_until(lambda: set(ids_by_name(collector)) == {"traced", "alone"}, "both requests are there")
        group.signal(signal.SIGTERM)
        assert group.finish() == 0
    roots = ids_by_name(collector)
    traced = roots["traced"]
    assert traced.trace_id == parent.trace_id.to_bytes(16, "big")
    assert traced.parent_span_id == parent.span_id.to_bytes(8, "big")
    assert not roots["alone"].parent_span_id and roots["alone"].trace_id != traced.trace_id
    attributes = collector.attributes(traced)
    assert attributes["gen_ai.usage.input_tokens"] == len(output.prompt_token_ids)
    assert attributes["gen_ai.usage.output_tokens"] == 4
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    stages = [span for span in collector.spans if span.parent_span_id == traced.span_id]
    names = [span.name for span in stages]  # what took no time is not there: on a busy machine all tokens come at once
    assert names == [name for name in REQUEST_STAGES if name in names]
    assert {"tokenize", "prefill", "deliver"} <= set(names)
    assert stages[0].start_time_unix_nano == traced.start_time_unix_nano
    assert stages[-1].end_time_unix_nano == traced.end_time_unix_nano
    for one, following in itertools.pairwise(stages):
        assert one.end_time_unix_nano == following.start_time_unix_nano
    assert output.metrics is not None
    prefill = stages[names.index("prefill")]
    prefill_ms = (prefill.end_time_unix_nano - prefill.start_time_unix_nano) / 1e6
    assert prefill_ms == pytest.approx(output.metrics.prefill_ms, abs=0.01)


def test_traces_without_the_extra_are_an_error_that_names_it(serve: Callable[..., Served], tmp_path: Path) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("raise ImportError('not installed')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    group = serve("--otlp-endpoint", "http://127.0.0.1:1", waits=False, env={"PYTHONPATH": path})
    event = group.next_event()
    assert event["event"] == "failed"
    assert "otlp_endpoint: needs `pip install procengine[otel]` (not installed)" in event["error"]
    assert group.finish() == 1


def test_a_wrong_traceparent_is_refused_by_name(serve: Callable[..., Served]) -> None:
    group = serve()
    with group.client() as client:
        with pytest.raises(InvalidRequestError, match=r"^traceparent: must be 00-"):
            client.generate("x", greedy(2), traceparent="nonsense")
        assert client.generate("x", greedy(2)).finished
