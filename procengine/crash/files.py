"""The directory of crash records: private, and bounded in number.

Owns: the names of the files and which go. Never does: raise for a full disk: a record is worth less than the group.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

__all__ = ["SUFFIX", "store_record"]

SUFFIX: Final = ".crash"


def store_record(folder: Path, name: str, data: bytes, max_files: int) -> tuple[Path | None, str]:
    """Write `data` to a new file called `name`; the oldest ones go. Returns its path, or None and what went wrong."""
    path = folder / f"{name}{SUFFIX}"
    draft = path.with_suffix(".draft")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(folder, max_files - 1)
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        draft.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        return None, f"{path}: {error.strerror or error}"
    return path, ""


def _make_room(folder: Path, max_files: int) -> None:
    files = sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    for path in files[: max(0, len(files) - max_files)]:
        path.unlink(missing_ok=True)
