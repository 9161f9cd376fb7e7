"""Reads a file of `torch.save` without torch: names, dtypes, shapes, and tensor bytes as views of the mapped file.

Owns: the container (a zip whose records are stored, not compressed) and every check of it against the file's size.
Never does: unpickle (`torch_pickle` reads what the pickle says, and runs nothing), convert or interpret a tensor.
"""

from __future__ import annotations

import math
import struct
import zipfile
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ModelError
from procengine.mapped_file import MappedFile
from procengine.safetensors_file import SAFETENSORS_ITEM_BYTES
from procengine.torch_pickle import StoredTensor, TorchPickleError, read_state_dict

__all__ = ["TorchFile", "TorchTensorInfo"]

_MAX_PICKLE_BYTES: Final = 64_000_000
_LOCAL_HEADER: Final = struct.Struct("<4s22xHH")  # of a zip's record: signature, bytes of its name and of what is extra
_SIGNATURE: Final = b"PK\x03\x04"


class TorchTensorInfo(NamedTuple):
    """Where a tensor lies. `shape` is in elements, rows first; rows follow each other without a gap."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int


class TorchFile:
    """A state dict as `torch.save` writes it since version 1.6, mapped read-only.

    Raises ModelError when the file cannot be opened, is something else, or holds more than names and tensors.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = MappedFile(self.path, "torch")
        self._records = self._read_directory()
        folder = self._folder()
        self._check_byte_order(folder)
        try:
            stored = read_state_dict(self._read(f"{folder}/data.pkl", _MAX_PICKLE_BYTES))
        except TorchPickleError as error:
            raise self._error(f"not read, for it is no plain state dict: {error}") from error
        self.tensors = {name: self._info(name, tensor, folder) for name, tensor in stored.items()}

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Bytes of the file as stored, little-endian: a read-only uint8 view [nbytes], no copy."""
        return self._file.view(offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """Give back the memory that reading these bytes has taken; they can be read again."""
        self._file.release(offset, nbytes)

    def _read_directory(self) -> dict[str, zipfile.ZipInfo]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return {info.filename: info for info in archive.infolist()}
        except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError, struct.error) as error:
            raise self._error(f"not a file of torch.save, or one older than torch 1.6: {error}") from error

    def _folder(self) -> str:
        """Where its records are; the name is that of the file it was saved as."""
        folders = [name.removesuffix("/data.pkl") for name in self._records if name.endswith("/data.pkl")]
        if len(folders) != 1:
            raise self._error("not a file of torch.save: it has no data.pkl")
        return folders[0]

    def _check_byte_order(self, folder: str) -> None:
        name = f"{folder}/byteorder"
        if name in self._records and self._read(name, 64) != b"little":
            raise self._error("its numbers are not little-endian")

    def _read(self, record: str, limit: int) -> bytes:
        start, size = self._record(record)
        if size > limit:
            raise self._error(f"record {record!r:.100} has {size} bytes, at most {limit} are read")
        return bytes(self._file.buffer[start : start + size])

    def _info(self, name: str, tensor: StoredTensor, folder: str) -> TorchTensorInfo:
        if not _is_row_major(tensor):
            raise self._error(f"tensor {name!r}: its rows do not follow each other (strides {tensor.strides})")
        start, size = self._record(f"{folder}/data/{tensor.key}")
        item_bytes = SAFETENSORS_ITEM_BYTES[tensor.dtype]
        offset, nbytes = tensor.offset * item_bytes, math.prod(tensor.shape) * item_bytes
        if offset + nbytes > size:
            raise self._error(f"tensor {name!r}: ends at byte {offset + nbytes} of a record that has {size}")
        return TorchTensorInfo(name, tensor.dtype, tensor.shape, start + offset, nbytes)

    def _record(self, record: str) -> tuple[int, int]:
        """Where the record's bytes begin in the file, and how many there are."""
        info = self._records.get(record)
        if info is None:
            raise self._error(f"there is no record {record!r:.100}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise self._error(f"record {record!r:.100} is compressed")
        header = bytes(self._file.buffer[info.header_offset : info.header_offset + _LOCAL_HEADER.size])
        if len(header) < _LOCAL_HEADER.size or not header.startswith(_SIGNATURE):
            raise self._error(f"record {record!r:.100} is damaged")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if start + info.file_size > len(self._file.buffer):
            raise self._error(f"record {record!r:.100} ends behind the file")
        return start, info.file_size

    def _error(self, message: str) -> ModelError:
        return ModelError(f"{self.path}: {message}")


def _is_row_major(tensor: StoredTensor) -> bool:
    """Whether its elements follow each other, the last dimension first. Strides of a dimension of 1 mean nothing."""
    shape, strides = tensor.shape, tensor.strides
    dense = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    return not math.prod(shape) or all(
        size == 1 or stride == own for size, stride, own in zip(shape, strides, dense, strict=True)
    )
