"""What clients are to get is kept while they do not read or are not there: merged, for a while, and up to a limit."""

from __future__ import annotations

from procengine.backlog import Backlog
from procengine.messages import Delta, Embedding
from procengine.postprocessor import Item

S = 10**9


def item(key: int, finish_reason: str | None = None, text: str = "", offset: int = 0) -> Delta:
    return Delta("r", 0, text, [1], finish_reason, token_offset=offset, text_offset=offset, key=key)


def backlog_of(*clients: bytes, max_client_bytes: int = 10_000, max_bytes: int = 100_000) -> Backlog:
    """Each has one delta of request 0 waiting."""
    backlog = Backlog(max_client_bytes, max_bytes)
    for client in clients:
        backlog.hold(client, [item(0)], 0, is_absent=False)
    return backlog


def test_only_those_who_could_not_be_sent_something_are_kept_waiting() -> None:
    backlog = backlog_of(b"a")
    assert backlog.add(b"a", [item(1)])
    assert not backlog.add(b"b", [item(1)])
    assert backlog.remove(b"a") is not None
    assert not backlog.add(b"a", [item(1)])
    assert backlog.num_bytes == 0 and not backlog.has_items


def test_deltas_of_one_choice_become_one_and_others_keep_their_order() -> None:
    backlog = Backlog(10_000, 10_000)
    backlog.hold(b"a", [item(0, text="x"), item(1, text="y")], 0, is_absent=False)
    backlog.add(b"a", [item(0, "stop", "z", 1), Embedding("e", b"1234", [1], key=5), item(2)])
    waiting = backlog.remove(b"a")
    assert waiting is not None
    taken = waiting.take()
    assert [one.key for one in taken] == [0, 1, 2, 5]
    assert isinstance(taken[0], Delta) and (taken[0].text, taken[0].finish_reason) == ("xz", "stop")


def test_ends_that_wait_are_known() -> None:
    backlog = backlog_of(b"a", b"b")
    assert backlog.ended_keys() == set()
    backlog.add(b"a", [item(1, "stop")])
    backlog.add(b"b", [item(2, "length"), Embedding("e", b"", [1], key=3)])
    assert backlog.ended_keys() == {1, 2, 3}
    backlog.remove(b"b")
    assert backlog.ended_keys() == {1}


def test_one_for_which_too_much_waits_is_taken_out() -> None:
    backlog = backlog_of(b"a", b"b", max_client_bytes=1000)
    assert backlog.take_slowest() is None
    for _ in range(3):
        backlog.add(b"a", [item(0, text="x" * 500)])
    slowest = backlog.take_slowest()
    assert slowest is not None and slowest[0] == b"a" and slowest[1].num_bytes > 1000
    assert backlog.take_slowest() is None
    assert list(backlog.clients) == [b"b"]


def test_when_all_together_are_too_much_the_largest_goes_first() -> None:
    backlog = backlog_of(b"a", b"b", b"c", max_bytes=2000)
    for client, count in ((b"a", 700), (b"b", 900), (b"c", 300)):
        backlog.add(client, [item(0, text="x" * count)])
    slowest = backlog.take_slowest()
    assert slowest is not None and slowest[0] == b"b"
    assert backlog.take_slowest() is None
    assert backlog.num_bytes == sum(waiting.num_bytes for waiting in backlog.clients.values())


def test_bytes_are_bounded_however_many_tokens_come() -> None:
    """One merged delta of a long text takes its text and tokens, not a message for each."""
    backlog = backlog_of(b"a", max_client_bytes=1 << 30)
    for _ in range(10_000):
        backlog.add(b"a", [item(0, text="word ")])
    assert backlog.num_bytes < 10_000 * 100
    items: list[Item] = backlog.clients[b"a"].take()
    assert len(items) == 1


def test_tries_become_rarer_and_those_of_an_absent_client_stay_frequent() -> None:
    for is_absent, longest in ((False, 0.6 * S), (True, 0.04 * S)):
        backlog = backlog_of(b"a")
        now, pauses = 0, []
        for _ in range(12):
            next_ns = backlog.next_ns()
            assert next_ns is not None
            assert backlog.due(next_ns - 1) == [] and backlog.due(next_ns) == [b"a"]
            pauses.append(next_ns - now)
            now = next_ns
            backlog.try_later(b"a", now, is_absent=is_absent)
        assert pauses == sorted(pauses) and pauses[0] <= 0.01 * S and 0.03 * S < pauses[-1] <= longest


def test_nobody_is_waited_for_beyond_the_deadline() -> None:
    backlog = backlog_of(b"slow")
    backlog.hold(b"absent", [item(1, "stop")], 0, is_absent=True, deadline_ns=10 * S)
    assert backlog.take_late(10 * S - 1) == []
    ((client, waiting),) = backlog.take_late(10 * S)
    assert (client, waiting.ended_keys()) == (b"absent", {1})
    assert backlog.take_late(100 * S) == [], "a slow one has no deadline"
    backlog.shorten(101 * S)
    assert [client for client, _ in backlog.take_late(101 * S)] == [b"slow"]
    assert backlog.next_ns() is None


def test_a_deadline_is_only_ever_brought_forward() -> None:
    backlog = Backlog(1000, 1000)
    backlog.hold(b"a", [item(0)], 0, is_absent=True, deadline_ns=3 * S)
    backlog.shorten(12 * S)
    assert len(backlog.take_late(3 * S)) == 1


def test_a_farewell_comes_before_what_is_new_and_holds_up_nothing() -> None:
    backlog = backlog_of()
    backlog.bid_farewell(b"a", b"bye", 0)
    assert not backlog.has_items
    assert backlog.add(b"a", [item(4)])
    assert backlog.has_items and backlog.clients[b"a"].farewell == b"bye"
