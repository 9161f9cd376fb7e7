"""The metrics of a group: names, help, and which figure each shows. Pure.

Owns: the names. Those that vLLM has too are called as there, under `procengine:`. Never does: count.
docs/OBSERVABILITY.md lists them; a test keeps the two together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from procengine.profiling.exposition import Family
from procengine.profiling.group_totals import GroupTotals
from procengine.profiling.histogram import Histogram
from procengine.profiling.process_watch import ProcessFigures
from procengine.profiling.request_ledger import WorkerGauges

__all__ = ["GroupFacts", "families_of", "used_share"]

_PREFIX = "procengine:"
_CHANNEL_BY_ROLE = {"frontend": "requests", "output": "text", "worker": "steps"}


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What does not change.

    Attributes:
        num_blocks: of the KV cache of all workers; 0 is not known, or none.
        cache_labels: how the cache is set up.
    """

    num_blocks: int
    cache_labels: Mapping[str, str]


def families_of(totals: GroupTotals, facts: GroupFacts, now_ns: int) -> Iterator[Family]:
    """Every metric there is; some have no samples yet."""
    yield from _load(totals.gauges, facts)
    yield from _tokens(totals)
    yield from _latencies(totals)
    yield from _passes(totals)
    yield from _processes(totals.watch.processes, now_ns)
    yield _config_info(facts)
    yield _counter("lost_span_records_total", "Records overwritten before they were read; counters miss them.").add(
        totals.num_lost
    )


def used_share(gauges: WorkerGauges, num_blocks: int) -> float:
    """Share of one worker's `num_blocks` that running requests hold, 0 to 1."""
    if not num_blocks or gauges.num_free_blocks is None:
        return 0.0
    return 1.0 - gauges.num_free_blocks / num_blocks


def _counter(name: str, text: str) -> Family:
    return Family(_PREFIX + name, "counter", text)


def _gauge(name: str, text: str) -> Family:
    return Family(_PREFIX + name, "gauge", text)


def _histogram(name: str, text: str, histogram: Histogram | None = None) -> Family:
    family = Family(_PREFIX + name, "histogram", text)
    return family if histogram is None else family.add_histogram(histogram)


