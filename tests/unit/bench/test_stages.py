"""The stages of a step without a model: every stage is timed for every step, and does what it does in a group."""

from __future__ import annotations

import pytest

from procengine.bench.ipc import table
from procengine.bench.stages import STAGES, time_stages, tiny_tokenizer
from procengine.messages import StepInput, StepResult, decode_from_worker, decode_step


@pytest.mark.parametrize(("batch_size", "input_len"), [(1, 1), (5, 20)])
def test_each_step_gives_a_sample_of_each_stage(batch_size: int, input_len: int) -> None:
    times = time_stages(batch_size, 7, input_len, tiny_tokenizer())
    assert {stage: samples.shape for stage, samples in times.samples_ns.items()} == dict.fromkeys(STAGES, (7,))
    assert all((samples > 0).all() for samples in times.samples_ns.values())


def test_frames_are_those_of_a_step_of_decode_rows() -> None:
    times = time_stages(4, 2, 8, tiny_tokenizer())
    step, result = decode_step(times.step_frames[0]), decode_from_worker(times.result_frames[0])
    assert isinstance(step, StepInput) and isinstance(result, StepResult)
    assert step.num_rows == step.num_decode_rows == result.num_rows == 4
    assert sum(step.sizes) * 4 == len(times.step_frames[1]) and sum(result.sizes) * 4 == len(times.result_frames[1])
    assert step.step_id == result.step_id


def test_tiny_tokenizer_spells_bytes() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.vocab_size == 256
    assert tokenizer.decode(tokenizer.encode("aü b")) == "aü b"


def test_table_has_a_column_a_size() -> None:
    cell = {"p50": 1.0, "p90": 2.0, "p99": 3.5}
    us = {stage: {"1": cell, "64": cell} for stage in (*STAGES, "hop_step")}
    lines = table({"us": us, "num_bytes": {"step": {"1": 10, "64": 2000}}}).splitlines()
    assert lines[0].split() == ["us:", "p50", "/", "p90", "/", "p99", "1", "rows", "64", "rows"]
    assert lines[1].split() == ["schedule", *["1.0", "/", "2.0", "/", "3.5"] * 2]
    assert ["bytes", "of", "a", "step", "10", "2,000"] in [line.split() for line in lines]
