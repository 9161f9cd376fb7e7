"""Reads the header of a GGUF file: metadata, tensor infos, and tensor bytes as views of the mapped file.

Owns: the container format (GGUF versions 2 and 3, little endian; spec: docs/gguf.md of the ggml project).
Never does: dequantise, interpret a key, or copy a tensor. `gguf.GGUFReader` makes a numpy array for every string of the
vocabulary, which takes seconds on a real file; here such arrays are only walked over, and decoded when asked for.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from procengine.errors import ModelError
from procengine.mapped_file import MappedFile

__all__ = ["GGUFFile", "StringArray", "TensorInfo"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MIN_ALIGNMENT = 8
_MAX_DIMS = 8  # ggml allows 4; more than this is garbage, not a newer format
_MAX_DEPTH = 4  # of nested arrays

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {  # gguf_type -> little-endian layout
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in torch order (rows first, the reverse of GGUF's `ne`), in elements."""

    name: str
    shape: tuple[int, ...]
    ggml_type: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    nbytes: int


class StringArray(Sequence[str]):
    """An array of strings that stays undecoded in the file until an element is asked for.

    Raises ModelError on access when a string is not UTF-8.
    """

    def __init__(self, buffer: mmap.mmap, start: int, length: int, where: str) -> None:
        self._buffer = buffer
        self._start = start
        self._length = length
        self._where = where
        self._strings: list[str] | None = None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[str]:
        return iter(self._decoded())

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._decoded()[index]

    def __repr__(self) -> str:
        return f"StringArray({self._where}, {self._length} strings)"

    def _decoded(self) -> list[str]:
        if self._strings is None:
            try:
                self._strings = list(self._decode())
            except UnicodeDecodeError as error:
                raise ModelError(f"{self._where} holds a string that is not UTF-8: {error}") from error
        return self._strings

    def _decode(self) -> Iterator[str]:
        position, buffer, length_at = self._start, self._buffer, _U64.unpack_from
        for _ in range(self._length):
            begin = position + 8
            position = begin + length_at(buffer, position)[0]
            yield buffer[begin:position].decode()


