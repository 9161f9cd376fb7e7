"""The scheduler against a simulated worker that checks every row's context: nothing lost, repeated, shared wrongly."""

from __future__ import annotations

import functools
import itertools
import random
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from procengine.request import Request, RowSampling
from procengine.scheduler.limits import SchedulerLimits
from procengine.scheduler.scheduler import Scheduler
from procengine.workflows.generate import GeneratePlanner
from tests.unit.simulated_worker import VOCAB, Driver, TrueSequences, limits, token_by_position, token_by_prefix

BORDER_LENGTHS = (15, 16, 17, 31, 32, 33, 47, 48, 49)


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def solo_output(prompt_token_ids: list[int], max_tokens: int, seed: int = 0) -> list[int]:
    return list(_solo_output(tuple(prompt_token_ids), max_tokens, seed))


@functools.cache
def _solo_output(prompt_token_ids: tuple[int, ...], max_tokens: int, seed: int) -> list[int]:
    driver = Driver(limits(num_blocks=64), depth=1)
    driver.add(prompt_token_ids, max_tokens, seed=seed)
    driver.run()
    return driver.outputs()[0]


# --- random runs


def random_run(rng: random.Random, driver: Driver, *, num_requests: int, end_share: float = 0.03) -> None:
    """Requests come, are aborted and stopped by text at any time; results come when they come."""
    max_model_len, pool_tokens = driver.scheduler.limits.max_model_len, driver.scheduler.limits.pool_tokens
    longest_prompt = min(max_model_len - 1, pool_tokens, 60)
    shared = [[rng.randrange(VOCAB) for _ in range(longest_prompt)] for _ in range(2)]
    stop_ids = tuple(range(0, VOCAB, 25))
    num_added = 0
    while num_added < num_requests or driver.unfinished:
        action = rng.random()
        if num_added < num_requests and (action < 0.35 or not driver.unfinished):
            length = rng.randint(1, longest_prompt)
            num_shared = rng.choice((0, length // 2, length - 1, length))
            own = [rng.randrange(VOCAB) for _ in range(length - num_shared)]
            driver.add(
                rng.choice(shared)[:num_shared] + own,
                rng.randint(1, 40),
                seed=rng.randrange(3),
                stop_token_ids=rng.choice(((), stop_ids[:3], stop_ids)),
                priority=rng.randint(-1, 1),
                cache_salt=rng.choice((b"", b"", b"salt")),
            )
            num_added += 1
        elif 0.35 <= action < 0.35 + end_share and driver.unfinished:
            driver.end(rng.choice(driver.unfinished), rng.choice(("abort", "text")))
        elif action < 0.70:
            driver.send()
        else:
            has_result = driver.receive()
            assert has_result or driver.send() or not driver.unfinished, "nothing is under way and nothing can go"
    driver.run()


GRID = list(itertools.product((1, 2, 3), (1, 4), (True, False), (True, False), ("tiny", "ample"), (True, False)))


@pytest.mark.parametrize(("depth", "decode_steps", "chunked", "caching", "pool", "priority"), GRID)
def test_random_runs_give_every_request_its_tokens_once(
    depth: int, decode_steps: int, chunked: bool, caching: bool, pool: str, priority: bool
) -> None:
    seed = GRID.index((depth, decode_steps, chunked, caching, pool, priority))
    rng = random.Random(seed)
    block_size = rng.choice((1, 4, 16))
    max_model_len = rng.choice((64, 90))
    num_blocks = -(-rng.choice((24, 48, 70)) // block_size) if pool == "tiny" else 2048 // block_size
    max_num_seqs = rng.choice((1, 3, 8))
    budget = rng.choice((8, 17, 64)) if chunked else max_model_len
    driver = Driver(
        SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(budget, max_num_seqs),
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
            is_priority_policy=priority,
            decode_steps=decode_steps,
            max_mixed_tokens=rng.choice((None, None, 2, 9)),
            max_overtaken_tokens=(0, 30, 4096)[seed % 3],
        ),
        depth=depth,
        rule=rng.choice((token_by_prefix, token_by_position)),
        plans_late=rng.random() < 0.5,
    )
    random_run(rng, driver, num_requests=14)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_order_of_operations_keeps_the_invariants(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from((1, 2, 4)), "block_size")
    driver = Driver(
        limits(
            max_num_seqs=data.draw(st.integers(1, 4), "max_num_seqs"),
            max_num_batched_tokens=data.draw(st.integers(4, 12), "budget"),
            max_model_len=24,
            block_size=block_size,
            num_blocks=data.draw(st.integers(4, 12), "num_blocks"),
            decode_steps=data.draw(st.sampled_from((1, 3)), "decode_steps"),
            max_overtaken_tokens=data.draw(st.sampled_from((0, 10, 4096)), "max_overtaken_tokens"),
        ),
        depth=data.draw(st.integers(1, 3), "depth"),
        plans_late=data.draw(st.booleans(), "plans_late"),
    )
    longest = min(driver.scheduler.limits.pool_tokens, 20)
    for _ in range(data.draw(st.integers(1, 30), "operations")):
        match data.draw(st.sampled_from(["add", "add", "send", "send", "receive", "receive", "end"])):
            case "add":
                tokens = [7] * data.draw(st.integers(0, longest - 1)) + [data.draw(st.integers(0, 2))]
                driver.add(tokens, data.draw(st.integers(1, 9)), stop_token_ids=tuple(range(0, VOCAB, 9)))
            case "send":
                driver.send()
            case "receive":
                driver.receive()
            case "end" if driver.unfinished:
                driver.end(data.draw(st.sampled_from(driver.unfinished)))
    driver.run()


def test_random_runs_over_tiny_pools_do_preempt() -> None:
    counts = []
    for seed in range(6):
        driver = Driver(limits(num_blocks=20, block_size=4, max_model_len=80), depth=1 + seed % 3)
        random_run(random.Random(seed), driver, num_requests=14, end_share=0.01)
        counts.append(driver.num_preemptions)
    assert sum(counts) >= 10, counts


# --- SCH-01


@pytest.mark.parametrize("num_behind", [0, 20])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_sch_01_request_that_outgrows_the_pool_ends_by_length_and_blocks_nobody(
    num_behind: int, depth: int, decode_steps: int
) -> None:
    big_limits = limits(num_blocks=40, max_model_len=2048, max_num_batched_tokens=256, decode_steps=decode_steps)
    driver = Driver(big_limits, depth=depth)
    outgrows = driver.add(prompt(600), 200)
    behind = [driver.add(prompt(5, seed=i), 4) for i in range(num_behind)]
    driver.run()
    assert len(driver.received[outgrows.key].token_ids) == 40
    assert all(len(driver.received[r.key].token_ids) == 4 for r in behind)


def test_sch_01_prompt_that_fills_the_pool_to_the_last_token_still_yields_one() -> None:
    driver = Driver(limits(num_blocks=4, block_size=4, max_model_len=64))
    driver.add(prompt(16), 1)
    driver.add(prompt(15, seed=1), 9)
    driver.run()
    assert [len(tokens) for tokens in driver.outputs()] == [1, 1]


# --- SCH-02, SCH-03


def border_driver(*, depth: int, num_blocks: int, chunked: bool = True, decode_steps: int = 1) -> Driver:
    driver = Driver(
        limits(
            max_num_seqs=24,
            max_num_batched_tokens=48 if chunked else 128,
            max_model_len=128,
            num_blocks=num_blocks,
            enable_chunked_prefill=chunked,
            decode_steps=decode_steps,
        ),
        depth=depth,
    )
    for i in range(24):
        length = BORDER_LENGTHS[i % len(BORDER_LENGTHS)]
        driver.add(prompt(49, seed=i % 3)[:length], 40, seed=i % 2)
    driver.run()
    return driver


@pytest.mark.parametrize("decode_steps", [1, 4])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_sch_02_outputs_survive_preemption_and_cache_hits_at_block_borders(depth: int, decode_steps: int) -> None:
    driver = border_driver(depth=depth, num_blocks=26, decode_steps=decode_steps)
    assert driver.num_preemptions > 0
    assert driver.scheduler.counters.prefix_hit_tokens > 0
    for i, tokens in enumerate(driver.outputs()):
        assert len(tokens) == 40
        assert tokens == solo_output(prompt(49, seed=i % 3)[: BORDER_LENGTHS[i % len(BORDER_LENGTHS)]], 40, seed=i % 2)


@pytest.mark.parametrize("chunked", [True, False])
def test_sch_03_async_scheduling_loses_and_repeats_nothing_and_preempts_at_most_twice_as_often(chunked: bool) -> None:
    synchronous = border_driver(depth=1, num_blocks=26, chunked=chunked)
    asynchronous = border_driver(depth=2, num_blocks=26, chunked=chunked)
    assert asynchronous.outputs() == synchronous.outputs()
    assert all(len(tokens) == 40 for tokens in asynchronous.outputs())
    assert all(r.request.num_in_flight == 0 for r in asynchronous.received.values())
    assert 0 < asynchronous.num_preemptions <= 2 * synchronous.num_preemptions


# --- SCH-05, SCH-06


@pytest.mark.parametrize("length", [n + d for n in (16, 32, 48, 64) for d in (-1, 0, 1)])
def test_sch_05_prompt_that_is_wholly_cached_gives_the_same_and_computes_at_least_one_token(length: int) -> None:
    driver = Driver(limits())
    for _ in range(3):
        driver.add(prompt(length), 16)
        driver.run()
    for _ in range(3):
        driver.add(prompt(length), 16)
    driver.run()
    assert driver.outputs() == [solo_output(prompt(length), 16)] * 6
    cached = [r.request.num_cached_tokens for r in driver.received.values()]
    assert cached == [0] + [(length - 1) // 16 * 16] * 5


def test_sch_06_equal_prompts_of_one_batch_equal_the_solo_run() -> None:
    driver = Driver(limits(max_num_batched_tokens=2048, max_model_len=512))
    for _ in range(3):
        driver.add(prompt(300), 8)
    driver.run()
    assert driver.outputs() == [driver.outputs()[0]] * 3
    assert driver.worker.headers[0].num_rows == 3, "they share blocks in the very step that fills them"


def test_sch_06_prompt_and_its_extension_together_with_chunked_prefill() -> None:
    driver = Driver(limits(max_num_batched_tokens=64, max_model_len=512))
    driver.add(prompt(300), 8)
    driver.add([*prompt(300), 1, 2, 3], 8)
    driver.run()
    assert driver.worker.num_computed_by_key == {0: 300 + 7, 1: 303 - 288 + 7}


# --- prefix computed once


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [16, 24, 40])
def test_prefix_that_another_request_is_computing_is_computed_once(depth: int, budget: int) -> None:
    driver = Driver(limits(max_num_batched_tokens=budget), depth=depth)
    for seed in range(6):
        driver.add(prompt(160) + prompt(4, seed=seed + 1), 1)
    driver.run()
    assert driver.worker.num_computed_tokens == 160 + 6 * 4


def test_salted_requests_do_not_share_or_wait() -> None:
    driver = Driver(limits(max_num_batched_tokens=128))
    driver.add(prompt(64), 1, cache_salt=b"a")
    driver.add(prompt(64), 1, cache_salt=b"b")
    driver.run()
    assert driver.worker.num_computed_tokens == 128
    assert driver.worker.headers[0].num_rows == 2


def test_prefix_of_equal_output_is_found_again_after_the_end() -> None:
    driver = Driver(limits(block_size=4))
    first = driver.add(prompt(6), 20)
    driver.run()
    again = prompt(6) + driver.received[first.key].token_ids
    follow_up = driver.add(again, 1)
    driver.run()
    # 26 tokens, of which the last was never fed back: 24 are in full blocks whose KV entries exist.
    assert follow_up.num_cached_tokens == 24


@pytest.mark.parametrize("depth", [1, 2])
def test_requests_that_wait_for_an_aborted_ones_prefix_go_on_from_what_it_left(depth: int) -> None:
    driver = Driver(limits(max_num_batched_tokens=32), depth=depth)
    computing, second, third = (driver.add(prompt(150), 3) for _ in range(3))
    driver.send()
    assert computing.slot >= 0
    assert second.slot == third.slot == -1
    driver.end(computing)
    driver.run()
    assert len(driver.received[second.key].token_ids) == len(driver.received[third.key].token_ids) == 3
    computed = driver.worker.num_computed_by_key
    # What the aborted one left is used, the rest is computed by one of the others, the last block by both.
    assert computed[computing.key] + computed[second.key] + computed[third.key] == 150 + (150 - 144) + 2 * 2


def test_abort_of_a_request_that_waits_for_anothers_prefix_leaves_nothing_behind() -> None:
    driver = Driver(limits(max_num_batched_tokens=32))
    driver.add(prompt(150), 3)
    second = driver.add(prompt(150), 3)
    driver.send()
    driver.end(second)
    assert len(driver.scheduler.waiting) == 0
    driver.run()
    assert second.key not in driver.worker.num_computed_by_key


def test_preempted_prefill_goes_on_and_its_twin_too() -> None:
    # The old request grows, until the prompt that is being computed has to go; its twin waits for it.
    driver = Driver(limits(block_size=4, num_blocks=16, max_num_batched_tokens=3, max_num_seqs=3), depth=1)
    driver.add(prompt(20, seed=1), 40)
    while driver.scheduler.would_prefill:
        driver.send()
        driver.receive()
    computing, twin = driver.add(prompt(34), 2), driver.add(prompt(34), 2)
    while not driver.num_preemptions:
        assert computing.slot < 0 or twin.slot < 0
        driver.send()
        driver.receive()
    assert computing.num_preemptions == 1
    driver.run()
    assert driver.outputs()[1] == driver.outputs()[2]


# --- order of service


def test_fcfs_starts_requests_in_order_of_arrival_and_ignores_priority() -> None:
    driver = Driver(limits(max_num_seqs=2, max_num_batched_tokens=16))
    for i in range(6):
        driver.add(prompt(10, seed=i), 5, priority=-i)
    driver.run()
    assert driver.started == list(range(6))


def test_priority_policy_starts_smaller_values_first_and_equal_ones_in_order_of_arrival() -> None:
    driver = Driver(limits(max_num_seqs=1, is_priority_policy=True))
    for i, priority in enumerate((0, 2, -1, 2, -1)):
        driver.add(prompt(10, seed=i), 3, priority=priority)
    driver.run()
    assert driver.started == [2, 4, 0, 1, 3]


@pytest.mark.parametrize(("is_priority", "victim"), [(False, 1), (True, 0)])
def test_preemption_takes_the_request_that_is_served_last(is_priority: bool, victim: int) -> None:
    driver = Driver(limits(block_size=4, num_blocks=8, is_priority_policy=is_priority))
    requests = [driver.add(prompt(8, seed=0), 16, priority=5), driver.add(prompt(8, seed=1), 16, priority=1)]
    driver.run()
    assert requests[victim].num_preemptions > 0
    assert requests[1 - victim].num_preemptions == 0


def test_preempted_request_goes_on_before_younger_ones() -> None:
    driver = Driver(limits(block_size=4, num_blocks=8, max_num_seqs=2))
    driver.add(prompt(8, seed=0), 16)
    driver.add(prompt(8, seed=1), 16)
    driver.add(prompt(4, seed=2), 2)
    driver.run()
    assert driver.started[:2] == [0, 1]
    assert driver.num_preemptions > 0
    assert driver.started[-1] == 2


def test_request_that_does_not_fit_yet_is_not_overtaken() -> None:
    driver = Driver(limits(block_size=4, num_blocks=12))
    driver.add(prompt(20), 12)
    driver.add(prompt(40, seed=1), 2)  # waits for the first one's blocks
    driver.add(prompt(2, seed=2), 2)  # would fit at once
    driver.run()
    assert driver.started == [0, 1, 2]


# --- what a step costs


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("decode_steps", [1, 4])
def test_end_by_length_wastes_no_forward_pass(depth: int, decode_steps: int) -> None:
    driver = Driver(limits(decode_steps=decode_steps, max_num_batched_tokens=256), depth=depth)
    for max_tokens in (1, 2, 7, 9):
        driver.add(prompt(10, seed=max_tokens), max_tokens)
    driver.run()
    assert driver.worker.num_computed_by_key == {0: 10, 1: 11, 2: 16, 3: 18}
    assert driver.num_results == 9, "as many forward passes as the longest output has tokens"


def test_end_by_stop_token_wastes_at_most_the_steps_in_flight() -> None:
    driver = Driver(limits(), depth=3)
    output = solo_output(prompt(10), 40)
    driver.add(prompt(10), 40, stop_token_ids=(output[20],))
    driver.run()
    num_tokens = output.index(output[20]) + 1
    assert driver.worker.num_computed_by_key[0] <= 10 + num_tokens - 1 + 2


@pytest.mark.parametrize(("depth", "decode_steps"), [(1, 1), (2, 1), (3, 1), (2, 4)])
def test_stop_token_at_the_last_position_is_a_stop(depth: int, decode_steps: int) -> None:
    driver = Driver(limits(decode_steps=decode_steps), depth=depth)
    output = solo_output(prompt(10), 6)
    driver.add(prompt(10), 6, stop_token_ids=(output[5],))
    driver.run()
    assert driver.received[0].finish_reason == "stop"
    assert driver.outputs() == [output]


def test_steps_run_ahead_while_rows_decode_and_not_while_a_prompt_waits() -> None:
    driver = Driver(limits(max_num_batched_tokens=16), depth=3)
    driver.add(prompt(10), 30)
    assert driver.send() == 3, "the prompt's step, and behind it steps whose tokens are not known yet"
    driver.add(prompt(10, seed=1), 30)
    driver.receive()
    assert driver.send() == 0
    driver.receive()
    assert driver.send() == 0
    driver.receive()
    assert driver.send() == 3
    driver.run()


def test_steps_that_known_prompts_fill_are_sent_ahead() -> None:
    driver = Driver(limits(max_num_batched_tokens=16), depth=3)
    driver.add(prompt(50), 2)
    driver.add(prompt(10, seed=1), 2)
    assert driver.send() == 3, "48 of 60 tokens"
    driver.receive()
    assert driver.send() == 0, "the last 12 wait for company"
    driver.add(prompt(20, seed=2), 2)
    assert driver.send() == 1, "which is here"
    driver.run()


def test_prompt_that_arrives_while_one_is_in_flight_joins_the_next_step() -> None:
    driver = Driver(limits(max_num_batched_tokens=16), depth=2)
    driver.add(prompt(20), 2)
    assert driver.send() == 1
    driver.add(prompt(3, seed=1), 2)
    driver.receive()
    driver.send()
    driver.receive()
    driver.send()
    assert driver.started == [0, 1]
    assert driver.worker.headers[1].num_rows == 2
    driver.run()


def test_several_forward_passes_a_step_only_while_no_prompt_waits() -> None:
    driver = Driver(limits(decode_steps=4, max_num_batched_tokens=16), depth=1)
    driver.add(prompt(10), 30)
    driver.add(prompt(30, seed=1), 20)
    driver.run()
    passes = [header.decode_steps for header in driver.worker.headers]
    assert passes[:3] == [1, 1, 1]
    assert passes[3] == 4


@pytest.mark.parametrize("ended_by", ["abort", "stop token"])
def test_results_under_way_for_a_slot_that_changed_hands_are_dropped(ended_by: str) -> None:
    driver = Driver(limits(max_num_seqs=1), depth=3, plans_late=False)
    output = solo_output(prompt(10), 9)
    first = driver.add(prompt(10), 30, stop_token_ids=(output[2],) if ended_by == "stop token" else ())
    second = driver.add(prompt(10, seed=1), 5)
    while first.slot < 0 or driver.scheduler.table.num_tokens[first.slot] < 12:
        driver.send()
        driver.receive()
    driver.send()
    if ended_by == "abort":
        driver.end(first)
    driver.receive()
    driver.send()
    assert second.slot == 0
    assert driver.pipeline.num_in_flight == 3, "and two of them are the first one's"
    driver.run()
    assert len(driver.received[second.key].token_ids) == 5


def test_max_num_seqs_of_one_runs_requests_one_after_the_other() -> None:
    driver = Driver(limits(max_num_seqs=1), depth=3)
    for i in range(5):
        driver.add(prompt(10, seed=i), 5, stop_token_ids=tuple(range(0, VOCAB, 7)))
    driver.run()
    assert all(header.num_rows == 1 for header in driver.worker.headers)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_pool_of_exactly_one_request_serves_many(depth: int) -> None:
    driver = Driver(limits(block_size=1, num_blocks=12, max_model_len=13), depth=depth)
    for i in range(5):
        driver.add(prompt(4, seed=i), 9)
    driver.run()
    assert [len(tokens) for tokens in driver.outputs()] == [8] * 5


def test_request_that_finishes_while_preempted_takes_its_owed_tokens_and_frees_its_place() -> None:
    driver = Driver(limits(block_size=4, num_blocks=6, max_num_seqs=2), depth=3)
    driver.add(prompt(8, seed=0), 12)
    second = driver.add(prompt(8, seed=1), 5)
    owed: list[int] = []
    while driver.unfinished:
        driver.send()
        if second.slot < 0 and not second.is_finished and second.num_preemptions:
            owed.append(second.num_in_flight)
        driver.receive()
    assert owed[:1] > [0], "it was preempted with tokens under way"
    driver.run()
    assert driver.started == [0, 1], "and never started again"
    assert len(driver.received[second.key].token_ids) == 5


def test_abort_of_a_preempted_request_drops_what_it_is_owed() -> None:
    driver = Driver(limits(block_size=4, num_blocks=7, max_num_seqs=2), depth=3)
    driver.add(prompt(8, seed=0), 12)
    second = driver.add(prompt(8, seed=1), 9)
    while not second.num_in_flight:
        driver.send()
        if not second.num_in_flight:
            driver.receive()
    driver.end(second)
    driver.run()
    assert not second.num_cached_tokens
    assert driver.planner.num_unfinished == 0


@pytest.mark.parametrize(
    ("changes", "num_decode_rows", "most"),
    [
        ({}, 0, 64),
        ({}, 10, 54),
        ({"max_mixed_tokens": 20}, 0, 64),  # nobody waits for it
        ({"max_mixed_tokens": 20}, 1, 20),
        ({"max_mixed_tokens": 20}, 44, 20),
        ({"max_mixed_tokens": 20}, 60, 4),
        ({"max_mixed_tokens": 20, "enable_chunked_prefill": False}, 15, 49),  # a whole prompt might never fit
    ],
)
def test_prompts_beside_decode_rows_are_short(changes: dict[str, Any], num_decode_rows: int, most: int) -> None:
    assert limits(**changes).prompt_tokens_beside(num_decode_rows) == most


def test_would_prefill_is_false_while_the_next_request_waits_for_its_own_tokens() -> None:
    driver = Driver(limits(block_size=4, num_blocks=7, max_num_seqs=2), depth=3)
    driver.add(prompt(8, seed=0), 12)
    second = driver.add(prompt(8, seed=1), 9)
    while not second.num_in_flight:
        driver.send()
        if not second.num_in_flight:
            driver.receive()
    assert not driver.scheduler.would_prefill
    driver.run()


def test_history_is_the_confirmed_tokens_wherever_the_request_is() -> None:
    driver = Driver(limits(), depth=2)
    request = driver.add(prompt(5), 6)
    assert driver.planner.history(request).tolist() == prompt(5)
    driver.send()
    driver.receive()
    driver.receive()
    assert driver.planner.history(request).tolist() == driver.truth.first(request.key, 7).tolist()
    driver.run()


def count_calls(action: Any) -> int:
    calls = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def calls_of_a_steady_step(num_rows: int, decode_steps: int) -> int:
    step_limits = limits(
        max_num_seqs=num_rows,
        max_num_batched_tokens=4 * num_rows,
        num_blocks=2 * num_rows,
        decode_steps=decode_steps,
        block_size=64,
    )
    driver = Driver(step_limits, depth=1, rule=token_by_position)
    for i in range(num_rows):
        driver.add([i % VOCAB, 1, 2, 3], 40)
    for _ in range(3):
        driver.send()
        while driver.receive():
            pass
    step: list[Any] = []

    def plan() -> None:
        step.append(driver.pipeline.next_step())

    calls = count_calls(plan)
    assert step[0].is_steady
    assert step[0].header.num_rows == num_rows
    for frames in list(driver.worker.run(*_encoded(step[0]))):
        calls += count_calls(lambda frames=frames: driver.pipeline.apply(*_decoded(frames)))
    return calls


def _encoded(step: Any) -> tuple[bytes, bytes]:
    from procengine.messages import encode

    return encode(step.header), step.payload.tobytes()


def _decoded(frames: tuple[bytes, bytes]) -> tuple[Any, Any]:
    from procengine.messages import decode_from_worker

    return decode_from_worker(frames[0]), np.frombuffer(frames[1], np.int32)


@pytest.mark.parametrize("decode_steps", [1, 4])
def test_steady_step_makes_as_many_python_calls_for_256_rows_as_for_8(decode_steps: int) -> None:
    assert calls_of_a_steady_step(256, decode_steps) == calls_of_a_steady_step(8, decode_steps)


def test_counters_add_up() -> None:
    driver = Driver(limits())
    for _ in range(2):
        driver.add(prompt(40), 5)
    driver.run()
    counters = driver.scheduler.counters
    assert (counters.prompt_tokens, counters.prefix_hit_tokens, counters.output_tokens) == (80, 32, 10)
    counters.reset()
    assert (counters.prompt_tokens, counters.prefix_hit_tokens, counters.num_preemptions) == (0, 0, 0)


def test_cached_tokens_of_a_new_request_are_counted_before_it_starts() -> None:
    driver = Driver(limits())
    driver.add(prompt(40), 1)
    driver.run()
    request = Request(99, b"", "99", np.array(prompt(40), np.int32), 41, RowSampling(0))
    assert driver.planner.count_cached_tokens(request) == 32
    assert GeneratePlanner(limits(enable_prefix_caching=False)).count_cached_tokens(request) == 0


def test_skipped_token_is_our_own_bug_and_asserts() -> None:
    scheduler = Scheduler(limits())
    truth = TrueSequences(token_by_prefix)
    truth.add(0, np.array([1, 2], np.int32), 0)
    scheduler.add(Request(0, b"", "0", np.array([1, 2], np.int32), 9, RowSampling(0)))
    plan = scheduler.schedule()
    assert plan is not None
    slots = plan.sample_slots()
    with pytest.raises(AssertionError, match="skipped or repeated"):
        scheduler.apply(slots, np.array([0]), np.array([3], np.int32), np.array([5], np.int32))
