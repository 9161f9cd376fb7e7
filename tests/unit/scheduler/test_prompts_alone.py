"""Which steps prompts share with rows that decode, where those steps are kept short."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from procengine.request import Request
from tests.unit.simulated_worker import VOCAB, Driver, limits

BUDGET = 16
MIXED = 8


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


class Shares(NamedTuple):
    """What rows that decode, and prompts, have of a step."""

    num_decode_rows: int
    num_prompt_tokens: int


def driver_with_rows(num_rows: int, **changes: Any) -> Driver:
    """So many rows decode, for long."""
    values = {"max_num_batched_tokens": BUDGET, "max_mixed_tokens": MIXED, "max_num_seqs": 8}
    driver = Driver(limits(**(values | changes)), depth=1)
    for row in range(num_rows):
        driver.add(prompt(3, row), 60)
    step(driver)
    return driver


def step(driver: Driver) -> Shares:
    """One more step. A row that decodes takes one token in it; prompts take the others."""
    table = driver.scheduler.table
    decodes = [(r, r.slot) for r in table.requests if r is not None and is_decoding(driver, r)]
    before = {slot: int(table.num_computed[slot]) for _, slot in decodes}
    num_before = int(table.num_computed[table.keys >= 0].sum())
    driver.send()
    num_tokens = int(table.num_computed[table.keys >= 0].sum()) - num_before
    num_rows = sum(int(table.num_computed[slot]) - before[slot] for _, slot in decodes)
    driver.receive()
    return Shares(num_rows, num_tokens - num_rows)


def is_decoding(driver: Driver, request: Request) -> bool:
    return bool(driver.received[request.key].token_ids)


def test_few_prompts_get_every_second_step_for_themselves() -> None:
    driver = driver_with_rows(2)
    for seed, length in enumerate((BUDGET - 5, 5, BUDGET)):
        driver.add(prompt(length, 10 + seed), 9)
    assert [step(driver) for _ in range(4)] == [(0, BUDGET), (4, MIXED), (0, BUDGET - MIXED), (5, 0)]
    driver.run()


def test_rows_that_decode_wait_for_short_pieces_of_more_than_two_steps_hold() -> None:
    driver = driver_with_rows(1)
    driver.add(prompt(2 * BUDGET + 10, 10), 4)
    shares = [step(driver) for _ in range(6)]
    assert shares == [(1, MIXED), (1, MIXED), (0, BUDGET), (1, MIXED), (0, 2), (2, 0)]
    driver.run()


@pytest.mark.parametrize("mixed", [None, BUDGET])
def test_where_mixed_steps_are_as_long_as_others_prompts_go_beside_decode_rows(mixed: int | None) -> None:
    driver = driver_with_rows(2, max_mixed_tokens=mixed)
    driver.add(prompt(BUDGET + 2, 10), 9)
    assert [step(driver) for _ in range(2)] == [(2, BUDGET - 2), (2, 4)]
    driver.run()


def test_whole_prompts_go_beside_decode_rows() -> None:
    driver = driver_with_rows(2, enable_chunked_prefill=False)
    driver.add(prompt(12, 10), 9)
    assert step(driver) == (2, 12)
    driver.run()


def test_nobody_waits_for_a_prompt_that_cannot_begin() -> None:
    driver = driver_with_rows(2, max_num_seqs=2)
    driver.add(prompt(12, 10), 9)
    assert [step(driver) for _ in range(3)] == [(2, 0)] * 3
    driver.run()


def test_nobody_waits_for_a_prompt_that_finds_no_blocks() -> None:
    driver = driver_with_rows(2, block_size=4, num_blocks=18, max_model_len=64)
    driver.add(prompt(61, 10), 2)
    assert [step(driver) for _ in range(3)] == [(2, 0)] * 3
    driver.run()


def test_the_next_step_takes_another_prompt_if_it_is_theirs_alone() -> None:
    driver = driver_with_rows(2)
    driver.add(prompt(MIXED, 10), 9)
    assert driver.scheduler.would_take_another
    step(driver)
    driver.add(prompt(MIXED, 11), 9)
    assert not driver.scheduler.would_take_another  # beside decode rows there is room for this one
    driver.run()
