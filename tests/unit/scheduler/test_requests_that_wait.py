"""Rows that cannot be planned ahead, and what only some ask for: proposals, grammars, prompt logprobs, min_tokens."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from procengine.errors import RequestFailedError
from procengine.request import Request, RowSampling
from procengine.row_features import GRAMMAR
from procengine.scheduler.limits import SchedulerLimits
from procengine.step_payload import SlotList
from procengine.workflows.generate import GeneratePlanner
from tests.unit.simulated_worker import VOCAB, Driver, ToyMasks, limits, token_by_prefix, token_of_few

FEW = tuple(range(10, 15))


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def few(length: int, seed: int = 0) -> list[int]:
    """A prompt of the tokens that `token_of_few` gives."""
    rng = random.Random(seed)
    return [rng.choice(FEW) for _ in range(length)]


def driver_of(*, depth: int = 2, **changes: Any) -> Driver:
    plans_late = changes.pop("plans_late", True)
    return Driver(limits(**changes), depth=depth, rule=token_of_few, plans_late=plans_late)


# --- random runs with everything


def random_run(rng: random.Random, driver: Driver, num_requests: int, kinds: tuple[str, ...]) -> None:
    own = driver.scheduler.limits
    longest = min(own.max_model_len - 1, own.pool_tokens, 40)
    shared = few(longest, seed=1)
    num_added = 0
    while num_added < num_requests or driver.unfinished:
        action = rng.random()
        if num_added < num_requests and (action < 0.35 or not driver.unfinished):
            length = rng.randint(1, longest)
            num_shared = rng.choice((0, length // 2, length))
            kind = rng.choice(kinds)
            max_tokens = rng.randint(1, 40)
            driver.add(
                shared[:num_shared] + [rng.choice(FEW) for _ in range(length - num_shared)],
                max_tokens,
                seed=rng.randrange(2),
                stop_token_ids=rng.choice(((), (FEW[0],), (3, FEW[4]))),
                priority=rng.randint(-1, 1),
                has_grammar=kind == "grammar",
                has_penalties=kind == "penalties",
                min_tokens=rng.randint(1, max_tokens) if kind == "min_tokens" else 0,
                num_prompt_logprobs=rng.choice((0, 2)) if kind == "prompt_logprobs" else -1,
            )
            num_added += 1
        elif 0.35 <= action < 0.37 and driver.unfinished:
            driver.end(rng.choice(driver.unfinished), rng.choice(("abort", "text")))
        elif action < 0.70:
            driver.send()
        else:
            has_result = driver.receive()
            assert has_result or driver.send() or not driver.unfinished, "nothing is under way and nothing can go"
    driver.run()


GRID = list(itertools.product((0, 1, 4), (1, 2, 3), (1, 4), ("tiny", "ample"), (True, False)))


@pytest.mark.parametrize(("num_speculative", "depth", "decode_steps", "pool", "caching"), GRID)
def test_random_runs_give_every_request_its_tokens_once(
    num_speculative: int, depth: int, decode_steps: int, pool: str, caching: bool
) -> None:
    seed = GRID.index((num_speculative, depth, decode_steps, pool, caching))
    rng = random.Random(seed)
    block_size = rng.choice((1, 4, 16))
    max_num_seqs = rng.choice((1, 3, 8))
    driver = Driver(
        SchedulerLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(rng.choice((4, 9, 64)), max_num_seqs),
            max_model_len=80,
            block_size=block_size,
            num_blocks=-(-rng.choice((48, 70)) // block_size) if pool == "tiny" else 2048 // block_size,
            enable_prefix_caching=caching,
            is_priority_policy=rng.random() < 0.5,
            decode_steps=decode_steps,
            num_speculative_tokens=num_speculative,
            max_overtaken_tokens=(0, 30, 4096)[seed % 3],
        ),
        depth=depth,
        rule=token_of_few,
        plans_late=rng.random() < 0.5,
    )
    kinds = ("plain", "plain", "grammar", "penalties", "min_tokens", "prompt_logprobs")
    random_run(rng, driver, 14, rng.choice((("plain",), kinds, kinds)))
    if not num_speculative:
        assert driver.scheduler.counters.num_draft_tokens == 0


def test_random_runs_try_proposals_that_are_right_and_wrong_and_preempt_rows_that_do() -> None:
    accepted = rejected = preempted = 0
    for seed in range(8):
        driver = driver_of(
            depth=1 + seed % 3,
            block_size=4,
            num_blocks=14,
            max_model_len=56,
            num_speculative_tokens=4,
            plans_late=seed % 2 == 0,
        )
        random_run(random.Random(seed), driver, 12, ("plain",))
        accepted += driver.worker.num_accepted
        rejected += driver.worker.num_rejected
        preempted += driver.num_preemptions
    assert min(accepted, rejected) > 50, (accepted, rejected)
    assert preempted >= 5


# --- speculation


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_proposals_are_counted_and_save_steps(depth: int) -> None:
    plain, drafting = driver_of(depth=depth), driver_of(depth=depth, num_speculative_tokens=4)
    for driver in (plain, drafting):
        driver.add([1, 2, 3, 1, 2, 3], 60)
        driver.run()
    assert drafting.outputs() == plain.outputs()
    counters = drafting.scheduler.counters
    assert counters.num_accepted_tokens == drafting.worker.num_accepted > 10
    assert counters.num_draft_tokens == drafting.worker.num_accepted + drafting.worker.num_rejected
    assert len(drafting.worker.headers) == 60 - counters.num_accepted_tokens


def test_proposals_never_go_beyond_the_end() -> None:
    for max_tokens in range(1, 12):
        driver = driver_of(num_speculative_tokens=8)
        request = driver.add([10, 11] * 6, max_tokens)
        driver.run()
        assert max(header.max_seq_len for header in driver.worker.headers) < request.end_position or max_tokens == 1


def finished_within_proposals(stop_at: int) -> tuple[Driver, list[int]]:
    """A request that ends by a stop token at place `stop_at` of its output, with proposals all the way."""
    probe = driver_of(num_speculative_tokens=4)
    probe.add(few(8, seed=2), 40)
    probe.run()
    output = probe.outputs()[0]
    driver = driver_of(num_speculative_tokens=4, block_size=1, num_blocks=200)

    def rule(seed: int, prefix: np.ndarray[Any, np.dtype[np.int32]]) -> int:
        return 99 if prefix.size == 8 + stop_at else token_of_few(seed, prefix)

    driver.truth.rule = rule
    driver.add(few(8, seed=2), 40, stop_token_ids=(99,))
    driver.run()
    assert driver.received[0].finish_reason == "stop"
    return driver, [*output[:stop_at], 99]


@pytest.mark.parametrize("stop_at", range(1, 30))
def test_stop_token_in_the_middle_of_accepted_tokens_ends_there_and_leaves_a_cache_that_is_true(stop_at: int) -> None:
    driver, output = finished_within_proposals(stop_at)
    assert driver.outputs() == [output]
    # Whoever goes on from all of that finds nothing in the cache that was computed for another token.
    driver.add([*few(8, seed=2), *output, 5], 2)
    driver.run()


def test_blocks_left_over_by_rejected_proposals_of_one_row_are_no_blocks_of_another() -> None:
    for seed in range(30):
        driver = driver_of(depth=1, block_size=1, num_blocks=44, max_model_len=60, num_speculative_tokens=6)
        for at in range(3):
            driver.add(few(6, seed=3 * seed + at), 30, seed=seed)
        driver.run()


def test_row_preempted_with_proposals_under_way_is_owed_one_result_of_all_their_tokens() -> None:
    """Rows out of phase: the one that has to go is in the step in flight."""
    owed: list[tuple[int, int]] = []
    for seed in range(20):
        driver = driver_of(
            depth=2, block_size=1, num_blocks=40, max_model_len=40, num_speculative_tokens=4, plans_late=False
        )
        first = driver.add([10, 11] * 4, 30, seed=seed)
        driver.send()
        second = driver.add([11, 10] * 4, 30, seed=seed)
        while driver.unfinished:
            driver.send()
            tokens = [len(r.token_ids) for r in (first, second) if r.slot < 0 and r.num_in_flight]
            waiting = [r for r in (first, second) if r.slot < 0 and r.num_in_flight]
            assert all(r.num_in_flight == 1 for r in waiting)
            driver.receive()
            owed += [
                (before, len(r.token_ids)) for before, r in zip(tokens, waiting, strict=True) if not r.num_in_flight
            ]
        driver.run()
    assert max(after - before for before, after in owed) > 1, owed


@pytest.mark.parametrize("budget", [3, 4, 5])
def test_proposals_that_find_no_room_in_the_step_are_cut_or_left(budget: int) -> None:
    num_preemptions = 0
    for num_blocks in range(14, 30):
        driver = driver_of(
            depth=1,
            max_num_seqs=3,
            max_num_batched_tokens=budget,
            block_size=4,
            num_blocks=num_blocks,
            num_speculative_tokens=4,
        )
        for seed in range(3):
            driver.add([10 + seed], 50, seed=seed)  # all start in one step, and stay together
        driver.run()
        num_preemptions += driver.num_preemptions
    assert num_preemptions > 0, "and rows that were left without come back all the same"


def test_rows_whose_logits_depend_on_their_tokens_try_no_proposals() -> None:
    driver = driver_of(num_speculative_tokens=4)
    driver.add([10, 11] * 6, 20, has_penalties=True)
    driver.add([10, 11] * 6, 20, has_grammar=True)
    driver.add([10, 11] * 6, 20, min_tokens=3)
    driver.run()
    assert driver.scheduler.counters.num_draft_tokens == 0


def test_a_step_holds_proposals_a_prompt_and_plain_rows_together() -> None:
    driver = driver_of(num_speculative_tokens=3, max_num_batched_tokens=32)
    driver.add([10, 11] * 6, 40)
    driver.add(few(3, seed=9), 40, has_penalties=True)
    for _ in range(4):
        driver.send()
        driver.receive()
    driver.add(prompt(30), 5, has_grammar=True, num_prompt_logprobs=1)
    driver.run()
    mixed = [h for h in driver.worker.headers if h.num_decode_rows and h.num_rows - h.num_decode_rows >= 2]
    assert mixed


# --- grammars


@pytest.mark.parametrize(("depth", "decode_steps"), [(1, 1), (2, 1), (3, 1), (2, 4), (3, 4)])
def test_mask_is_always_that_of_all_confirmed_tokens(depth: int, decode_steps: int) -> None:
    driver = Driver(limits(decode_steps=decode_steps), depth=depth)
    constrained = [driver.add(prompt(9, seed=seed), 12, has_grammar=True) for seed in range(2)]
    driver.add(prompt(9, seed=5), 40)
    driver.run()
    for request in constrained:
        assert isinstance(request.grammar, ToyMasks)
        assert request.grammar.masked_at == list(range(12)), "one mask a token, none before the token before it"
        assert request.grammar.fed == driver.received[request.key].token_ids


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_without_a_grammar_keep_their_depth(depth: int) -> None:
    driver = Driver(limits(), depth=depth)
    free = driver.add(prompt(9), 40)
    constrained = driver.add(prompt(9, seed=1), 40, has_grammar=True)
    driver.run()
    rows = [header.num_rows for header in driver.worker.headers]
    assert len(driver.worker.headers) <= 40 * depth
    assert driver.worker.num_computed_by_key == {free.key: 9 + 39, constrained.key: 9 + 39}
    if depth > 1:
        assert rows.count(1) > 0, "the free row goes alone while the other waits for its token"
        first = rows.index(1)
        assert set(rows[first:]) <= {1, 2}


def test_free_row_is_not_slowed_down_by_a_constrained_one() -> None:
    """Results until the free row is done: at most one more, of the other row alone."""
    counts = []
    for has_grammar in (False, True):
        driver = Driver(limits(), depth=3)
        free = driver.add(prompt(9), 30)
        driver.add(prompt(9, seed=1), 30, has_grammar=has_grammar)
        while not free.is_finished:
            driver.send()
            driver.receive()
        counts.append(driver.num_results)
        driver.run()
    assert counts[0] == 30
    assert counts[1] <= 31


def test_several_passes_a_step_give_a_constrained_row_one() -> None:
    driver = Driver(limits(decode_steps=4), depth=1)
    driver.add(prompt(9), 30)
    driver.add(prompt(9, seed=1), 30, has_grammar=True)
    driver.run()
    assert 4 in [header.decode_steps for header in driver.worker.headers]


def test_grammar_goes_on_after_a_preemption_with_tokens_under_way() -> None:
    driver = Driver(limits(block_size=4, num_blocks=7, max_num_seqs=2), depth=3, plans_late=False)
    driver.add(prompt(8), 18)
    second = driver.add(prompt(8, seed=1), 12, has_grammar=True)
    driver.run()
    assert second.num_preemptions > 0
    assert isinstance(second.grammar, ToyMasks)
    assert len(second.grammar.fed) == 12


def test_stop_token_of_a_constrained_row_ends_it() -> None:
    driver = Driver(limits(), depth=2)
    driver.add(prompt(9), 40, has_grammar=True)
    driver.run()
    output = driver.outputs()[0]
    driver.add(prompt(9), 40, has_grammar=True, stop_token_ids=(output[5],))
    driver.run()
    assert driver.received[1].finish_reason == "stop"
    assert driver.outputs()[1] == output[: output.index(output[5]) + 1]


# --- prompt logprobs


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 100])
@pytest.mark.parametrize("budget", [7, 16, 64])
def test_smp_14_every_prompt_position_is_scored_once_chunked_and_with_a_warm_cache(length: int, budget: int) -> None:
    driver = Driver(limits(max_num_batched_tokens=budget, max_num_seqs=4))
    for _ in range(2):
        driver.add(prompt(length), 2, num_prompt_logprobs=1)
        driver.add(prompt(length), 2)
        driver.run()
    driver.add([*prompt(length)[:64], 5], 1, num_prompt_logprobs=0)
    driver.run()
    for key in (0, 2, 4):
        received = driver.received[key]
        assert received.scored == list(range(1, received.request.prompt_token_ids.size))
        assert received.request.num_cached_tokens == 0


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("at", [1, 3, 5, 8])
def test_prompt_that_is_preempted_half_scored_is_scored_to_the_end(warm: bool, at: int) -> None:
    """Also if the cache holds all of it, because somebody else computed it."""
    driver = Driver(limits(block_size=4, num_blocks=40, max_num_batched_tokens=8, max_model_len=120), depth=1)
    if warm:
        driver.add(prompt(80), 1)
        driver.run()
    request = driver.add(prompt(80), 3, num_prompt_logprobs=1)
    for _ in range(at):
        driver.send()
        driver.receive()
    driver.scheduler._preempt_last()
    driver.scheduler.check_integrity()
    assert request.num_preemptions == 1
    driver.run()
    assert sorted(set(driver.received[request.key].scored)) == list(range(1, 80))
    assert driver.worker.num_computed_by_key[request.key] <= 80 + 2 + 4, "what it had scored is not computed again"


def test_preempted_after_its_prompt_a_request_finds_its_cache_and_is_not_scored_again() -> None:
    driver = Driver(limits(block_size=4), depth=1)
    request = driver.add(prompt(30), 20, num_prompt_logprobs=1)
    for _ in range(5):
        driver.send()
        driver.receive()
    driver.scheduler._preempt_last()
    driver.run()
    assert driver.received[request.key].scored == list(range(1, 30))
    assert driver.worker.num_computed_by_key[request.key] <= 30 + 19 + 4


# --- choices, min_tokens, histories


@pytest.mark.parametrize("length", [16, 33, 100])
def test_smp_10_choices_share_the_blocks_of_their_prompt(length: int) -> None:
    driver = Driver(limits(max_num_batched_tokens=256))
    choices = [driver.add(prompt(length), 4, seed=seed) for seed in range(5)]
    driver.run()
    num_shared = (length - 1) // 16 * 16
    assert driver.worker.num_computed_tokens == length + 4 * (length - num_shared) + 5 * 3
    assert [request.num_cached_tokens for request in choices] == [0, *[num_shared] * 4]
    assert len({tuple(tokens) for tokens in driver.outputs()}) == 5


@pytest.mark.parametrize(("depth", "decode_steps"), [(1, 1), (3, 1), (2, 4)])
@pytest.mark.parametrize("min_tokens", [1, 2, 7, 12])
def test_stop_tokens_do_not_count_before_min_tokens(depth: int, decode_steps: int, min_tokens: int) -> None:
    driver = Driver(limits(decode_steps=decode_steps), depth=depth, rule=token_of_few)
    driver.add(few(6), 12, stop_token_ids=FEW[:4], min_tokens=min_tokens)
    driver.run()
    output = driver.outputs()[0]
    assert len(output) > min_tokens or (len(output), min_tokens) == (12, 12)
    assert not set(output[:min_tokens]) & set(FEW[:4])
    early = [data for kind, _, data in driver.worker.slot_lists if kind is SlotList.EARLY_STOPS]
    assert early == [[6 + min_tokens, *FEW[:4]]]


def test_row_that_comes_back_brings_its_whole_history() -> None:
    driver = Driver(limits(block_size=4, num_blocks=7, max_num_seqs=2), depth=2, rule=token_by_prefix)
    driver.add(prompt(8), 18)
    second = driver.add(prompt(8, seed=1), 12, has_penalties=True)
    driver.run()
    assert second.num_preemptions > 0
    histories = [data for kind, key, data in driver.worker.slot_lists if kind is SlotList.HISTORY and key == second.key]
    assert len(histories) == 1 + second.num_preemptions
    assert all(data[0] == 8 for data in histories)
    assert len(histories[0]) == 1 + 8
    assert len(histories[1]) > 1 + 8


class Brittle(ToyMasks):
    """Gives up when it has had so many tokens."""

    def __init__(self, limit: int, *, in_mask: bool) -> None:
        super().__init__()
        self.limit = limit
        self.in_mask = in_mask

    def fill_mask(self, row: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        if self.in_mask and len(self.fed) == self.limit:
            raise RequestFailedError("too complex")
        super().fill_mask(row)

    def consume(self, token_id: int) -> None:
        if not self.in_mask and len(self.fed) == self.limit:
            raise RequestFailedError("too complex")
        super().consume(token_id)


@pytest.mark.parametrize("in_mask", [False, True])
@pytest.mark.parametrize("limit", [0, 3])
def test_grammar_that_gives_up_fails_its_request_and_no_other(limit: int, in_mask: bool) -> None:
    bench = GeneratePlanner(limits())
    key = np.array([5, 6, 7], np.int32)
    failing = Request(0, b"", "0", key, 30, RowSampling(0, features=GRAMMAR), grammar=Brittle(limit, in_mask=in_mask))
    free = Request(1, b"", "1", key, 30, RowSampling(0))
    for request in (failing, free):
        bench.add(request)
    scheduler = bench.scheduler
    for _ in range(limit + 1):
        plan = scheduler.schedule()
        assert plan is not None
        slots = plan.sample_slots()
        tokens = [next(t for t in range(3) if slot != failing.slot or failing_allows(failing, t)) for slot in slots]
        scheduler.apply(
            slots, scheduler.table.keys[slots], scheduler.table.num_tokens[slots], np.array(tokens, np.int32)
        )
    assert [(request.key, error) for request, error in bench.take_failed()] == [(0, "too complex")]
    assert bench.take_failed() == []
    bench.finish(failing)
    scheduler.check_integrity()
    assert scheduler.history(free).size == 3 + limit + 1


def failing_allows(request: Request, token: int) -> bool:
    assert isinstance(request.grammar, ToyMasks)
    return request.grammar.allows(token)
