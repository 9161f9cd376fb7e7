"""Whose prompt goes on next: short ones may pass longer ones that came a little earlier, and nobody waits for ever."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from procengine.request import NO_SLOT, Request, RowSampling
from procengine.scheduler.scheduler import Scheduler
from tests.unit.simulated_worker import VOCAB, Driver, limits

MOST = 4096


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def driver_of(*, depth: int = 1, **changes: Any) -> Driver:
    values: dict[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "max_overtaken_tokens": MOST}
    return Driver(limits(**(values | changes)), depth=depth)


def step(driver: Driver) -> None:
    driver.send()
    driver.receive()


def is_begun(driver: Driver, request: Request) -> bool:
    return request.slot != NO_SLOT and driver.scheduler.table.num_computed[request.slot] > 0


def is_prompt_done(driver: Driver, request: Request) -> bool:
    return bool(driver.received[request.key].token_ids)


def prompt_order(driver: Driver) -> list[int]:
    """Keys in the order in which prompts are done, when all is run."""
    done: list[int] = []
    while driver.unfinished:
        step(driver)
        new = [r.key for r in (one.request for one in driver.received.values()) if is_prompt_done(driver, r)]
        done += [key for key in new if key not in done]
    driver.check_end()
    return done


# --- who passes whom


@pytest.mark.parametrize(("most", "order"), [(0, [0, 1, 2, 3]), (MOST, [0, 3, 2, 1])])
def test_short_prompts_pass_longer_ones_that_wait(most: int, order: list[int]) -> None:
    driver = driver_of(max_overtaken_tokens=most)
    driver.add(prompt(15), 2)
    step(driver)
    for seed, length in enumerate((100, 60, 5), 1):
        driver.add(prompt(length, seed), 2)
    assert prompt_order(driver) == order


@pytest.mark.parametrize(("most", "order"), [(0, [0, 1]), (MOST, [1, 0])])
def test_a_prompt_that_has_begun_is_passed_between_its_chunks_and_goes_on(most: int, order: list[int]) -> None:
    driver = driver_of(max_overtaken_tokens=most)
    long = driver.add(prompt(100), 2)
    step(driver)
    assert is_begun(driver, long)
    driver.add(prompt(20, 1), 2)
    assert prompt_order(driver) == order
    assert long.num_preemptions == 0
    assert driver.worker.num_computed_by_key[long.key] == 101, "what was computed is not computed again"


def test_equal_lengths_go_as_they_came() -> None:
    driver = driver_of()
    for seed in range(6):
        driver.add(prompt(20, seed), 2)
    assert prompt_order(driver) == list(range(6))


def test_prompts_of_which_all_would_wait_longest_go_as_they_came() -> None:
    driver = driver_of(max_overtaken_tokens=100)
    for seed, length in enumerate((100, 50, 20, 7)):
        driver.add(prompt(length, seed), 2)
    assert prompt_order(driver) == [0, 1, 2, 3]


def test_who_passes_shares_the_step_with_whom_it_passed() -> None:
    driver = driver_of()
    long = driver.add(prompt(60), 2)
    step(driver)
    driver.add(prompt(5, 1), 2)
    step(driver)
    assert driver.worker.headers[1].num_rows == 2
    assert driver.scheduler.table.num_computed[long.slot] == 16 + 11
    driver.run()


def test_priority_comes_before_turns() -> None:
    driver = driver_of(is_priority_policy=True)
    for seed, (length, priority) in enumerate(((90, 1), (60, 0), (5, 1), (20, 0), (5, 2))):
        driver.add(prompt(length, seed), 2, priority=priority)
    assert prompt_order(driver) == [3, 1, 2, 0, 4]


def test_prompts_that_have_begun_go_on_while_a_shorter_one_has_no_slot() -> None:
    driver = driver_of(max_num_seqs=2)
    requests = [driver.add(prompt(15), 40), driver.add(prompt(80, 1), 2)]
    while not is_begun(driver, requests[1]):
        step(driver)
    short = driver.add(prompt(3, 2), 2)
    before = driver.scheduler.table.num_computed[requests[1].slot]
    step(driver)
    assert short.slot == NO_SLOT
    assert driver.scheduler.table.num_computed[requests[1].slot] > before
    driver.run()


def test_shorter_ones_that_find_no_blocks_wait_in_front_of_the_long_one() -> None:
    driver = driver_of(block_size=4, num_blocks=16)
    driver.add(prompt(40), 12)
    for _ in range(3):
        step(driver)
    for seed, length in enumerate((44, 24, 28), 1):
        driver.add(prompt(length, seed), 2)
    step(driver)
    assert len(driver.scheduler.waiting) == 3
    driver.run()
    assert driver.started == [0, 2, 3, 1]


@pytest.mark.parametrize("most", [0, MOST])
def test_a_whole_prompt_that_does_not_fit_is_not_starved(most: int) -> None:
    """Short ones that come all the while leave less than it needs in every step, if they may go before it."""
    driver = driver_of(enable_chunked_prefill=False, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=64)
    rest = [driver.add(prompt(40, seed), 20) for seed in range(2)]
    long = driver.add(prompt(55, 5), 2)
    num_passed = 0
    while not is_prompt_done(driver, long):
        driver.add(prompt(8, 100 + num_passed), 20)
        num_passed += 8
        step(driver)
        assert num_passed < MOST
    assert all(is_prompt_done(driver, request) for request in rest)
    driver.run()


def test_steps_are_sent_ahead_while_known_prompts_fill_them_in_whatever_order() -> None:
    driver = driver_of(depth=3)
    driver.add(prompt(50), 2)
    driver.add(prompt(10, seed=1), 2)
    assert driver.send() == 3, "48 of 60 tokens"
    assert driver.worker.headers[0].num_rows == 2
    driver.run()


# --- nobody waits for ever


def later_tokens(driver: Driver, request: Request) -> int:
    """Of prompts that came later, and were computed so far."""
    computed = driver.worker.num_computed_by_key
    later = [one.request for key, one in driver.received.items() if key > request.key]
    return sum(min(computed.get(r.key, 0), r.prompt_token_ids.size) for r in later)


@pytest.mark.parametrize("most", [0, 128, 500])
@pytest.mark.parametrize("at_once", [1, 3, 200])
def test_an_endless_stream_of_short_prompts_passes_a_long_one_up_to_the_bound(most: int, at_once: int) -> None:
    """Also those that come all at once: the clock counts tokens that came, not steps."""
    driver = driver_of(max_overtaken_tokens=most, max_num_batched_tokens=8, enable_prefix_caching=False)
    long = driver.add(prompt(200), 2)
    passed = 0
    while not is_prompt_done(driver, long):
        for seed in range(at_once):
            driver.add(prompt(4, seed), 1)
        passed = later_tokens(driver, long)
        step(driver)
    allowed = max(most - 17 * 4, 0)  # by one that would let others pass it too
    assert passed == allowed if at_once > 1 or not most else 0 < passed <= allowed
    driver.run()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_prompt_is_passed_by_more_than_the_bound(data: st.DataObject) -> None:
    most = data.draw(st.sampled_from((0, 1, 20, 100, MOST)), "max_overtaken_tokens")
    driver = driver_of(
        depth=data.draw(st.integers(1, 3), "depth"),
        max_num_seqs=data.draw(st.sampled_from((2, 8)), "max_num_seqs"),
        max_num_batched_tokens=data.draw(st.sampled_from((8, 16, 40)), "budget"),
        enable_prefix_caching=False,
        num_blocks=4096,
        max_overtaken_tokens=most,
    )
    for _ in range(data.draw(st.integers(1, 30), "operations")):
        match data.draw(st.sampled_from(["add", "add", "send", "receive", "end"])):
            case "add":
                for _ in range(data.draw(st.sampled_from((1, 1, 4)), "at once")):
                    length = data.draw(st.sampled_from((1, 2, 5, 30, 90)), "length")
                    driver.add(prompt(length, len(driver.received)), data.draw(st.integers(1, 5), "max_tokens"))
            case "send":
                driver.send()
            case "receive":
                driver.receive()
            case "end" if driver.unfinished:
                driver.end(data.draw(st.sampled_from(driver.unfinished)))
        check_bounds(driver, most)
    while driver.unfinished:
        step(driver)
        check_bounds(driver, most)
    driver.check_end()


def check_bounds(driver: Driver, most: int) -> None:
    computed = driver.worker.num_computed_by_key
    for request in driver.unfinished:
        num_tokens = request.prompt_token_ids.size
        if computed.get(request.key, 0) < num_tokens:
            assert later_tokens(driver, request) <= min(16 * num_tokens, most)


# --- those that lose their place


def test_a_preempted_request_keeps_its_turn() -> None:
    driver = driver_of(block_size=4, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=64)
    driver.add(prompt(8, 0), 16)
    second = driver.add(prompt(8, 1), 16)
    turn = second.turn
    while not second.num_preemptions:
        step(driver)
    later = driver.add(prompt(9, 2), 2)
    driver.run()
    assert driver.num_preemptions > 0
    assert driver.started[-1] == later.key
    assert second.turn == turn


def test_a_longer_request_is_preempted_for_a_shorter_one_that_came_soon_after() -> None:
    driver = driver_of(block_size=4, num_blocks=9, max_num_batched_tokens=64)
    long, short = driver.add(prompt(12, 0), 16), driver.add(prompt(4, 1), 20)
    driver.run()
    assert (long.num_preemptions > 0, short.num_preemptions) == (True, 0)


def request_of(key: int, length: int) -> Request:
    return Request(key, b"", str(key), np.zeros(length, np.int32), length + 5, RowSampling(0))


def move(source: Scheduler, target: Scheduler) -> None:
    for request in source.take_all(has_died=False):
        target.add(request)


def turns_scheduler(most: int = MOST) -> Scheduler:
    return Scheduler(limits(max_overtaken_tokens=most, max_model_len=2048, num_blocks=1024))


def test_requests_of_a_worker_that_is_gone_keep_their_order_and_their_age() -> None:
    lost, other = turns_scheduler(), turns_scheduler()
    for key, length in enumerate((300, 10, 40)):
        lost.add(request_of(key, length))
    other.add(request_of(10, 20))
    move(lost, other)
    other.add(request_of(11, 5))
    taken = [request.key for request in other.take_all()]
    assert [key for key in taken if key < 10] == [1, 2, 0], "the order that they had"
    assert taken.index(11) < taken.index(0), "as before, a short one may pass a long one that came just now"


@pytest.mark.parametrize("num_moves", [0, 1, 5])
def test_what_may_pass_a_request_is_not_more_if_it_moves(num_moves: int) -> None:
    """From one worker to the next, and each time short ones come to where it waits."""
    here, long, keys = turns_scheduler(500), request_of(0, 400), itertools.count(1)
    here.add(long)
    for _ in range(num_moves):
        for key in itertools.islice(keys, 20):
            here.add(request_of(key, 4))
        other = turns_scheduler(500)
        move(here, other)
        here = other
    for key in itertools.islice(keys, 1000):
        here.add(request_of(key, 4))
    passed = 4 * here.take_all().index(long)
    assert 0 < passed <= 500


def test_without_turns_requests_that_move_are_in_order_of_arrival() -> None:
    lost, other = turns_scheduler(0), turns_scheduler(0)
    for key in (0, 2, 4):
        lost.add(request_of(key, 100 - key))
        other.add(request_of(key + 1, 10))
    move(lost, other)
    taken = other.take_all()
    assert [request.key for request in taken] == list(range(6))
    assert {request.turn for request in taken} == {None}
