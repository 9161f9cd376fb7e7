"""Reads a trace as the Trace Event Format says, knowing nothing of who wrote it; exact, in decimals.

`check_trace` raises what is wrong; `load_slices` makes a table of it for SQL.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from decimal import Decimal
from typing import Any

__all__ = ["bubble_share", "check_trace", "load_slices", "read_trace"]

Event = dict[str, Any]


def read_trace(data: bytes) -> list[Event]:
    """The events of a trace in its object form."""
    document = json.loads(data, parse_float=Decimal)
    assert isinstance(document["traceEvents"], list)
    return list(document["traceEvents"])


def check_trace(events: list[Event]) -> None:
    """Everything that the format and its importers ask for."""
    for event in events:
        assert {"ph", "pid", "tid", "ts", "name"} <= set(event), event
        assert event["ph"] in "XstfCM" and type(event["pid"]) is type(event["tid"]) is int, event
        assert event["ts"] >= 0, event
    _check_names(events)
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] != "M":
            tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        times = [event["ts"] for event in track]
        assert times == sorted(times)
        _check_nesting([event for event in track if event["ph"] == "X"])
    _check_flows([event for event in events if event["ph"] in "stf"], tracks)
    for event in events:
        if event["ph"] == "C":
            assert event["args"] and all(value >= 0 for value in event["args"].values()), event


def _check_names(events: list[Event]) -> None:
    """Each process and each thread that has events has one name."""
    names = [(event["name"], event["pid"], event["tid"]) for event in events if event["ph"] == "M"]
    assert len(names) == len(set(names))
    for event in events:
        if event["ph"] in "Xstf":
            assert ("process_name", event["pid"], 0) in names and ("thread_name", event["pid"], event["tid"]) in names


def _check_nesting(slices: list[Event]) -> None:
    """Each slice lies within the one around it, or behind the one before."""
    open_until: list[Decimal] = []
    for event in slices:
        assert event["dur"] >= 0, event
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        end = event["ts"] + event["dur"]
        assert not open_until or end <= open_until[-1], event
        open_until.append(end)


def _check_flows(flows: list[Event], tracks: dict[tuple[int, int], list[Event]]) -> None:
    by_id: dict[Any, list[Event]] = defaultdict(list)
    for event in flows:
        by_id[event["cat"], event["id"]].append(event)
    for chain in by_id.values():
        phases = "".join(event["ph"] for event in chain)
        assert phases == "s" + "t" * (len(chain) - 2) + "f", chain
        times = [event["ts"] for event in chain]
        assert times == sorted(times)
        assert len({event["name"] for event in chain}) == 1
        assert all(event.get("bp") == "e" for event in chain[1:])
    bounds = {
        key: [(event["ts"], event["ts"] + event["dur"]) for event in track if event["ph"] == "X"]
        for key, track in tracks.items()
    }
    starts = {key: {begin for begin, _ in spans} for key, spans in bounds.items()}
    for event in flows:
        key = event["pid"], event["tid"]
        # An arrow ends at a slice: at its start, which is quick to see, or anywhere within.
        is_at_start = event["ts"] in starts[key]
        assert is_at_start or any(begin <= event["ts"] <= end for begin, end in bounds[key]), event


class _Slices(sqlite3.Connection):
    """Closes itself when nobody holds it any more, of which Python 3.13 would warn: it is nothing but memory."""

    def __del__(self) -> None:
        self.close()


def load_slices(events: list[Event]) -> sqlite3.Connection:
    """Tables slice (process, thread, name, ts, dur, depth; integers, ns) and counter (process, name, ts, value)."""
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name") for event in events if event["ph"] == "M"
    }
    db = sqlite3.connect(":memory:", factory=_Slices, check_same_thread=False)  # any thread may drop it last
    db.execute("create table slice (process text, thread text, name text, ts integer, dur integer, depth integer)")
    db.execute("create table counter (process text, name text, ts integer, value integer)")
    open_until: dict[tuple[int, int], list[Decimal]] = defaultdict(list)
    for event in events:
        process = names.get(("process_name", event["pid"], 0))
        if event["ph"] == "C":
            (value,) = event["args"].values()
            db.execute("insert into counter values (?, ?, ?, ?)", (process, event["name"], _ns(event["ts"]), value))
        if event["ph"] != "X":
            continue
        stack = open_until[event["pid"], event["tid"]]
        while stack and stack[-1] <= event["ts"]:
            stack.pop()
        thread = names["thread_name", event["pid"], event["tid"]]
        row = (process, thread, event["name"], _ns(event["ts"]), _ns(event["dur"]), len(stack))
        db.execute("insert into slice values (?, ?, ?, ?, ?, ?)", row)
        stack.append(event["ts"] + event["dur"])
    return db


def _ns(microseconds: Any) -> int:
    ns = Decimal(microseconds) * 1000
    assert ns == int(ns)
    return int(ns)


def bubble_share(db: sqlite3.Connection) -> float:
    """Idle time of the device loops over all their time."""
    query = """
        select 1.0 * sum(case when name = 'idle' then dur else 0 end) / sum(dur)
        from slice where thread = 'device' and depth = 0
    """
    (share,) = db.execute(query).fetchone()
    return float(share)
