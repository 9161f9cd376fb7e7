"""Stages of steps and requests of a real model: they add up, and a trace of them is valid."""

from __future__ import annotations

import numpy as np
import pytest

from procengine import SamplingParams
from procengine.groups import find_group
from procengine.profiling.capture import Joined, join_capture
from procengine.profiling.chrome_trace import encode_trace
from procengine.profiling.recording import Recording
from procengine.profiling.steps import worker_times
from procengine.profiling.summary import summarize
from tests.e2e.running_group import RunningGroup
from tests.procs.harness import wait_until
from tests.unit.profiling.trace_reader import bubble_share, check_trace, load_slices, read_trace

pytestmark = pytest.mark.model

OUTPUT_LEN = 24
PROMPTS = ["The capital of France is", "One, two, three,", "Once upon a time"]


def test_parts_add_up(smollm2: RunningGroup) -> None:
    recording = Recording(find_group(smollm2.endpoint))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    outputs = smollm2.generate(PROMPTS, params, cache_salt=smollm2.new_salt())

    def everything_is_written() -> Joined | None:
        joined = join_capture(recording.stop())
        return joined if len(joined.requests) == len(PROMPTS) else None

    joined = wait_until(everything_is_written, "a record of each request's end")
    assert joined is not None and joined.capture.tables.num_lost == 0
    for output in outputs:
        (row,) = np.flatnonzero([request_id == output.request_id for request_id in joined.requests.ids])
        assert output.metrics is not None
        assert joined.requests.stages_ns[row].sum() == joined.requests.e2e_ns[row]
        seen_ms = output.metrics.e2e_ms - output.metrics.deliver_ms
        assert joined.requests.stages_ns[row, :6].sum() / 1e6 == pytest.approx(seen_ms, rel=0.02)
    (worker,) = worker_times(joined.passes)
    assert worker.unknown_ns == 0 and worker.busy_ns + worker.idle_ns == worker.total_ns
    assert len(joined.passes) >= OUTPUT_LEN
    assert worker.forward_ns > worker.stage_ns > 0 and worker.sample_ns > 0
    assert joined.bubbles.durations_ns.sum() == worker.idle_ns
    events = read_trace(encode_trace(joined))
    check_trace(events)
    assert bubble_share(load_slices(events)) == pytest.approx(summarize(joined)["bubble_share"], abs=1e-9)
