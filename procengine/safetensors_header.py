"""Reads the header of a safetensors file.

Owns: the container format (the safetensors project's README, "Format") and its checks: a header that does not fit its
file is an error before anything is read. Never does: read a tensor, or load numpy; nor torch, which the `safetensors`
package needs for bfloat16.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from procengine.errors import ModelError

__all__ = ["SafetensorsInfo", "read_header"]

_MAX_HEADER = 100 << 20  # as the format's own library
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class SafetensorsInfo(NamedTuple):
    """Where a tensor lies. `dtype` is the format's own name: "F32", "BF16", ..."""

    shape: tuple[int, ...]
    dtype: str
    offset: int  # bytes from the start of the file
    nbytes: int


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_header(path: Path) -> dict[str, SafetensorsInfo]:
    """The tensors of a file by name, in the header's order, checked against the file's size.

    Raises ModelError naming the file, and the tensor if one is wrong.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            (length,) = struct.unpack("<Q", file.read(8))
            if length > min(_MAX_HEADER, size - 8):
                raise ModelError(f"cannot read {path}: not a safetensors file, or cut off: a header of {length} bytes")
            entries = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
            entries.pop("__metadata__", None)
            found = msgspec.convert(entries, dict[str, _Entry])
    except (OSError, struct.error, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {path}: not a safetensors file: {error}") from error
    return {name: _placed(path, name, entry, 8 + length, size) for name, entry in found.items()}


def _placed(path: Path, name: str, entry: _Entry, start: int, file_size: int) -> SafetensorsInfo:
    begin, end = entry.data_offsets
    bits = _BITS.get(entry.dtype)
    if bits is None:
        raise ModelError(f"{path}: tensor {name} has the unknown type {entry.dtype!r}")
    num_bytes = end - begin
    if min(entry.shape, default=0) < 0 or math.prod(entry.shape) * bits != 8 * num_bytes:
        raise ModelError(f"{path}: tensor {name}, {entry.dtype} of shape {entry.shape}, is not {num_bytes} bytes long")
    if begin < 0 or start + end > file_size:
        raise ModelError(f"{path}: tensor {name} lies beyond the end of the file (truncated download?)")
    return SafetensorsInfo(tuple(entry.shape), entry.dtype, start + begin, num_bytes)
