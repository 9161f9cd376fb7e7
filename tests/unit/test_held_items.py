"""What clients are to get is kept until they have reconnected, for a while."""

from __future__ import annotations

from procengine.held_items import HeldItems
from procengine.messages import Delta


def item(key: int, finish_reason: str | None = None) -> Delta:
    return Delta("r", 0, "", [], finish_reason, key=key)


def test_items_of_a_client_that_is_waited_for_stay_in_order() -> None:
    held = HeldItems(10.0)
    assert not held.add(b"a", [item(0)]), "nobody is waited for yet"
    assert held.hold(b"a", [item(0)], 1.0)
    assert held.add(b"a", [item(1), item(2, "stop")])
    assert not held.add(b"b", [item(3)])
    assert [one.key for one in held.clients[b"a"]] == [0, 1, 2]


def test_ends_that_are_held_are_known() -> None:
    held = HeldItems(10.0)
    assert held.ended_keys() == set()
    held.hold(b"a", [item(0), item(1, "stop")], 1.0)
    held.hold(b"b", [item(2, "length")], 1.0)
    assert held.ended_keys() == {1, 2}
    del held.clients[b"a"]
    assert held.ended_keys() == {2}


def test_nobody_is_waited_for_beyond_the_deadline() -> None:
    held = HeldItems(10.0)
    held.hold(b"a", [item(0)], 1.0)
    assert held.take_late(9.9) == []
    held.shorten(12.0)
    assert held.take_late(10.0) == [b"a"]
    assert held.clients == {}
    assert not held.hold(b"a", [item(0)], 10.0)


def test_the_deadline_can_be_brought_forward() -> None:
    held = HeldItems(10.0)
    held.hold(b"a", [item(0)], 1.0)
    held.shorten(3.0)
    assert held.take_late(3.0) == [b"a"]


def test_a_process_that_replaces_no_other_waits_for_nobody() -> None:
    assert not HeldItems(0.0).hold(b"a", [item(0)], 1.0)