def _load(each: Sequence[WorkerGauges], facts: GroupFacts) -> Iterator[Family]:
    running = _gauge("num_requests_running", "Requests that a worker is computing.")
    waiting = _gauge("num_requests_waiting", "Requests that wait for room in a worker.")
    in_flight = _gauge("num_steps_in_flight", "Steps sent to a worker whose result is not back.")
    usage = _gauge("kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1.")
    for rank, gauges in enumerate(each):
        engine = str(rank)
        running.add(gauges.num_running, engine=engine)
        waiting.add(gauges.num_waiting, engine=engine)
        in_flight.add(gauges.num_in_flight, engine=engine)
        usage.add(used_share(gauges, facts.num_blocks // len(each)), engine=engine)
    yield from (running, waiting, in_flight, usage)


def _tokens(totals: GroupTotals) -> Iterator[Family]:
    ledger, requests = totals.ledger, totals.requests
    for name, text, value in (
        ("num_preemptions_total", "Preemptions: a request gave its blocks to others.", ledger.num_preemptions),
        ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", ledger.num_prompt_tokens),
        ("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", ledger.num_cached_tokens),
        ("prompt_tokens_total", "Prompt tokens of admitted requests.", ledger.num_prompt_tokens),
        ("generation_tokens_total", "Tokens generated.", requests.num_output_tokens),
    ):
        yield _counter(name, text).add(value)
    ended = _counter("request_success_total", "Requests that ended, by finish reason.")
    for reason, count in requests.num_by_reason.items():
        ended.add(count, finished_reason=reason)
    yield ended
    rejected = _counter("request_rejected_total", "Requests that were refused, by the code of the error.")
    for code, count in requests.num_rejected_by_code.items():
        rejected.add(count, code=code)
    yield rejected
    dropped = _counter("clients_dropped_total", "Clients whose requests were aborted: they were gone, or did not read.")
    for reason, count in requests.num_dropped_clients.items():
        dropped.add(count, reason=reason)
    yield dropped


def _latencies(totals: GroupTotals) -> Iterator[Family]:
    seconds, requests = totals.requests.seconds, totals.requests
    for name, text, histogram in (
        ("time_to_first_token_seconds", "From sending to the first token.", seconds["time_to_first_token"]),
        ("inter_token_latency_seconds", "Between a request's tokens.", totals.passes.token_gaps),
        (
            "request_time_per_output_token_seconds",
            "Mean time between a request's tokens, by request.",
            seconds["time_per_output_token"],
        ),
        ("e2e_request_latency_seconds", "From sending to the last message.", seconds["e2e"]),
        ("request_tokenize_time_seconds", "From receipt until tokenized.", seconds["tokenize"]),
        ("request_queue_time_seconds", "From tokenized until admitted.", seconds["queue"]),
        ("request_inference_time_seconds", "From admission to the last token.", seconds["inference"]),
        ("request_prefill_time_seconds", "From admission to the first token.", seconds["prefill"]),
        ("request_decode_time_seconds", "From the first to the last token.", seconds["decode"]),
        ("request_detokenize_time_seconds", "From the last token until it is text.", seconds["detokenize"]),
        ("request_prompt_tokens", "Prompt tokens of a request.", requests.prompt_tokens),
        ("request_generation_tokens", "Tokens generated for a request.", requests.output_tokens),
        ("iteration_tokens_total", "Tokens that a step computes.", totals.passes.step_tokens),
    ):
        yield _histogram(name, text, histogram)


def _passes(totals: GroupTotals) -> Iterator[Family]:
    passes = totals.passes
    phases = _histogram("step_phase_seconds", "Time of a forward pass by process and phase.")
    for (process, phase), histogram in passes.phases.items():
        phases.add_histogram(histogram, process=process, phase=phase)
    hops = _histogram("hop_seconds", "From one process's send to the other's receipt.")
    for hop, histogram in passes.hops.items():
        hops.add_histogram(histogram, hop=hop)
    busy = _counter("worker_busy_seconds_total", "Time in which a worker ran passes.")
    for rank, busy_ns in passes.busy_ns.items():
        busy.add(busy_ns / 1e9, engine=str(rank))
    bubbles = _counter("bubble_seconds_total", "Time in which a worker was idle, by what it waited for.")
    for (rank, cause), idle_ns in passes.bubble_ns.items():
        bubbles.add(idle_ns / 1e9, engine=str(rank), cause=cause)
    yield from (phases, hops, busy, bubbles)


def _processes(processes: Sequence[ProcessFigures], now_ns: int) -> Iterator[Family]:
    up = _gauge("process_up", "1 if the process runs and answers its supervisor.")
    cpu = _counter("process_cpu_seconds_total", "CPU time of the process.")
    rss = _gauge("process_resident_memory_bytes", "Resident memory of the process, shared pages included.")
    uptime = _gauge("process_uptime_seconds", "Age of the process.")
    restarts = _counter("process_restarts_total", "How often it was started again.")
    heard = _gauge("process_heartbeat_age_seconds", "Time since the process last answered.")
    depth = _gauge("channel_depth", "What waits behind a channel: requests and texts not ended, steps not done.")
    for process in processes:
        name, status = process.name, process.status
        up.add(int(process.is_up), process=name)
        cpu.add(status.cpu_s, process=name)
        rss.add(status.rss_bytes, process=name)
        uptime.add(status.uptime_s, process=name)
        restarts.add(status.num_restarts, process=name)
        if process.heard_ns:
            heard.add((now_ns - process.heard_ns) / 1e9, process=name)
        if status.role in _CHANNEL_BY_ROLE:
            channel = _CHANNEL_BY_ROLE[status.role]
            depth.add(status.queue_depth, channel=f"{channel}-{status.rank}" if status.role == "worker" else channel)
    yield from (up, cpu, rss, uptime, restarts, heard, depth)


def _config_info(facts: GroupFacts) -> Family:
    info = _gauge("cache_config_info", "Always 1; the labels say how the KV cache is set up.")
    return info.add(1, num_gpu_blocks=str(facts.num_blocks), **facts.cache_labels)
