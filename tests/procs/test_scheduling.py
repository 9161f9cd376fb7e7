"""What the scheduler promises, seen from outside: nobody waits for ever, nobody gets another answer for his company."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from procengine.messages import Delta
from tests.procs.canary import Canary
from tests.procs.harness import MAX_MODEL_LEN, Served, as_ids, key_of, tokens_of
from tests.procs.raw_client import RawClient, body

POOL_TOKENS = 640


pytestmark = pytest.mark.usefixtures("canary_after")


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    """A pool of 640 tokens under a context limit of 2048."""
    return serve_module(
        *("--num-blocks", POOL_TOKENS // 16, "--max-model-len", MAX_MODEL_LEN, "--max-num-seqs", 32),
        *("--max-num-batched-tokens", 256, "--scheduling-policy", "priority"),
    )


@pytest.fixture(scope="module")
def remembered(group: Served) -> Canary:
    return Canary.of(group, POOL_TOKENS)


def submit_short_ones(raw: RawClient, prefix: str) -> list[str]:
    names = [f"{prefix} {number}" for number in range(20)]
    for number, name in enumerate(names):
        raw.submit(name, body(as_ids(10 + number, 200 + number), max_tokens=30))
    return names


def expect_complete(raw: RawClient, names: list[str], max_tokens: int = 30) -> None:
    raw.wait_ends(*names, timeout_s=5)
    for name in names:
        end = raw.wait_end(name)
        assert isinstance(end, Delta) and end.finish_reason == "length", end
        token_ids, num_prompt_tokens = raw.token_ids(name), len(raw.deltas(name)[0].prompt_token_ids or ())
        assert token_ids == tokens_of(key_of(token_ids[0], num_prompt_tokens), num_prompt_tokens, max_tokens)


def test_sch_01_a_prompt_larger_than_the_pool_is_refused_at_once_and_holds_up_nobody(raw: RawClient) -> None:
    raw.submit("too large", body(as_ids(700), max_tokens=10))
    names = submit_short_ones(raw, "behind")
    answer = raw.rejection("too large", 1.0)
    assert answer.code == "invalid_request"
    assert "700" in answer.message and str(POOL_TOKENS) in answer.message
    expect_complete(raw, names)


def test_sch_01_a_request_that_outgrows_the_pool_ends_by_length(raw: RawClient) -> None:
    raw.submit("grows", body(as_ids(600), max_tokens=200))
    names = submit_short_ones(raw, "behind")
    end = raw.wait_end("grows", 5.0)
    assert isinstance(end, Delta) and end.finish_reason == "length"
    assert len(raw.token_ids("grows")) == POOL_TOKENS - 600
    expect_complete(raw, names)


def test_sch_01_in_front_of_and_between_short_ones(raw: RawClient) -> None:
    """Large ones arrive while the pool is in use: they wait for it, and it does come free."""
    before = submit_short_ones(raw, "before")
    for number in range(3):
        raw.submit(f"grows {number}", body(as_ids(500, 300 + number), max_tokens=1000))
    after = submit_short_ones(raw, "after")
    expect_complete(raw, [*before, *after])
    expect_complete(raw, [f"grows {number}" for number in range(3)], POOL_TOKENS - 500)


def test_two_requests_that_both_outgrow_the_pool_take_turns(raw: RawClient) -> None:
    raw.stats(reset=True)
    for number in range(4):
        raw.submit(f"half {number}", body(as_ids(300, 400 + number), max_tokens=1000))
    expect_complete(raw, [f"half {number}" for number in range(4)], POOL_TOKENS - 300)
    assert raw.stats()["num_preemptions"] > 0


def test_priority_decides_who_waits(group: Served, raw: RawClient) -> None:
    """All are there before the first step is planned: the worker is held until then."""
    with group.paused("worker-0"):
        raw.submit("first in", body(as_ids(600, 1), max_tokens=20))
        raw.stats()  # it is accepted, and its step is sent
        for number in range(6):
            raw.submit(f"p{number}", body(as_ids(600, 10 + number), max_tokens=20, priority=5 - number))
        raw.stats()
    raw.wait_ends(*(f"p{number}" for number in range(6)))
    ends = [m.request_id for m in raw.messages if isinstance(m, Delta) and m.finish_reason]
    assert ends == ["first in", "p5", "p4", "p3", "p2", "p1", "p0"]


def test_sch_05_a_whole_prompt_in_the_cache_at_once_and_in_a_row(raw: RawClient) -> None:
    for length in (16, 17, 32, 48, 64):
        names = [f"{length} {number}" for number in range(6)]
        for name in names[:3]:  # at once
            raw.submit(name, body(as_ids(length, 500 + length), max_tokens=16))
        raw.wait_ends(*names[:3])
        for name in names[3:]:  # in a row
            raw.submit(name, body(as_ids(length, 500 + length), max_tokens=16))
            raw.wait_end(name)
        expect_complete(raw, names, 16)
        cached = [raw.deltas(name)[0].num_cached_tokens for name in names]
        assert sorted(cached[:3]) == [0, *[(length - 1) // 16 * 16] * 2]  # type: ignore[type-var]
        assert cached[3:] == [(length - 1) // 16 * 16] * 3


def test_sch_06_a_prefix_in_chunks_shared_while_it_is_computed_and_its_owner_aborted(raw: RawClient) -> None:
    """Who waits for a prefix that somebody else computes must go on when that one is gone."""
    prompt = as_ids(600, 600)
    for name, ids in (("owner", prompt), ("same", prompt[:400]), ("longer", [*prompt[:300], *as_ids(20, 7)])):
        raw.submit(name, body(ids, max_tokens=8))
    raw.abort("owner")
    raw.wait_end("owner")
    expect_complete(raw, ["same", "longer"], 8)


def test_preemption_by_a_more_urgent_request_loses_no_token(raw: RawClient) -> None:
    raw.stats(reset=True)
    for number in range(12):
        raw.submit(f"r{number}", body(as_ids(49, 700 + number), max_tokens=120, priority=12 - number))
    expect_complete(raw, [f"r{number}" for number in range(12)], 120)
    assert raw.stats()["num_preemptions"] > 0
