"""Span rings: what is written is read, also while it is being written, and after the writer is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from procengine.profiling.records import COLUMNS, RecordKind, id_words, request_id_of
from procengine.profiling.span_ring import NOBODY, NUM_VALUES, SpanArena, make_arena, read_arena, take_noted_key

CAPACITY = 16


@pytest.fixture
def fd() -> Iterator[int]:
    fd = make_arena("test", CAPACITY)
    yield fd
    os.close(fd)


def test_records_come_back_oldest_first(fd: int) -> None:
    writer = SpanArena(fd).writer("loop")
    for number in range(5):
        writer.record(3, number, *range(number, number + NUM_VALUES))
    (ring,) = read_arena(fd)
    assert (ring.thread, ring.first, ring.end) == ("loop", 0, 5)
    assert ring.records.tolist() == [[3, n, *range(n, n + NUM_VALUES)] for n in range(5)]


def test_a_short_record_has_its_columns(fd: int) -> None:
    writer = SpanArena(fd).writer("loop")
    writer.record(3, -1, 2**62, -(2**63))
    assert read_arena(fd)[0].records[0, :4].tolist() == [3, -1, 2**62, -(2**63)]
    writer.record(3, 0)
    assert read_arena(fd)[0].records[1, :2].tolist() == [3, 0]


def test_a_full_ring_drops_the_oldest(fd: int) -> None:
    writer = SpanArena(fd).writer("loop")
    for number in range(3 * CAPACITY + 5):
        writer.record(1, number)
    (ring,) = read_arena(fd)
    assert ring.end == 3 * CAPACITY + 5
    # One less than it holds: the place of the next record may be half written already.
    assert ring.records[:, 1].tolist() == list(range(ring.end - CAPACITY + 1, ring.end))


def test_reading_goes_on_where_it_was(fd: int) -> None:
    writer = SpanArena(fd).writer("loop")
    writer.record(1, 0)
    since = {ring.thread: ring.end for ring in read_arena(fd)}
    writer.record(1, 1)
    (ring,) = read_arena(fd, since)
    assert ring.first == 1
    assert ring.records[:, 1].tolist() == [1]
    assert read_arena(fd, {"loop": ring.end})[0].records.shape == (0, 16)


def test_threads_have_rings_of_their_own_and_a_new_process_goes_on(fd: int) -> None:
    first = SpanArena(fd)
    first.writer("device").record(1, 1)
    first.writer("send").record(2, 2)
    SpanArena(fd).writer("device").record(1, 3)  # as after a restart
    assert {ring.thread: ring.records[:, 1].tolist() for ring in read_arena(fd)} == {"device": [1, 3], "send": [2]}


def test_too_many_threads(fd: int) -> None:
    arena = SpanArena(fd)
    for name in ("a", "b", "c", "d"):
        arena.writer(name)
    with pytest.raises(ValueError, match="an arena has 4"):
        arena.writer("e")


def test_without_memory_records_are_dropped() -> None:
    SpanArena(None).writer("loop").record(1, 2, 3)


def test_something_else_is_refused() -> None:
    fd = os.memfd_create("other")
    os.write(fd, bytes(4096))
    with pytest.raises(ValueError, match="not an arena"):
        read_arena(fd)
    os.close(fd)


def test_a_reader_sees_only_whole_records(fd: int) -> None:
    """Each record's values say its number; the writer goes round the ring all the time."""
    writer = SpanArena(fd).writer("loop")
    is_over = threading.Event()

    def write() -> None:
        number = 0
        while not is_over.is_set():
            writer.record(1, number, *([number] * NUM_VALUES))
            number += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        num_seen = 0
        while num_seen < 2000:
            for ring in read_arena(fd):
                numbers = np.arange(ring.first, ring.end)
                assert (ring.records[:, 1:] == numbers[:, None]).all()
                num_seen += len(ring.records)
    finally:
        is_over.set()
        thread.join()


def test_records_outlive_their_writer(fd: int) -> None:
    program = (
        "import os, sys; from procengine.profiling.span_ring import SpanArena; "
        "SpanArena(int(sys.argv[1])).writer('loop').record(1, 42); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", program, str(fd)], pass_fds=(fd,), check=False).returncode == -9
    assert read_arena(fd)[0].records[:, 1].tolist() == [42]


def test_every_kind_has_columns_that_fit() -> None:
    assert set(COLUMNS) == set(RecordKind)
    assert all(0 < len(set(columns)) == len(columns) <= NUM_VALUES for columns in COLUMNS.values())


@pytest.mark.parametrize("request_id", ["", "r1", "ünï", "x" * 64, "y" * 100])
def test_request_ids_ride_along(request_id: str) -> None:
    assert request_id_of(id_words(request_id)) == request_id[:64]


def test_what_a_dead_process_was_at_work_on_is_known_once(fd: int) -> None:
    assert take_noted_key(fd) == NOBODY
    arena = SpanArena(fd)
    arena.note_key(0)
    assert take_noted_key(fd) == 0
    assert take_noted_key(fd) == NOBODY
    arena.note_key(2**40)
    arena.note_key(NOBODY)
    assert take_noted_key(fd) == NOBODY


def test_without_rings_records_are_dropped_and_keys_noted() -> None:
    fd = make_arena("test", 0)
    arena = SpanArena(fd)
    arena.writer("loop").record(1, 2, 3)
    arena.note_key(9)
    assert read_arena(fd) == []
    assert take_noted_key(fd) == 9
    os.close(fd)
