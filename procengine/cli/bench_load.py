"""`procengine bench serve|throughput|latency`: sends a work load to a group and prints figures.

Owns: from options to a work load and a pace. Never does: take times (`bench.run`) or compute figures (`bench.report`).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from procengine.bench.arrivals import Pace, arrival_times
from procengine.bench.datasets import Trace, parse_jsonl, parse_prompts, parse_trace
from procengine.bench.goodput import parse_objectives
from procengine.bench.http_run import HttpBenchClient
from procengine.bench.plot import check_can_plot, plot_run
from procengine.bench.report import ReportOptions, report, table
from procengine.bench.run import BenchClient
from procengine.bench.timelines import read_timelines
from procengine.bench.workload import (
    BenchRequest,
    Lengths,
    check_fits,
    misfit,
    prefix_requests,
    random_requests,
    requests_of_lengths,
)
from procengine.cli.bench_load_args import NUM_PROMPTS, check_load_arguments
from procengine.cli.engine_args import engine_args_from
from procengine.config import ApiConfig
from procengine.errors import ConfigError, ProcengineError
from procengine.groups import find_group
from procengine.launch import launch_group
from procengine.resolve import resolve
from procengine.sampling_params import SamplingParams

__all__ = ["measure"]

_WARMUP_TOKENS: Final = 16
_WARMUP_SEED: Final = 1 << 64  # added to the run's; larger than anybody's


@dataclass(frozen=True, slots=True)
class _Target:
    """A group to measure, and what it runs with if it is ours."""

    client: BenchClient | HttpBenchClient
    config: dict[str, Any] | None


def measure(args: argparse.Namespace) -> int:
    """Measure and print."""
    check_load_arguments(args)
    options = _report_options(args)
    source = _read_source(args)  # before anything is launched
    if args.plot is not None:
        check_can_plot(args.plot)
    with _target(args) as target:
        welcome = target.client.welcome
        requests, trace = _requests(args, source, welcome.vocab_size, welcome.max_model_len)
        figures = _measure(args, target, requests, _pace(args, len(requests), trace), options)
    print(msgspec.json.encode(figures).decode() if args.json else table(figures))
    return 0


def _measure(
    args: argparse.Namespace, target: _Target, requests: Sequence[BenchRequest], pace: Pace, options: ReportOptions
) -> dict[str, Any]:
    client = target.client
    params = SamplingParams(temperature=args.temperature, ignore_eos=args.ignore_eos)
    warmups = _warmup_requests(args, client.welcome.vocab_size, client.welcome.max_model_len)
    client.run(warmups, SamplingParams(temperature=0.0, ignore_eos=True), Pace())
    if target.config is not None:  # the counters of a group that serves others are not ours to reset
        client.stats(reset=True)
    print(f"{args.mode}: {len(requests)} requests ...", file=sys.stderr, flush=True)
    record = client.run(requests, params, pace)
    if record.failures and args.mode != "serve":  # a figure of fewer requests than asked for would mislead
        request_id, error = next(iter(record.failures.items()))
        raise ProcengineError(f"request {request_id} of the benchmark failed: {error}")
    timelines = read_timelines(record)
    stats = client.stats().values if target.config is not None else {}
    figures = {"mode": args.mode, **_asked(args), **report(timelines, stats, options)}
    if target.config is not None:
        figures["config"] = target.config
    if args.plot is not None:
        rate = f"{figures['output_tokens_per_s']:,.0f} output tokens/s"
        plot_run(timelines, f"{args.mode} {client.welcome.model}: {len(requests)} requests, {rate}", args.plot)
    return figures


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """What was asked for, beside the figures of what came."""
    asked = {"dataset": "prompts" if _prompts_path(args) else args.dataset_name}
    if args.mode == "serve":
        is_all_at_once = math.isinf(args.request_rate)
        asked |= {
            "http": args.http,
            "request_rate": "inf" if is_all_at_once else args.request_rate,  # JSON has no infinity
            "burstiness": args.burstiness,
            "max_concurrency": args.max_concurrency,
        }
    return asked


@contextlib.contextmanager
def _target(args: argparse.Namespace) -> Iterator[_Target]:
    """The group to measure: a private one for MODEL, else the running one."""
    with contextlib.ExitStack() as exits:
        config = None
        keys: tuple[str, ...] = ()
        if args.model is None:
            info = find_group(args.group)
        else:
            engine_args = engine_args_from(args, default_name=f"bench-{os.getpid()}")
            if _is_http(args) and engine_args.port is None:
                engine_args = msgspec.structs.replace(engine_args, port=0)
            resolved = resolve(engine_args)
            config = msgspec.to_builtins(msgspec.structs.replace(resolved, api=ApiConfig()))  # its keys are no figures
            keys = resolved.api.api_keys
            info = find_group(exits.enter_context(launch_group(resolved)).endpoint)
        own = BenchClient(info)
        client = HttpBenchClient(own, info.http, keys[0] if keys else None) if _is_http(args) else own
        exits.callback(client.close)
        yield _Target(client, config)


def _warmup_requests(args: argparse.Namespace, vocab_size: int, max_model_len: int) -> list[BenchRequest]:
    """Pay for what happens once (lazy imports, allocations), with prompts that no run of any seed has: they would be
    in the prefix cache of a group that is measured several times."""
    room = max_model_len - 1
    lengths = Lengths(min(args.input_len, max(room - _WARMUP_TOKENS, 1)), min(_WARMUP_TOKENS, room))
    return random_requests(args.warmup, lengths, vocab_size, args.seed + _WARMUP_SEED)


def _read_source(args: argparse.Namespace) -> list[BenchRequest] | Trace | None:
    """What a file says, if the work load comes from one."""
    prompts = _prompts_path(args)
    if prompts is not None:
        return parse_prompts(_read(prompts, "--prompts"), f"--prompts: {prompts}", args.output_len)[: args.num_prompts]
    if args.dataset_name not in ("jsonl", "trace"):
        return None
    data = _read(args.dataset_path, "--dataset-path")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path: {args.dataset_path} is no UTF-8 text ({error})") from error
    if args.dataset_name == "trace":
        return parse_trace(text, str(args.dataset_path)).first(args.num_prompts)
    return parse_jsonl(text, str(args.dataset_path), args.output_len)[: args.num_prompts]


def _read(path: Path, option: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error


def _requests(
    args: argparse.Namespace, source: list[BenchRequest] | Trace | None, vocab_size: int, max_model_len: int
) -> tuple[list[BenchRequest], Trace | None]:
    """All requests, and the trace if one says when they come."""
    trace = source if isinstance(source, Trace) else None
    if trace is not None:
        requests = requests_of_lengths(trace.lengths, trace.origins, vocab_size, args.seed)
    elif isinstance(source, list):
        requests = source
    else:
        requests = _made_up_requests(args, vocab_size)
    if args.skip_unfit:
        fits = [misfit(request, max_model_len) is None for request in requests]
        requests, trace = _only(requests, fits), trace and trace.only(fits)
        if not all(fits):
            print(f"left out: {len(fits) - sum(fits)} of {len(fits)} requests do not fit", file=sys.stderr)
    check_fits(requests, max_model_len)
    return requests, trace


def _made_up_requests(args: argparse.Namespace, vocab_size: int) -> list[BenchRequest]:
    num_requests = args.num_prompts or NUM_PROMPTS[args.mode]
    lengths = Lengths(args.input_len, args.output_len, args.random_range_ratio)
    if args.dataset_name == "prefix":
        return prefix_requests(num_requests, lengths, args.prefix_len, args.num_prefixes, vocab_size, args.seed)
    return random_requests(num_requests, lengths, vocab_size, args.seed)


def _only(requests: Sequence[BenchRequest], keeps: Sequence[bool]) -> list[BenchRequest]:
    return [request for request, keep in zip(requests, keeps, strict=True) if keep]


def _pace(args: argparse.Namespace, num_requests: int, trace: Trace | None) -> Pace:
    if args.mode != "serve":
        return Pace(max_concurrency=1 if args.mode == "latency" else None)
    if trace is not None:
        return Pace(np.array(trace.times_s) * args.time_scale, args.max_concurrency)
    if math.isinf(args.request_rate):
        return Pace(None, args.max_concurrency)
    return Pace(arrival_times(num_requests, args.request_rate, args.burstiness, args.seed), args.max_concurrency)


def _report_options(args: argparse.Namespace) -> ReportOptions:
    has_schedule = args.mode == "serve" and (args.dataset_name == "trace" or not math.isinf(args.request_rate))
    try:
        percentiles = tuple(float(text) for text in args.metric_percentiles.split(",") if text.strip())
    except ValueError:
        raise ConfigError(
            f"--metric-percentiles: must be numbers with commas between, got {args.metric_percentiles!r}"
        ) from None
    metrics = tuple(text.strip() for text in args.percentile_metrics.split(",") if text.strip())
    return ReportOptions(metrics, percentiles, parse_objectives(args.goodput), has_schedule)


def _is_http(args: argparse.Namespace) -> bool:
    return bool(getattr(args, "http", False))


def _prompts_path(args: argparse.Namespace) -> Path | None:
    path: Path | None = getattr(args, "prompts", None)
    return path
