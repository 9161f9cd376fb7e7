"""Each queue has a bound, and who comes when it is full hears which one, and when to try again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from procengine.errors import OverloadedError
from procengine.messages import Delta
from tests.procs.canary import expect_idle
from tests.procs.crowd import Crowd
from tests.procs.harness import Served, as_ids, is_running, wait_until
from tests.procs.raw_client import RawClient, body


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module(
        *("--max-num-seqs", 1, "--mock-step-ms", 2, "--max-queued-requests", 6, "--max-client-requests", 4),
        *("--max-queued-tokens", 100, "--max-clients", 4),
    )


@pytest.fixture
def busy(group: Served) -> Iterator[RawClient]:
    """A client whose request holds the only slot."""
    with RawClient(group.endpoint) as raw:
        raw.submit("running", body(as_ids(3), max_tokens=2000))
        raw.wait_for(lambda m: isinstance(m, Delta))
        yield raw
    expect_idle(group)


def expect_overloaded(raw: RawClient, name: str, *parts: str) -> None:
    answer = raw.rejection(name)
    assert answer.code == "overloaded" and all(part in answer.message for part in parts), answer
    assert 0.1 <= answer.retry_after_s <= 60


def test_one_client_has_a_limit_of_its_own(group: Served, busy: RawClient) -> None:
    for number in range(4):
        busy.submit(f"r{number}", body(as_ids(3)))
    expect_overloaded(busy, "r3", "4 unfinished requests", "(max_client_requests) is 4")
    with RawClient(group.endpoint) as other:
        other.submit("mine", body(as_ids(3), max_tokens=2))
        busy.abort("running")
        other.wait_end("mine")
    busy.wait_ends("r0", "r1", "r2")


def test_the_queue_is_full_for_everybody(group: Served, busy: RawClient) -> None:
    for number in range(3):
        busy.submit(f"r{number}", body(as_ids(3)))
    with RawClient(group.endpoint) as other:
        for number in range(3):
            other.submit(f"r{number}", body(as_ids(3)))
        expect_overloaded(other, "r2", "6 unfinished requests", "(max_queued_requests) is 6")
        busy.abort("running")
        other.wait_ends("r0", "r1")


def test_tokens_that_wait_have_a_limit_and_those_that_run_do_not_count(busy: RawClient) -> None:
    busy.submit("alone", body(as_ids(500)))  # nothing waits: any prompt that fits the model may
    busy.submit("too much", body(as_ids(1), max_tokens=1))
    expect_overloaded(busy, "too much", "500 prompt tokens", "1 more", "(max_queued_tokens), which is 100")
    busy.abort("alone")
    busy.wait_end("alone")
    busy.submit("choices", body(as_ids(30), n=3, seed=1))
    busy.submit("text", body("x" * 11))
    expect_overloaded(busy, "text", "90 prompt tokens", "11 more")
    busy.submit("last", body(as_ids(10)))
    busy.abort("running")
    busy.wait_ends("choices", "last")


def test_more_clients_than_there_is_room_for_are_told_so_and_the_others_stay(group: Served) -> None:
    with Crowd(group.endpoint, 4) as crowd:
        with pytest.raises(OverloadedError, match=r"5 connections, the limit \(max_clients\) is 4") as caught:
            group.client()
        assert caught.value.retry_after_s == 1.0
        crowd.members[0].submit("r", 4)
        crowd.receive_until(lambda member: member is not crowd.members[0] or bool(member.num_ends))
    wait_until(lambda: _can_connect(group), "there is room again", 30)


def _can_connect(group: Served) -> bool:
    try:
        group.client().close()
    except OverloadedError:
        return False
    return True


def test_the_hint_follows_how_fast_requests_end(serve: Callable[..., Served]) -> None:
    """100 a second and more end: there is no need to wait for a second."""
    group = serve("--max-queued-requests", 8)
    with RawClient(group.endpoint) as raw:
        for round_ in range(100):
            for number in range(5):
                raw.submit(f"{round_}-{number}", body(as_ids(3), max_tokens=1))
            raw.wait_ends(*(f"{round_}-{number}" for number in range(5)))
        with group.paused("worker-0"):
            for number in range(9):
                raw.submit(f"last {number}", body(as_ids(3), max_tokens=1))
            assert 0.1 <= raw.rejection("last 8").retry_after_s < 1.0


def test_few_open_files_end_in_errors_and_not_in_death(serve: Callable[..., Served]) -> None:
    """ZeroMQ ends a process that cannot accept a connection, so a group stops listening before."""
    group = serve(max_files=256)
    for _ in range(3):
        with pytest.raises(AssertionError, match="of 400 are not done"), Crowd(group.endpoint, 400, timeout_s=1.5):
            pass
        wait_until(lambda: _can_connect(group), "there is room again", 30)
    assert all(map(is_running, group.pids.values())), group.log
    assert "only 256 files may be open" in group.log
    with group.client() as client:
        assert client.generate(as_ids(3)).outputs[0].finish_reason == "length"
