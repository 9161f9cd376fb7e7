"""The prompts of a comparison: the same for every engine, and nobody's cache knows their beginnings."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.bench.peers.loads import (
    WORKLOADS,
    Load,
    PromptSource,
    make_load,
    select_workloads,
    warmup_load,
)
from procengine.errors import ConfigError

TEXT = np.random.default_rng(0).integers(0, 500, 60_000).astype(np.int32)


def runs_of_all(seed: int = 0) -> dict[str, list[Load]]:
    source = PromptSource(TEXT, seed)
    return {name: [make_load(workload, source, run) for run in range(3)] for name, workload in WORKLOADS.items()}


def test_same_seed_gives_the_same_prompts_and_another_gives_others() -> None:
    first, again, other = ({n: [r.prompts for r in runs] for n, runs in runs_of_all(s).items()} for s in (1, 1, 2))
    assert first == again
    assert all(first[name] != other[name] for name in WORKLOADS)


def test_work_loads_have_the_lengths_that_they_say() -> None:
    for name, runs in runs_of_all().items():
        workload = WORKLOADS[name]
        for run in runs:
            assert [len(p) for p in run.prompts] == [workload.prefix_len + n for n in workload.input_lens]
            assert run.output_len == workload.output_len
    assert [len(WORKLOADS[name].input_lens) for name in ("w1", "w2", "w3", "w4", "w5")] == [1, 64, 8, 32, 64]
    lens = WORKLOADS["w2"].input_lens
    assert min(lens) >= 32 and max(lens) <= 256 and len(set(lens)) > 30


def test_no_two_prompts_begin_alike_but_those_that_share_a_prefix() -> None:
    """Over all runs: the beginning is shorter than any block that an engine could share."""
    beginnings = []
    for name, runs in runs_of_all().items():
        for run in runs:
            own_at = WORKLOADS[name].prefix_len
            prefixes = {tuple(prompt[:own_at]) for prompt in run.prompts}
            assert len(prefixes) == 1, "a run has one prefix, or none"
            beginnings += [tuple(prompt[own_at : own_at + 16]) for prompt in run.prompts]
            beginnings += [prefix[:16] for prefix in prefixes if prefix]
    assert len(set(beginnings)) == len(beginnings)


def test_text_that_repeats_itself_is_used_once() -> None:
    source = PromptSource(np.tile(np.arange(20, dtype=np.int32), 100), 0)
    taken = [tuple(source.take(16)) for _ in range(20)]
    assert len(set(taken)) == 20
    with pytest.raises(ConfigError, match="no more beginnings"):
        source.take(16)


def test_text_that_is_too_short_is_an_error() -> None:
    with pytest.raises(ConfigError, match="1024 tokens was asked for, the text has 1000"):
        PromptSource(TEXT[:1000], 0).take(1024)


def test_poisson_arrivals_differ_by_run_and_have_the_rate() -> None:
    first, second, third = runs_of_all()["w5-poisson"]
    for run in (first, second, third):
        assert run.arrivals_s is not None and run.max_concurrency is None
        assert 2 < len(run.prompts) / run.arrivals_s[-1] < 8
    assert first.arrivals_s is not None and second.arrivals_s is not None
    assert not np.array_equal(first.arrivals_s, second.arrivals_s)


def test_warm_up_touches_short_and_long_prompts() -> None:
    load = warmup_load(PromptSource(TEXT, 0), is_streaming=True)
    assert load.is_streaming and {16, 1024} <= {len(prompt) for prompt in load.prompts}


def test_unknown_work_load_is_named() -> None:
    assert [one.name for one in select_workloads(["w3", "w1"])] == ["w3", "w1"]
    with pytest.raises(ConfigError, match="'w9' is none of w1, w2"):
        select_workloads(["w1", "w9"])
