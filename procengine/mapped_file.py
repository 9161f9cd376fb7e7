"""`MappedFile`: a file in memory, read-only, of which pages can be given back.

Owns: the mapping. Never does: know what the bytes mean.
"""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ModelError

__all__ = ["MappedFile"]


class MappedFile:
    """Views of it keep the mapping alive. `kind` is what the file should be, for the error.

    Raises ModelError when the file cannot be opened or is empty.
    """

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be opened: {error.strerror or error}") from error
        except ValueError as error:  # an empty file cannot be mapped
            raise ModelError(f"{path}: not a {kind} file: it is empty") from error

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Read-only uint8 [nbytes], no copy."""
        return np.frombuffer(self.buffer, np.uint8, nbytes, offset)

    def release(self, offset: int, nbytes: int) -> None:
        """Give back the memory that reading these bytes has taken; they can be read again."""
        if nbytes:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self.buffer.madvise(mmap.MADV_DONTNEED, start, offset + nbytes - start)
