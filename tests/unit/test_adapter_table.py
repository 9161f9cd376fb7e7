"""Names, places and numbers of adapters, and when all workers have one."""

from __future__ import annotations

import pytest

from procengine.adapter_table import AdapterTable
from procengine.errors import InvalidRequestError, UnknownAdapterError


def served(table: AdapterTable, name: str) -> None:
    adapter = table.add(name, f"/{name}")
    for rank in sorted(adapter.awaits):
        table.take(rank, adapter.number, None)
    adapter.is_serving = True


def test_an_adapter_is_complete_when_every_worker_has_it() -> None:
    table = AdapterTable(2, 3, 100)
    adapter = table.add("a", "/a")
    assert [table.take(rank, adapter.number, None) for rank in (2, 0)] == [None, None]
    assert not table.all_loaded and table.are_at(0) and not table.are_at(1)
    assert table.take(1, adapter.number, None) is adapter
    assert table.all_loaded and not adapter.error


def test_a_worker_that_cannot_is_remembered_until_all_have_answered() -> None:
    table = AdapterTable(1, 2, 0)
    adapter = table.add("a", "/a")
    assert table.take(0, adapter.number, "broken") is None
    assert table.take(1, adapter.number, None) is adapter and adapter.error == "broken"


def test_answers_that_nobody_waits_for_are_nothing() -> None:
    table = AdapterTable(1, 1, 0)
    adapter = table.add("a", "/a")
    assert table.take(0, adapter.number + 1, None) is None
    assert table.take(0, adapter.number, None) is adapter
    assert table.take(0, adapter.number, "late") is None and not adapter.error


def test_a_worker_that_begins_anew_is_to_load_all() -> None:
    table = AdapterTable(2, 2, 0)
    served(table, "a")
    served(table, "b")
    assert [one.name for one in table.expect(1)] == ["a", "b"]
    assert not table.are_at(1) and table.are_at(0)
    assert set(table.facts) == {"a", "b"}  # the other worker goes on with them


def test_places_are_used_again_and_numbers_are_not() -> None:
    table = AdapterTable(2, 1, 7)
    served(table, "a")
    served(table, "b")
    with pytest.raises(InvalidRequestError, match=r"2 adapters are loaded, the limit \(max_loras\) is 2"):
        table.add("c", "/c")
    before = table.facts["a"]
    leaving = table.leave("a", 1)
    assert "a" not in table.facts and table.leaving == [leaving]
    with pytest.raises(InvalidRequestError, match="a is being unloaded already"):
        table.add("a", "/a")
    table.remove(leaving)
    served(table, "a")
    assert table.facts["a"].place == before.place and table.facts["a"].number > table.facts["b"].number > before.number


def test_only_what_is_served_can_leave() -> None:
    table = AdapterTable(1, 1, 0)
    table.add("a", "/a")
    for name in ("a", "b"):
        with pytest.raises(UnknownAdapterError, match=f"no adapter '{name}' here; there are: none"):
            table.leave(name, 1)
    with pytest.raises(InvalidRequestError, match="a is being loaded already"):
        table.add("a", "/a")
