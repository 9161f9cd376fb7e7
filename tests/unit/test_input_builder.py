"""From a plan to the bytes a worker reads."""

from __future__ import annotations

import numpy as np
import pytest

from procengine.input_builder import InputBuilder
from procengine.messages import StepInput
from procengine.request import Request, RowSampling
from procengine.scheduler.plan import StepPlan
from procengine.scheduler.scheduler import Scheduler
from procengine.step_payload import SLOT_ROW, STEP_SECTIONS, cut_sections, join_int64
from tests.unit.simulated_worker import Driver, limits

Int32s = np.ndarray[tuple[int], np.dtype[np.int32]]


class Bench:
    """A scheduler and a builder; `step` gives the header and the sections of the next step."""

    def __init__(self, **changes: int | bool) -> None:
        own = limits(**changes)
        self.scheduler = Scheduler(own)
        self.builder = InputBuilder(own.max_num_seqs, own.max_num_batched_tokens)
        self.num_keys = 0

    def add(self, prompt: list[int], max_tokens: int = 20, sampling: RowSampling | None = None) -> Request:
        sampling = sampling or RowSampling(0)
        key, end = self.num_keys, len(prompt) + max_tokens
        request = Request(key, b"", str(key), np.array(prompt, np.int32), end, sampling)
        self.num_keys += 1
        self.scheduler.add(request)
        return request

    def step(self, step_id: int = 0, epoch: int = 0) -> tuple[StepInput, dict[str, Int32s], StepPlan]:
        plan = self.scheduler.schedule()
        assert plan is not None
        header, payload = self.builder.build(plan, self.scheduler.table, step_id=step_id, epoch=epoch)
        sections = {name: part.copy() for name, part in cut_sections(STEP_SECTIONS, header.sizes, payload).items()}
        return header, sections, plan

    def answer(self, plan: StepPlan) -> None:
        slots = plan.sample_slots()
        table = self.scheduler.table
        self.scheduler.apply(slots, table.keys[slots], table.num_tokens[slots], np.full(slots.size, 9, np.int32))


def lists(sections: dict[str, Int32s]) -> dict[str, list[int]]:
    return {name: values.tolist() for name, values in sections.items() if values.size}


def test_prefill_step() -> None:
    bench = Bench(block_size=4)
    bench.add([11, 12, 13, 14, 15])
    bench.add([21, 22])
    header, sections, _ = bench.step(step_id=7, epoch=3)
    slot_rows = sections.pop("slot_rows").reshape(-1, len(SLOT_ROW))
    assert slot_rows[:, 0].tolist() == [0, 1]
    assert lists(sections) == {
        "slots": [0, 1],
        "query_start_loc": [0, 5, 7],
        "seq_lens": [5, 2],
        "sample_rows": [0, 1],
        "input_ids": [11, 12, 13, 14, 15, 21, 22],
        "positions": [0, 1, 2, 3, 4, 0, 1],
        "block_updates": [0, 0, 1, 0, 1, 0, 1, 0, 2],
    }
    assert header == StepInput(7, 3, 2, 0, 7, 2, 1, 5, 5, 0, -1, (2, 3, 2, 2, 0, 7, 7, 28, 9, 0, 0, 0, 0, 0, 0))


def test_decode_step_refers_to_the_slots_for_its_tokens() -> None:
    bench = Bench(block_size=4)
    bench.add([11, 12, 13])
    bench.add([21, 22])
    bench.answer(bench.step()[2])
    header, sections, plan = bench.step()
    assert lists(sections) == {
        "slots": [0, 1],
        "query_start_loc": [0, 1, 2],
        "seq_lens": [4, 3],
        "sample_rows": [0, 1],
        "input_ids": [-1, -2],
        "positions": [3, 2],
    }
    assert (header.num_decode_rows, header.max_query_len, header.max_seq_len) == (2, 1, 4)
    bench.answer(plan)
    _, sections, _ = bench.step()
    assert lists(sections)["block_updates"] == [0, 1, 2], "a block border: slot 0, second entry, next free block"


