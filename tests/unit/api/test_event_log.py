"""The log of a stream: what it returns is what was sent, from any event on, or it says that it cannot."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.api.event_log import EventLog

EVENTS = st.lists(st.sampled_from(["data: a", "event: x\ndata: y", "data: id: 7", "data: " + "z" * 40]))


@settings(max_examples=50, deadline=None)
@given(st.lists(EVENTS), st.integers(1, 200))
def test_what_came_behind_an_event_is_what_was_sent_behind_it(pieces: list[list[str]], max_bytes: int) -> None:
    log, sent = EventLog(max_bytes), b""
    for piece in pieces:
        sent += log.add("".join(f"{event}\n\n" for event in piece).encode())
    events = re.findall(rb"id: \d+\n.*?\n\n", sent, re.DOTALL)
    assert b"".join(events) == sent and len(events) == log.last == sum(map(len, pieces))
    assert [int(event.split()[1]) for event in events] == list(range(1, log.last + 1))
    for after in range(log.last + 1):
        missed = log.since(after)
        assert missed == b"".join(events[after:]) or (missed is None and len(b"".join(events[after:])) > max_bytes)
    assert log.since(log.last) == b""
    if events:
        assert log.since(log.last - 1) == events[-1]  # the newest is always there
