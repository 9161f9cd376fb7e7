"""Who is remembered, and for how long."""

from __future__ import annotations

from procengine.recent_clients import RecentClients


def test_the_least_recent_is_forgotten_first() -> None:
    clients = RecentClients(limit=3)
    for client in (b"a", b"b", b"c", b"a", b"d"):
        clients.add(client)
    assert list(clients) == [b"c", b"a", b"d"]


def test_who_is_gone_is_forgotten_and_may_come_back() -> None:
    clients = RecentClients(limit=2)
    clients.add(b"a")
    clients.discard(b"a")
    clients.discard(b"never heard of")
    assert list(clients) == []
    clients.add(b"a")
    assert list(clients) == [b"a"]


def test_it_is_bounded_unless_told_otherwise() -> None:
    clients = RecentClients()
    for number in range(10_000):
        clients.add(number.to_bytes(4, "big"))
    assert len(list(clients)) == 4096
