"""Span rings: fixed-size records in shared memory, written by the processes of a group and read from outside.

Owns: the layout of the memory. Never does: read a clock, or know what a record means (`records`).

A process has one arena, a memory file that its supervisor made and keeps open. The arena holds one ring for each
thread that writes, so that no lock is needed; a write is one `pack_into` and one store of the count (about half a
microsecond). A reader maps the same memory: it costs the writer nothing, starts and stops unnoticed, and still finds
everything when the writer has died.

    arena  = header (64 bytes), then rings
    header = "PESPANS1", int64 rings, int64 capacity (records a ring), int64 key at work (`note_key`), zeros
    ring   = int64 count (records ever written), 56 bytes name (UTF-8, zeros behind), then `capacity` records
    record = 16 int64: kind, key, up to 14 values
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "NAME_PREFIX",
    "NOBODY",
    "NUM_VALUES",
    "RECORD_WORDS",
    "RingSnapshot",
    "SpanArena",
    "SpanWriter",
    "has_rings",
    "make_arena",
    "map_arena",
    "read_arena",
    "read_mapped_arena",
    "take_noted_key",
]

RECORD_WORDS: Final = 16
NUM_VALUES: Final = RECORD_WORDS - 2
_RECORD_BYTES: Final = 8 * RECORD_WORDS
_MAGIC: Final = b"PESPANS1"
_HEADER: Final = struct.Struct("<8sqq40x")
_RING_HEADER: Final = struct.Struct("<q56s")
_COUNT: Final = struct.Struct("<q")
_NOTED: Final = struct.Struct("<q")  # a request's key + 1, so that the zeros of a new arena are nobody's
_NOTED_AT: Final = 24
NOBODY: Final = -1
_MAX_RINGS: Final = 4
NAME_PREFIX: Final = "procengine-spans-"  # of memory files; the process's name follows


class SpanWriter(Protocol):
    """Takes records. One thread alone writes to it."""

    def record(self, kind: int, key: int, *values: int) -> None:
        """Write a record of at most 14 `values`; the oldest one makes room."""
        ...


_PACK_BY_NUM_VALUES: Final = [struct.Struct(f"<{2 + number}q").pack_into for number in range(NUM_VALUES + 1)]


class _Ring:
    """The ring of one thread. Words behind a short record keep what was there: its kind says how many count."""

    __slots__ = ("_buffer", "_count", "_first_record", "_mask", "_pack_count", "_start")

    def __init__(self, buffer: mmap.mmap, start: int, capacity: int) -> None:
        self._buffer = buffer
        self._count = _COUNT.unpack_from(buffer, start)[0]  # a process that was restarted goes on where it had been
        self._start = start
        self._first_record = start + _RING_HEADER.size
        self._mask = capacity - 1
        self._pack_count = _COUNT.pack_into

    def record(self, kind: int, key: int, *values: int) -> None:
        count = self._count
        at = self._first_record + (count & self._mask) * _RECORD_BYTES
        _PACK_BY_NUM_VALUES[len(values)](self._buffer, at, kind, key, *values)
        self._count = count + 1
        self._pack_count(self._buffer, self._start, count + 1)  # behind the record: what is counted is complete


class _Nowhere:
    """Takes records and drops them."""

    def record(self, kind: int, key: int, *values: int) -> None:
        pass


class SpanArena:
    """The writing end, in the process whose spans these are. `fd` None: spans are off, what is written is dropped."""

    def __init__(self, fd: int | None) -> None:
        self._buffer = mmap.mmap(fd, 0) if fd is not None else None

    def writer(self, name: str) -> SpanWriter:
        """The ring called `name`, for one thread; a free one the first time.

        Raises:
            ValueError: there is none free.
        """
        if self._buffer is None:
            return _Nowhere()
        _, num_rings, capacity = _HEADER.unpack_from(self._buffer)
        if not num_rings:
            return _Nowhere()
        for number in range(num_rings):
            start = _ring_start(number, capacity)
            count, taken = _RING_HEADER.unpack_from(self._buffer, start)
            if taken.rstrip(b"\0") not in (b"", name.encode()):
                continue
            _RING_HEADER.pack_into(self._buffer, start, count, name.encode())
            return _Ring(self._buffer, start, capacity)
        raise ValueError(f"no ring is free for {name!r}: an arena has {num_rings}")

    def note_key(self, key: int) -> None:
        """From here on the process is at work on this request, or on NOBODY's: whoever asks why it died may know."""
        if self._buffer is not None:
            _NOTED.pack_into(self._buffer, _NOTED_AT, key + 1)


