"""`SpanReader`: the spans of a running group, as tables.

Owns: finding the memory of a group's processes, and the table of each kind of record. Never does: ask a process of the
group for anything: it reads memory that they write anyway.

The supervisor holds the memory files of all its children open, under names that say whose they are, so whoever may look
at its descriptors (the same user) can map them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from procengine.profiling.records import COLUMNS, RecordKind
from procengine.profiling.span_ring import NAME_PREFIX, has_rings, map_arena, read_mapped_arena

__all__ = ["SpanReader", "SpanTables", "Table"]

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Table:
    """Records of one kind, in the order they were written: `table["sent_ns"]` is int64 [n]."""

    kind: RecordKind
    rows: Int64s  # [n, 1 + columns]: key, then the columns

    def __getitem__(self, column: str) -> Int64s:
        """One column; "key" is the key."""
        return self.rows[:, 0 if column == "key" else 1 + COLUMNS[self.kind].index(column)]

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, selected: NDArray[np.bool_] | NDArray[np.int64]) -> Table:
        """Some of the rows: bool [n], or their indices."""
        return Table(self.kind, self.rows[selected])


@dataclass(frozen=True, slots=True)
class SpanTables:
    """What a group noted about itself in some stretch of time. A kind of which there is nothing has an empty table.

    Attributes:
        tables: by kind. Records that several processes write (those of workers) follow each other process by process.
        num_lost: records that were overwritten before they were read.
    """

    tables: dict[RecordKind, Table]
    num_lost: int = 0

    def __getitem__(self, kind: RecordKind) -> Table:
        return self.tables[kind]

    @classmethod
    def of(cls, records: list[Int64s], num_lost: int = 0) -> Self:
        """From raw records, int64 [n, 16] each."""
        joined = np.concatenate(records) if records else np.zeros((0, 16), np.int64)
        tables = {}
        for kind, columns in COLUMNS.items():
            tables[kind] = Table(kind, joined[joined[:, 0] == kind][:, 1 : 2 + len(columns)])
        return cls(tables, num_lost)

    def since(self, begin_ns: int) -> SpanTables:
        """The records whose last time is `begin_ns` or later."""
        tables = {}
        for kind, table in self.tables.items():
            last = [name for name in COLUMNS[kind] if name.endswith("_ns")][-1]
            tables[kind] = table.where(table[last] >= begin_ns)
        return SpanTables(tables, self.num_lost)

    def joined(self, *later: SpanTables) -> SpanTables:
        """These and what was read after them."""
        tables = {
            kind: Table(kind, np.concatenate((table.rows, *(part[kind].rows for part in later))))
            for kind, table in self.tables.items()
        }
        return SpanTables(tables, self.num_lost + sum(part.num_lost for part in later))


@dataclass(slots=True)
class SpanReader:
    """Reads what is new since it was asked the last time. `supervisor_pid` is the group's."""

    supervisor_pid: int
    _since: dict[str, dict[str, int]] = field(default_factory=dict)
    _arenas: dict[str, _Arena] = field(default_factory=dict)

    def read(self) -> SpanTables:
        """All records written since the last call (the first one: all that the rings hold).

        Raises:
            OSError: the group is gone, or belongs to another user.
        """
        self._find_arenas()
        return self.read_last()

    def read_last(self) -> SpanTables:
        """The same, of a group that may be gone: what was seen by `read` is still there, to its last record."""
        records, num_lost = [], 0
        for process, arena in self._arenas.items():
            since = self._since.setdefault(process, {})
            for ring in read_mapped_arena(arena.buffer, since):
                if ring.thread in since:
                    num_lost += ring.first - since[ring.thread]
                since[ring.thread] = ring.end
                records.append(ring.records)
        return SpanTables.of(records, num_lost)

    @property
    def num_processes(self) -> int:
        """Processes whose rings were found so far. None: the group keeps no spans."""
        return sum(has_rings(arena.buffer) for arena in self._arenas.values())

    def skip(self) -> None:
        """Begin here: what was written so far is not wanted."""
        self.read()

    def _find_arenas(self) -> None:
        directory = Path(f"/proc/{self.supervisor_pid}/fd")
        for entry in sorted(directory.iterdir(), key=lambda path: int(path.name)):
            with contextlib.suppress(FileNotFoundError):  # closed while we look: the supervisor goes on with its work
                if _arena_name(entry) is not None:
                    self._map(entry)

    def _map(self, entry: Path) -> None:
        fd = os.open(entry, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            process = _arena_name(Path(f"/proc/self/fd/{fd}"))  # again: the number may have become another file's
            inode = os.fstat(fd).st_ino
            if process is not None and (process not in self._arenas or self._arenas[process].inode != inode):
                self._arenas[process] = _Arena(inode, map_arena(fd))
        finally:
            os.close(fd)


def _arena_name(entry: Path) -> str | None:
    """Whose arena a descriptor is; None if it is none."""
    name = str(entry.readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")
    return name.removeprefix(NAME_PREFIX) if name.startswith(NAME_PREFIX) else None


class _Arena(NamedTuple):
    inode: int
    buffer: mmap.mmap