class GGUFFile:
    """A GGUF file, mapped read-only. The views that `tensor_bytes` returns keep the mapping alive.

    `metadata` maps keys to int, float, bool, str, numpy arrays (arrays of numbers) or `StringArray`.
    Raises ModelError when the file cannot be opened, is not GGUF, or ends too early.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path, "GGUF")
        reader = _HeaderReader(self._file.buffer, self.path)
        try:
            self.metadata, self.tensors = reader.read()
        except (struct.error, OverflowError) as error:
            raise ModelError(f"{self.path}: the file ends inside its header (truncated download?)") from error
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: the header holds a string that is not UTF-8: {error}") from error

    def tensor_bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """The raw (possibly quantised) bytes of tensor `name`: a read-only uint8 view [nbytes], no copy.

        Raises ModelError when there is no such tensor.
        """
        info = self.tensors.get(name)
        if info is None:
            raise ModelError(f"{self.path}: there is no tensor {name!r}")
        return self._file.view(info.offset, info.nbytes)

    def release(self, name: str, start: int, nbytes: int) -> None:
        """Give back the memory that reading a part of tensor `name` has taken; it can be read again."""
        self._file.release(self.tensors[name].offset + start, nbytes)


class _HeaderReader:
    """One pass over the header; `position` is the read cursor, in bytes."""

    def __init__(self, buffer: mmap.mmap, path: Path) -> None:
        self.buffer = buffer
        self.path = path
        self.position = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        num_tensors, num_keys = self._read_prologue()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._error(f"key {key!r:.100} is there twice")
            metadata[key] = self._value(self._u32(), key, depth=0)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self._alignment(metadata)
        base = -(-self.position // alignment) * alignment
        tensors = self._placed(infos, base, alignment)
        self._check_overlaps(tensors.values())
        return metadata, tensors

    def _read_prologue(self) -> tuple[int, int]:
        if self.buffer[:4] != _MAGIC:
            raise self._error(f"not a GGUF file: it starts with {self.buffer[:4]!r}, not {_MAGIC!r}")
        self.position = 4
        version = self._u32()
        if version & 0xFFFF == 0:
            raise self._error("big-endian GGUF files are not supported")
        if version not in _VERSIONS:
            raise self._error(f"GGUF version {version} is not supported (supported: {_VERSIONS})")
        num_tensors, num_keys = self._u64(), self._u64()
        if max(num_tensors, num_keys) > len(self.buffer):
            raise self._error(f"{num_tensors} tensors and {num_keys} keys cannot fit in {len(self.buffer)} bytes")
        return num_tensors, num_keys

    def _value(self, gguf_type: int, key: str, depth: int) -> Any:
        layout = _SCALARS.get(gguf_type)
        if layout is not None:
            value = layout.unpack_from(self.buffer, self.position)[0]
            self.position += layout.size
            return value
        if gguf_type == _STRING:
            return self._string()
        if gguf_type == _ARRAY:
            return self._array(key, depth)
        raise self._error(f"key {key!r} has the unknown value type {gguf_type}")

    def _array(self, key: str, depth: int) -> Any:
        item_type, length = self._u32(), self._u64()
        layout = _SCALARS.get(item_type)
        size = layout.size if layout is not None else 8  # a string or an array is at least its length field
        if length * size > len(self.buffer) - self.position:
            raise self._error(f"key {key!r}: an array of {length} elements does not fit (truncated download?)")
        if layout is not None:
            return self._numbers(layout, length)
        if item_type == _STRING:
            return self._strings(key, length)
        if item_type == _ARRAY and depth < _MAX_DEPTH:
            return [self._array(key, depth + 1) for _ in range(length)]
        raise self._error(f"key {key!r} has an array of the unknown type {item_type}")

    def _numbers(self, layout: struct.Struct, length: int) -> npt.NDArray[Any]:
        numbers = np.frombuffer(self.buffer, dtype=np.dtype(layout.format), count=length, offset=self.position)
        self.position += length * layout.size
        return numbers.copy()  # aligned, and free of the mapping

    def _strings(self, key: str, length: int) -> StringArray:
        start = position = self.position
        buffer, length_at = self.buffer, _U64.unpack_from
        for _ in range(length):  # the hot loop of opening a file: ~0.1 us for each of some 100 000 strings
            position += 8 + length_at(buffer, position)[0]
        self._move_to(position)
        return StringArray(buffer, start, length, f"{self.path}: {key}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dims = self._u32()
        if num_dims > _MAX_DIMS:
            raise self._error(f"tensor {name!r} claims {num_dims} dimensions")
        shape = tuple(self._u64() for _ in range(num_dims))[::-1]
        return name, shape, self._u32(), self._u64()

    def _alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < _MIN_ALIGNMENT or alignment & (alignment - 1):
            raise self._error(
                f"general.alignment is {alignment!r:.100}, not a power of two of {_MIN_ALIGNMENT} or more"
            )
        return alignment

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], base: int, alignment: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, shape, raw_type, offset in infos:
            if name in tensors:
                raise self._error(f"tensor {name!r} is there twice")
            if offset % alignment:
                raise self._error(f"tensor {name!r}: offset {offset} is no multiple of the alignment {alignment}")
            info = self._place(name, shape, raw_type, base + offset)
            if info.offset + info.nbytes > len(self.buffer):
                raise self._error(f"tensor {name!r} lies beyond the end of the file (truncated download?)")
            tensors[name] = info
        return tensors

    def _check_overlaps(self, tensors: Iterable[TensorInfo]) -> None:
        end = 0
        for info in sorted(tensors, key=lambda info: (info.offset, info.nbytes)):
            if info.offset < end and info.nbytes:
                raise self._error(f"tensor {info.name!r} overlaps another one, at offset {info.offset}")
            end = max(end, info.offset + info.nbytes)

    def _place(self, name: str, shape: tuple[int, ...], raw_type: int, offset: int) -> TensorInfo:
        try:
            ggml_type = GGMLQuantizationType(raw_type)
        except ValueError:
            raise self._error(f"tensor {name!r} has the unknown ggml type {raw_type}") from None
        block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
        num_elements = 1
        for size in shape:
            num_elements *= size
        if num_elements % block_elements or (shape and shape[-1] % block_elements):
            raise self._error(f"tensor {name!r} of shape {shape} is not whole {ggml_type.name} blocks")
        return TensorInfo(name, shape, ggml_type, offset, num_elements // block_elements * block_bytes)

    def _u32(self) -> int:
        value: int = _U32.unpack_from(self.buffer, self.position)[0]
        self.position += 4
        return value

    def _u64(self) -> int:
        value: int = _U64.unpack_from(self.buffer, self.position)[0]
        self.position += 8
        return value

    def _string(self) -> str:
        length = self._u64()
        begin = self.position
        self._move_to(begin + length)
        return self.buffer[begin : self.position].decode()

    def _move_to(self, position: int) -> None:
        if position > len(self.buffer):
            raise self._error("the file ends inside its header (truncated download?)")
        self.position = position

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")
