"""The newest results of a worker are kept, within bounds."""

from __future__ import annotations

from procengine.recent_results import RecentResults


def test_oldest_come_first_and_are_taken_once() -> None:
    results = RecentResults()
    for number in range(3):
        results.add(b"h%d" % number, b"p")
    assert results.take_all() == [(b"h0", b"p"), (b"h1", b"p"), (b"h2", b"p")]
    assert results.take_all() == []


def test_no_more_than_so_many() -> None:
    results = RecentResults(max_results=2)
    for number in range(5):
        results.add(b"%d" % number, b"p")
    assert [header for header, _ in results.take_all()] == [b"3", b"4"]


def test_no_more_than_so_many_bytes() -> None:
    results = RecentResults(max_bytes=10)
    for number, size in enumerate((4, 4, 4, 1, 9, 11, 2)):
        results.add(b"%d" % number, bytes(size))
        kept = list(results._results)
        assert sum(len(payload) for _, payload in kept) <= 10
    assert [header for header, _ in results.take_all()] == [b"6"]
