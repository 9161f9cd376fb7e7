"""Layers with a sliding window: what falls out of it is free again, and nobody misses it. The simulated worker checks
for each group of layers that all a query sees is there; `check_integrity` that nothing is lost."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from procengine.kv_cache.block_groups import BlockGroups
from procengine.scheduler.limits import SchedulerLimits
from tests.unit.scheduler.test_requests_that_wait import random_run
from tests.unit.simulated_worker import VOCAB, Driver, limits, token_of_few

Windows = tuple[int | None, ...]

HYBRID: Windows = (None, 40, 40)
ALL_SLIDING: Windows = (40,)


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def smallest_pool(num_tokens: int, **fields: Any) -> SchedulerLimits:
    """With as many blocks as one request of so many tokens needs."""
    num_blocks = 1
    while (found := SchedulerLimits(**fields, num_blocks=num_blocks)).pool_tokens < num_tokens:
        num_blocks += 1
    return found


# --- random runs


@pytest.mark.parametrize("seed", range(40))
def test_random_runs_give_every_request_its_tokens_once(seed: int) -> None:
    random_windows(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(1000, 2000, 100))
def test_many_random_runs(first_seed: int) -> None:
    drivers = [random_windows(seed) for seed in range(first_seed, first_seed + 100)]
    assert sum(driver.num_preemptions for driver in drivers) > 5
    assert sum(driver.scheduler.counters.prefix_hit_tokens for driver in drivers) > 1000


def random_windows(seed: int) -> Driver:
    rng = random.Random(seed)
    max_num_seqs, is_chunked = rng.choice((1, 3, 8)), rng.random() < 0.8
    fields: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(rng.choice((4, 9, 64)), max_num_seqs) if is_chunked else 80,
        "max_model_len": 80,
        "block_size": rng.choice((1, 4, 16)),
        "enable_chunked_prefill": is_chunked,
        "enable_prefix_caching": rng.random() < 0.7,
        "is_priority_policy": rng.random() < 0.5,
        "decode_steps": rng.choice((1, 4)),
        "num_speculative_tokens": rng.choice((0, 0, 1, 4)),
        "max_overtaken_tokens": (0, 30, 4096)[seed % 3],
        "windows": rng.choice(((5,), (None, 7), (None, 6, 6), (3, 9), (1,), (None, None, 17))),
    }
    own = smallest_pool(rng.choice((30, 48, 70, 80)), **fields)
    own = SchedulerLimits(**fields, num_blocks=own.num_blocks * rng.choice((1, 1, 1, 2, 10)))
    driver = Driver(own, depth=rng.choice((1, 2, 3)), rule=token_of_few, plans_late=rng.random() < 0.5)
    kinds = ("plain", "plain", "grammar", "penalties", "min_tokens", "prompt_logprobs")
    random_run(rng, driver, 14, rng.choice((("plain",), kinds)))
    return driver


# --- what is held


@pytest.mark.parametrize("windows", [HYBRID, ALL_SLIDING, (None, 1), (None,)])
@pytest.mark.parametrize("chunk", [8, 64])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_long_sequence_holds_its_windows_and_no_more(windows: Windows, chunk: int, depth: int) -> None:
    own = limits(windows=windows, block_size=4, max_num_batched_tokens=chunk, max_model_len=600, num_blocks=600)
    driver, groups = Driver(own, depth=depth), BlockGroups(windows, 4)
    driver.add(prompt(300), 250)
    most = 0
    while driver.unfinished:
        driver.send()
        num_computed = int(driver.scheduler.table.num_computed[0])
        num_used = driver.scheduler.pool.num_used
        is_decoding = num_computed > 300 + depth + 4  # what the last chunk held goes with the first block it needs
        num_queries = depth if is_decoding else chunk
        allowed = groups.most_blocks(num_computed + num_queries, num_queries)
        assert num_used <= allowed if windows != (None,) else num_used >= num_computed // 4
        most = max(most, num_used)
        driver.receive()
    driver.check_end()
    whole, sliding = -(-550 // 4), -(-(40 + chunk) // 4) + 3
    assert most <= sum(whole if window is None else sliding for window in windows)
    assert most >= sum(-(-min(window or 550, 550) // 4) for window in windows)


def test_rows_of_a_full_pool_go_on_as_their_windows_pass() -> None:
    """Four rows in the blocks of four windows: without letting go, they would need six times as many."""
    own = limits(windows=(16,), block_size=4, num_blocks=4 * 7, max_num_seqs=4, max_model_len=200)
    driver = Driver(own)
    for seed in range(4):
        driver.add(prompt(10, seed), 150)
    driver.run()
    assert driver.num_preemptions == 0
    assert max(header.num_decode_rows for header in driver.worker.headers) == 4


def test_a_pool_too_small_for_the_whole_sequence_takes_what_its_windows_allow() -> None:
    wide = limits(windows=(None, 16), block_size=4, num_blocks=30, max_model_len=4096)
    assert wide.pool_tokens == 4 * (30 - 6)  # one table grows, the other holds a window, an edge and a block more
    narrow = limits(windows=(16,), block_size=4, num_blocks=6, max_model_len=4096)
    assert narrow.pool_tokens == 4096
    assert limits(windows=(16,), block_size=4, num_blocks=5, max_model_len=4096).pool_tokens == 4 * 5
    driver = Driver(wide)
    driver.add(prompt(80), 40)
    driver.run()
    assert driver.received[0].request.end_position == wide.pool_tokens


# --- prefixes


def run_twice(driver: Driver, first: list[int], second: list[int]) -> int:
    """Tokens of `second` that are found after `first` has ended."""
    driver.add(first, 4)
    driver.run()
    request = driver.add(second, 4)
    driver.run()
    assert request.num_cached_tokens is not None
    return request.num_cached_tokens


@pytest.mark.parametrize("windows", [HYBRID, ALL_SLIDING])
@pytest.mark.parametrize(("shared", "hit"), [(0, 0), (8, 8), (61, 60), (100, 100), (199, 196)])
def test_a_prefix_is_found_by_the_last_blocks_of_its_window(windows: Windows, shared: int, hit: int) -> None:
    driver = Driver(limits(windows=windows, block_size=4, num_blocks=400, max_model_len=300))
    assert run_twice(driver, prompt(200), prompt(200)[:shared] + prompt(30, seed=1)) == hit


@pytest.mark.parametrize("windows", [HYBRID, ALL_SLIDING])
def test_a_prefix_whose_window_is_gone_is_not_found(windows: Windows) -> None:
    """What fell out of the window was the first to be given to others; what the sequence held at its end is there."""
    driver = Driver(limits(windows=windows, block_size=4, num_blocks=70 * len(windows), max_model_len=300))
    driver.add(prompt(200), 4)
    driver.run()
    other = driver.add(prompt(150, seed=1), 4)
    driver.run()
    assert other.num_cached_tokens == 0
    early = driver.add(prompt(200)[:80] + prompt(20, seed=2), 1)
    driver.run()
    assert early.num_cached_tokens == 0
    driver = Driver(limits(windows=windows, block_size=4, num_blocks=70 * len(windows), max_model_len=300))
    assert run_twice(driver, prompt(200), prompt(200) + prompt(5, seed=1)) == 200


@pytest.mark.parametrize("num_tokens", range(60, 80))
@pytest.mark.parametrize("depth", [1, 3])
def test_the_next_turn_of_a_chat_finds_the_answer(num_tokens: int, depth: int) -> None:
    """An answer longer than the window, ended by a stop token while more steps were under way."""
    driver = Driver(limits(windows=HYBRID, block_size=4, num_blocks=400), depth=depth)
    probe = driver.add(prompt(10), num_tokens)
    driver.run()
    answer = driver.received[probe.key].token_ids
    stop = next(at for at in range(len(answer) - 1, 0, -1) if answer[at] not in answer[:at])
    driver = Driver(limits(windows=HYBRID, block_size=4, num_blocks=400), depth=depth)
    driver.add(prompt(10), 200, stop_token_ids=(answer[stop],))
    driver.run()
    history = prompt(10) + driver.received[0].token_ids
    turn = driver.add(history + prompt(9, seed=1), 1)
    driver.run()
    assert turn.num_cached_tokens in (
        len(history) // 4 * 4,
        (len(history) - 1) // 4 * 4,
    )  # or its last token was not computed


def test_groups_do_not_share_blocks_of_the_same_tokens() -> None:
    driver = Driver(limits(windows=(None, 40), block_size=4, num_blocks=100))
    assert run_twice(driver, prompt(32), prompt(33)) == 32  # the worker has compared who wrote each block
