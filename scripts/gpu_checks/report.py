"""What was found: rows, the table that is printed last, and the JSON file.

Owns: their form, and the time that parts may take. Never does: measure.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["Budget", "DeviceLostError", "Report", "Row", "Status"]

Status = Literal["ok", "FAIL", "MISS", "skip", "info"]  # MISS: right, and slower than asked


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        result: what a reader wants to know, short.
        values: the same and more, for the file.
    """

    part: str
    what: str
    status: Status
    result: str
    values: dict[str, Any] = field(default_factory=dict)


class DeviceLostError(RuntimeError):
    """A kernel did what no process comes back from (an illegal address, say).

    Attributes:
        begin: where another process may go on in this part.
    """

    def __init__(self, begin: int) -> None:
        super().__init__("nothing more can be done on the device by this process")
        self.begin = begin


class Budget:
    """The seconds that something may take. Parts ask before each measurement and leave out what does not fit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, never negative."""
        return max(0.0, self._end - time.monotonic())

    def has(self, seconds: float = 0.0) -> bool:
        """Whether that much is left."""
        return self.left > seconds


class Report:
    """Rows in the order found. Each is also printed at once, so that a run that is cut short has said what it knew."""

    def __init__(self, facts: dict[str, Any], path: Path | None = None) -> None:
        """`path`: a file that has each row as soon as it is there, however the run ends."""
        self.facts = facts
        self.rows: list[Row] = []
        self._path = path

    def add(self, row: Row) -> None:
        """Take a row in."""
        self.rows.append(row)
        print(f"[{row.part}] {row.what}: {row.status} {row.result}", flush=True)
        self.write()

    @property
    def num_failed(self) -> int:
        """Rows that say FAIL."""
        return sum(row.status == "FAIL" for row in self.rows)

    def table(self) -> str:
        """All rows, in Markdown."""
        cells = [("part", "what", "", "result"), *((r.part, r.what, r.status, r.result) for r in self.rows)]
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        lines = [_line(row, widths) for row in cells]
        lines.insert(1, _line(["-" * width for width in widths] + ["---"], widths))
        return "\n".join(lines)

    def write(self) -> None:
        """The file, if there is to be one."""
        if self._path is not None:
            content = {"facts": self.facts, "rows": [asdict(row) for row in self.rows]}
            self._path.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def _line(row: Sequence[str], widths: Iterable[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
    return "| " + " | ".join([*padded, row[-1]]) + " |"
