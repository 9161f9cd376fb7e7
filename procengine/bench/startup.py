"""How long a group takes to be ready, phase by phase, and what its processes hold then.

Owns: one launch and its times. Never does: look inside a process: what it knows is what the group tells everybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from procengine.bench.report import summary
from procengine.child_process import cpu_seconds, peak_rss_bytes, rss_bytes
from procengine.client import Client
from procengine.config import EngineConfig
from procengine.launch import launch_group
from procengine.sampling_params import SamplingParams

__all__ = ["PHASES", "measure_startup", "table"]

# What is timed, in seconds, and from where to where.
PHASES: Final = {
    "launch_s": "from the call until the supervisor runs: an interpreter and its imports",
    "children_s": "from there until all children are ready: imports, weights, KV pool, sockets",
    "ready_s": "the two together: until a client may connect",
    "connect_s": "a client's handshake with frontend and output process",
    "first_token_s": "one request of one token, the first the group ever gets",
    "close_s": "from the end of the last client until the group is gone",
}
_PROMPT: Final = [1]


def measure_startup(
    config: EngineConfig, num_runs: int, num_warmups: int, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Launch the group again and again. The warm-ups bring model files into the page cache, and are not counted."""
    runs = []
    for number in range(1 - num_warmups, num_runs + 1):
        run = _launch_once(config)
        progress(f"{f'run {number} of {num_runs}' if number > 0 else 'warm-up'}: ready in {run['ready_s']:.2f} s")
        if number > 0:
            runs.append(run)
    figures: dict[str, Any] = {"num_runs": num_runs}
    for phase in PHASES:
        figures[phase] = summary(np.array([run[phase] for run in runs]), (0, 100))
    figures["rss_mib"] = _medians(runs, "rss_mib")
    figures["peak_rss_mib"] = _medians(runs, "peak_rss_mib")
    figures["cpu_s"] = _medians(runs, "cpu_s")
    return figures | {"runs": runs}


def table(figures: dict[str, Any]) -> str:
    """Phases with their meaning, then the processes."""
    lines = [f"{figures['num_runs']} runs; seconds: median (min .. max)", ""]
    for phase, meaning in PHASES.items():
        found = figures[phase]
        lines.append(f"{phase:<14} {found['p50']:8.3f} ({found['p0']:.3f} .. {found['max']:.3f})  {meaning}")
    lines += [
        "",
        f"{'process':<14} {'RSS MiB':>8} {'peak MiB':>9} {'CPU s':>7}   when ready; peak: until the first token",
    ]
    lines += [
        f"{name:<14} {rss_mib:8.1f} {figures['peak_rss_mib'][name]:9.1f} {figures['cpu_s'][name]:7.2f}"
        for name, rss_mib in figures["rss_mib"].items()
    ]
    return "\n".join(lines)


def _launch_once(config: EngineConfig) -> dict[str, Any]:
    begin_s = time.perf_counter()
    with launch_group(config) as group:
        ready_s = time.perf_counter() - begin_s
        pids: Mapping[str, int] = group.ready["pids"]
        rss_mib = {name: rss_bytes(pid) / 2**20 for name, pid in pids.items()}
        cpu_s = {name: cpu_seconds(pid) for name, pid in pids.items()}
        begin_s = time.perf_counter()
        with Client(group.endpoint) as client:
            connect_s = time.perf_counter() - begin_s
            begin_s = time.perf_counter()
            client.generate(_PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))
            first_token_s = time.perf_counter() - begin_s
        peak_rss_mib = {name: peak_rss_bytes(pid) / 2**20 for name, pid in pids.items()}
        begin_s = time.perf_counter()
        group.close()
        close_s = time.perf_counter() - begin_s
    children_s = float(group.ready["ready_s"])
    return {
        "launch_s": ready_s - children_s,
        "children_s": children_s,
        "ready_s": ready_s,
        "connect_s": connect_s,
        "first_token_s": first_token_s,
        "close_s": close_s,
        "rss_mib": rss_mib,
        "peak_rss_mib": peak_rss_mib,
        "cpu_s": cpu_s,
    }


def _medians(runs: Sequence[dict[str, Any]], name: str) -> dict[str, float]:
    return {key: float(np.median([run[name][key] for run in runs])) for key in runs[0][name]}
