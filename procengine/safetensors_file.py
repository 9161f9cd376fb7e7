"""Reads the header of a safetensors file: names, dtypes, shapes, and tensor bytes as views of the mapped file.

Owns: the container format (u64 length, that many bytes of JSON, then the tensors without a hole between them) and every
check of it against the file's size. Never does: convert, copy or interpret a tensor. Nothing is allocated from a number
in the file: what a header claims is compared with what is there before anything is made of it.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from procengine.errors import ModelError
from procengine.mapped_file import MappedFile

__all__ = ["SAFETENSORS_ITEM_BYTES", "SafetensorsFile", "SafetensorsInfo"]

# Bytes of one element. Those below a byte are no dtype that anything here reads; a file that has one is refused.
SAFETENSORS_ITEM_BYTES: Final = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}
_MAX_HEADER_BYTES: Final = 100_000_000  # as the format's own reader
_MAX_DIMS: Final = 8
_LENGTH: Final = struct.Struct("<Q")
_METADATA: Final = "__metadata__"
_KEYS: Final = {"dtype", "shape", "data_offsets"}

_Entry = dict[str, str | list[int]]  # of a tensor; of `__metadata__`, texts only
_decode_header = msgspec.json.Decoder(dict[str, _Entry]).decode


class SafetensorsInfo(NamedTuple):
    """Where a tensor lies. `shape` is in elements, rows first."""

    name: str
    dtype: str  # a key of SAFETENSORS_ITEM_BYTES
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class SafetensorsFile:
    """A safetensors file, mapped read-only. The views that `tensor_bytes` returns keep the mapping alive.

    `tensors` are in the order of the file, `metadata` are its texts.
    Raises ModelError when the file cannot be opened, or its header does not describe exactly what is behind it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path, "safetensors")
        self._buffer = self._file.buffer
        header, start = self._read_header()
        self.metadata = self._texts(header.pop(_METADATA, {}))
        infos = sorted((self._info(name, entry, start) for name, entry in header.items()), key=_place)
        self._check_order(infos, start)
        self.tensors = {info.name: info for info in infos}

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """All bytes of tensor `name`, as `bytes_at`. Raises ModelError when there is no such tensor."""
        info = self.tensors.get(name)
        if info is None:
            raise self._error(f"there is no tensor {name!r}")
        return self.bytes_at(info.offset, info.nbytes)

    def bytes_at(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of the file as stored, little-endian: a read-only uint8 view [nbytes], no copy."""
        return self._file.view(offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Give back the memory that reading these bytes has taken; they can be read again."""
        self._file.release(offset, nbytes)

    def _read_header(self) -> tuple[dict[str, _Entry], int]:
        """The header as it is written, and where the tensors start."""
        size = len(self._buffer)
        if size < _LENGTH.size:
            raise self._error(f"not a safetensors file: it has {size} bytes")
        (length,) = _LENGTH.unpack_from(self._buffer)
        start = _LENGTH.size + length
        if start > size:
            raise self._error(
                f"not a safetensors file, or one that was cut off: its header is to have {length} bytes, "
                f"the file has {size - _LENGTH.size} behind the length"
            )
        if length > _MAX_HEADER_BYTES:
            raise self._error(f"the header has {length} bytes, the format allows {_MAX_HEADER_BYTES}")
        try:
            return _decode_header(self._buffer[_LENGTH.size : start]), start
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise self._error(f"not a safetensors file: its header: {error}") from error

    def _texts(self, entry: _Entry) -> dict[str, str]:
        texts = {key: value for key, value in entry.items() if isinstance(value, str)}
        if len(texts) < len(entry):
            raise self._error(f"{_METADATA} must map texts to texts")
        return texts

    def _info(self, name: str, entry: _Entry, start: int) -> SafetensorsInfo:
        if entry.keys() != _KEYS:
            raise self._error(
                f"tensor {name!r} must have exactly dtype, shape and data_offsets, it has {_names(entry)}"
            )
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        item_bytes = SAFETENSORS_ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
        if item_bytes is None:
            raise self._error(f"tensor {name!r}: dtype {dtype!r:.100} is not known")
        if isinstance(shape, str) or len(shape) > _MAX_DIMS or any(size < 0 for size in shape):
            shown = f"{shape!r:.100}"
            raise self._error(f"tensor {name!r}: shape must be at most {_MAX_DIMS} sizes of 0 or more, got {shown}")
        if isinstance(offsets, str) or len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
            raise self._error(f"tensor {name!r}: data_offsets must be a beginning and an end, got {offsets!r:.100}")
        begin, end = offsets
        if end > len(self._buffer) - start:
            available = len(self._buffer) - start
            raise self._error(
                f"tensor {name!r}: data_offsets end at {end}, beyond the {available} bytes of tensors in the file "
                "(truncated download?)"
            )
        nbytes = math.prod(shape) * item_bytes
        if nbytes != end - begin:
            raise self._error(
                f"tensor {name!r}: shape {shape} of {dtype} takes {nbytes} bytes, data_offsets give it {end - begin}"
            )
        return SafetensorsInfo(name, str(dtype), tuple(shape), start + begin, nbytes)

    def _check_order(self, infos: list[SafetensorsInfo], start: int) -> None:
        """The tensors cover everything behind the header, each byte once: nothing overlaps, nothing is hidden."""
        position = start
        for info in infos:
            if info.offset != position:
                what = "overlaps the one before it" if info.offset < position else "leaves a hole before it"
                raise self._error(f"tensor {info.name!r}: data_offsets begin at {info.offset - start}: it {what}")
            position += info.nbytes
        if position != len(self._buffer):
            raise self._error(f"{len(self._buffer) - position} bytes at its end belong to no tensor")

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")


def _place(info: SafetensorsInfo) -> tuple[int, int]:
    return info.offset, info.nbytes


def _names(entry: _Entry) -> str:
    return f"{', '.join(map(repr, entry)) or 'nothing':.200}"
