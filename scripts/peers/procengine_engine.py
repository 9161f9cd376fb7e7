"""procengine: a group of its own and a client on it. `procengine_engine.py MODEL [options of procengine serve ...]`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import numpy as np
from engine_loop import serve

import procengine
from procengine.bench.arrivals import Pace
from procengine.bench.peers.precision import precision_of
from procengine.bench.run import BenchClient
from procengine.bench.timelines import Timeline, read_timelines
from procengine.bench.workload import BenchRequest
from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.errors import ProcengineError
from procengine.groups import find_group
from procengine.launch import launch_group
from procengine.resolve import resolve
from procengine.sampling_params import SamplingParams


def run_load(client: BenchClient, load: dict[str, Any]) -> list[dict[str, Any]]:
    """Send a load at its pace. Streaming is all there is: a message comes whenever there are tokens."""
    requests = [BenchRequest(prompt, load["output_len"], "peers") for prompt in load["prompts"]]
    arrivals_s = None if load["arrivals_s"] is None else np.array(load["arrivals_s"])
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    record = client.run(requests, params, Pace(arrivals_s, load["max_concurrency"]))
    for error in record.failures.values():
        raise ProcengineError(error)
    timelines = read_timelines(record)
    begin_ns = min(timeline.intended_ns for timeline in timelines)
    return [_times(timeline, begin_ns) for timeline in timelines]


def _times(timeline: Timeline, begin_ns: int) -> dict[str, Any]:
    return {
        "intended_s": (timeline.intended_ns - begin_ns) / 1e9,
        "submitted_s": (timeline.submitted_ns - begin_ns) / 1e9,
        "token_times_s": [(at - begin_ns) / 1e9 for at in timeline.token_times_ns],
        "token_counts": timeline.token_counts,
    }


def load() -> tuple[str, str, Any]:
    """For `serve`. The group ends with this process."""
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    config = resolve(engine_args_from(parser.parse_args(), default_name=f"peers-{os.getpid()}"))
    group = launch_group(config, log_to=sys.stderr.buffer)
    client = BenchClient(find_group(group.endpoint))

    def run(load: dict[str, Any]) -> list[dict[str, Any]]:
        return run_load(client, load)

    run.group = group  # type: ignore[attr-defined]  # lives as long as we do
    return procengine.__version__, precision_of(config), run


if __name__ == "__main__":
    serve(load)