def make_arena(process: str, capacity: int) -> int:
    """A memory file for the spans of `process`, with `capacity` records (a power of two) a thread. Its descriptor.

    Pages that are never written take no memory. Without capacity there are no rings, and records are dropped.
    """
    assert capacity & (capacity - 1) == 0, capacity
    num_rings = _MAX_RINGS if capacity else 0
    fd = os.memfd_create(NAME_PREFIX + process)
    os.ftruncate(fd, _ring_start(num_rings, capacity))
    os.pwrite(fd, _HEADER.pack(_MAGIC, num_rings, capacity), 0)
    return fd


def take_noted_key(fd: int) -> int:
    """The request that the process of an arena was at work on when it died, or NOBODY; its successor begins anew."""
    (noted,) = _NOTED.unpack(os.pread(fd, _NOTED.size, _NOTED_AT))
    os.pwrite(fd, _NOTED.pack(0), _NOTED_AT)
    return int(noted) - 1


@dataclass(frozen=True, slots=True)
class RingSnapshot:
    """What a ring held at one moment.

    Attributes:
        thread: the ring's name.
        first: number of the first record here, counted from the ring's beginning.
        records: int64 [n, 16], oldest first: kind, key, values.
    """

    thread: str
    first: int
    records: NDArray[np.int64]

    @property
    def end(self) -> int:
        """Number of the record that will be written next: where the next snapshot goes on."""
        return self.first + len(self.records)


def read_arena(fd: int, since: dict[str, int] | None = None) -> list[RingSnapshot]:
    """The rings of an arena that somebody writes to, consistent although nobody waits for us.

    Args:
        fd: of the memory file.
        since: by ring name, the number of the first record wanted.

    Raises:
        ValueError: it is no arena.
    """
    with map_arena(fd) as buffer:
        return read_mapped_arena(buffer, since)


def map_arena(fd: int) -> mmap.mmap:
    """The memory of an arena, to read it more than once; the descriptor may be closed."""
    return mmap.mmap(fd, 0, prot=mmap.PROT_READ)


def has_rings(buffer: mmap.mmap) -> bool:
    """Whether the process of a mapped arena keeps spans."""
    _, num_rings, _ = _HEADER.unpack_from(buffer)
    return bool(num_rings)


def read_mapped_arena(buffer: mmap.mmap, since: dict[str, int] | None = None) -> list[RingSnapshot]:
    """The same as `read_arena`, of memory that is mapped."""
    magic, num_rings, capacity = _HEADER.unpack_from(buffer)
    if magic != _MAGIC:
        raise ValueError("not an arena of spans")
    rings = (_read_ring(buffer, _ring_start(number, capacity), capacity, since or {}) for number in range(num_rings))
    return [ring for ring in rings if ring is not None]


def _read_ring(buffer: mmap.mmap, start: int, capacity: int, since: dict[str, int]) -> RingSnapshot | None:
    end, name = _RING_HEADER.unpack_from(buffer, start)
    thread = name.rstrip(b"\0").decode()
    if not thread:
        return None
    first = max(end - capacity, since.get(thread, 0), 0)
    view = np.frombuffer(buffer, np.int64, capacity * RECORD_WORDS, start + _RING_HEADER.size)
    records = view.reshape(capacity, RECORD_WORDS)[np.arange(first, end) & (capacity - 1)]
    del view  # it holds the map open
    # What was overwritten while we copied, the record being written included, is not what its number says.
    first_intact = _COUNT.unpack_from(buffer, start)[0] + 1 - capacity
    num_lost = min(max(first_intact - first, 0), end - first)
    return RingSnapshot(thread, first + num_lost, records[num_lost:])


def _ring_start(number: int, capacity: int) -> int:
    return _HEADER.size + number * (_RING_HEADER.size + capacity * _RECORD_BYTES)