def test_mixed_step_has_decode_rows_first_and_marks_who_samples() -> None:
    bench = Bench(block_size=4, max_num_batched_tokens=8)
    bench.add([11, 12, 13])
    bench.answer(bench.step()[2])
    bench.add(list(range(20, 30)))
    header, sections, plan = bench.step()
    del sections["slot_rows"], sections["block_updates"]
    assert lists(sections) == {
        "slots": [0, 1],
        "query_start_loc": [0, 1, 8],
        "seq_lens": [4, 7],
        "sample_rows": [0],
        "input_ids": [-1, 20, 21, 22, 23, 24, 25, 26],
        "positions": [3, 0, 1, 2, 3, 4, 5, 6],
    }
    assert (header.num_decode_rows, header.num_samples, header.max_query_len) == (1, 1, 7)
    bench.answer(plan)
    _, sections, _ = bench.step()
    assert sections["input_ids"].tolist() == [-1, 27, 28, 29]
    assert sections["sample_rows"].tolist() == [0, 1]
    assert sections["seq_lens"].tolist() == [5, 10]


def test_several_forward_passes_say_how_many_each_row_takes_part_in() -> None:
    bench = Bench(decode_steps=4)
    bench.add([1, 2], max_tokens=3)
    bench.add([3], max_tokens=10)
    bench.answer(bench.step()[2])
    header, sections, _ = bench.step()
    assert header.decode_steps == 4
    assert sections["row_steps"].tolist() == [2, 4]
    assert sections["seq_lens"].tolist() == [3, 2], "of the first forward pass"


def test_slot_row_carries_the_bits_of_reals_and_wide_integers() -> None:
    bench = Bench()
    bench.num_keys = 2**40 + 3
    bench.add([1], sampling=RowSampling(-(2**63), 0.7, 2**40, 0.9, 0.05, 5, 15))
    header, sections, _ = bench.step()
    row = dict(zip(SLOT_ROW, sections["slot_rows"], strict=True))
    assert join_int64(np.array([row["key_low"], row["key_high"]], np.int32))[0] == 2**40 + 3
    assert join_int64(np.array([row["seed_low"], row["seed_high"]], np.int32))[0] == -(2**63)
    reals = np.array([row["temperature"], row["top_p"], row["min_p"]], np.int32).view(np.float32)
    assert reals.tolist() == np.array([0.7, 0.9, 0.05], np.float32).tolist()
    assert (int(row["top_k"]), int(row["num_logprobs"])) == (2**31 - 1, 5)
    assert (header.features, header.num_logprobs) == (15, 5)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_features_and_logprobs_follow_the_rows_that_are_there(decode_steps: int) -> None:
    bench = Bench(decode_steps=decode_steps)
    bench.add([1], 30)
    header, _, plan = bench.step()
    assert (header.features, header.num_logprobs) == (0, -1)
    bench.answer(plan)
    asks = bench.add([2], 30, RowSampling(0, 0.5, num_logprobs=3, features=1))
    header, _, plan = bench.step()
    assert (header.features, header.num_logprobs) == (1, 3)
    bench.answer(plan)
    header, _, plan = bench.step()
    assert (header.features, header.num_logprobs, header.num_rows) == (1, 3, 2)
    bench.scheduler.finish(asks)
    header, _, _ = bench.step()
    assert (header.features, header.num_logprobs, header.num_rows) == (0, -1, 1)


def test_slot_that_changes_hands_between_two_decode_steps_is_not_mistaken_for_unchanged() -> None:
    bench = Bench(max_num_seqs=1)
    first = bench.add([1], 30)
    bench.answer(bench.step()[2])
    assert bench.step()[0].features == 0
    bench.scheduler.finish(first)
    bench.add([2], 30, RowSampling(0, 0.5, features=1))
    header, _, plan = bench.step()
    assert (header.features, header.num_decode_rows) == (1, 0)
    bench.answer(plan)
    assert bench.step()[0].features == 1


def test_payload_grows_beyond_the_first_buffer() -> None:
    bench = Bench(block_size=1, num_blocks=4000, max_model_len=4000, max_num_batched_tokens=8)
    bench.add(list(range(3000)))
    header, sections, _ = bench.step()
    assert header.num_tokens == 8
    assert sections["block_updates"].size == 9000


def test_header_equals_what_a_worker_checks_in_long_runs() -> None:
    driver = Driver(limits(num_blocks=20, block_size=4), depth=3)
    for seed in range(6):
        driver.add([seed + 1] * (5 + seed), 30)
    driver.run()
    assert driver.num_preemptions > 0
