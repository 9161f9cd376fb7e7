"""Safetensors files: what the format's own library writes, and headers that do not fit their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from procengine.errors import ModelError
from procengine.mapped_file import MappedFile
from procengine.safetensors_header import read_header

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_of_every_type_are_where_the_formats_own_library_put_them(tmp_path: Path) -> None:
    tensors = {name: torch.randint(0, 2, (3, 5)).to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file, infos = MappedFile(tmp_path / "x.safetensors"), read_header(tmp_path / "x.safetensors")
    assert set(infos) == set(tensors)
    for name, tensor in tensors.items():
        info = infos[name]
        assert (info.shape, info.nbytes) == (tuple(tensor.shape), tensor.numel() * tensor.itemsize)
        assert info.dtype == (name if name in DTYPES else "F32")
        if tensor.numel():
            own = tensor.reshape(-1).view(torch.uint8).numpy()
            assert np.array_equal(file.view(info.offset, info.nbytes), own)


def test_pages_that_were_given_back_can_be_read_again(tmp_path: Path) -> None:
    save_file({"x": torch.arange(50000)}, tmp_path / "x.safetensors")
    file, info = MappedFile(tmp_path / "x.safetensors"), read_header(tmp_path / "x.safetensors")["x"]
    for start, size in ((0, info.nbytes), (4096, 10000), (info.nbytes - 8, 8)):
        view = file.view(info.offset, info.nbytes)
        file.release(info.offset + start, size)
        assert np.array_equal(view.copy().view(np.int64), np.arange(50000))


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"\xff{}", b"", "not a safetensors file"),
        (b"[]", b"", "not a safetensors file"),
        ({"w": {"dtype": "F32"}}, b"", "not a safetensors file"),
        ({"w": {**ENTRY, "shape": "2"}}, b"12345678", "not a safetensors file"),
        ({"w": ENTRY}, b"1234567", "tensor w lies beyond the end of the file"),
        ({"w": {**ENTRY, "data_offsets": [-8, 0]}}, b"12345678", "tensor w lies beyond"),
        ({"w": {**ENTRY, "shape": [3]}}, b"12345678", r"tensor w, F32 of shape \[3\], is not 8 bytes long"),
        ({"w": {**ENTRY, "shape": [-1, -2]}}, b"12345678", r"tensor w, F32 of shape \[-1, -2\]"),
        ({"w": {**ENTRY, "data_offsets": [8, 0]}}, b"12345678", "tensor w, F32"),
        ({"w": {**ENTRY, "dtype": "F31"}}, b"12345678", "tensor w has the unknown type 'F31'"),
    ],
)
def test_a_header_that_does_not_fit_is_an_error_that_names_file_and_tensor(
    header: Any, data: bytes, message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "x.safetensors", header, data)
    with pytest.raises(ModelError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234", b"\xff" * 30, (1000).to_bytes(8, "little") + b"{}"])
def test_a_file_that_is_cut_off_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_header(path)
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_header(tmp_path / "absent.safetensors")
