"""Files of torch.save, read without torch: the same tensors, and nothing but tensors."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from procengine.errors import ModelError
from procengine.models.linear_file import read_linear
from procengine.torch_file import TorchFile


def make_linear(num_outputs: int = 3) -> torch.nn.Linear:
    return torch.nn.Linear(8, num_outputs).requires_grad_(False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "linear.pt"


def rewrite(path: Path, name: str, data: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """The same file with another record `name`."""
    with zipfile.ZipFile(path) as old:
        records = {one: old.read(one) for one in old.namelist()}
    with zipfile.ZipFile(path, "w", compression) as new:
        for one, content in records.items():
            new.writestr(one, data if one.endswith(name) else content)


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_layer_is_what_was_saved(path: Path, dtype: torch.dtype, protocol: int) -> None:
    layer = make_linear().to(dtype)
    torch.save(layer.state_dict(), path, pickle_protocol=protocol)
    found = read_linear(str(path), 8)
    np.testing.assert_array_equal(found.weight, layer.weight.float())
    np.testing.assert_array_equal(found.bias, layer.bias.float())


def test_parameters_views_and_strangers_beside_them(path: Path) -> None:
    whole = torch.arange(24.0).reshape(3, 8)
    torch.save({"weight": torch.nn.Parameter(whole[1:]), "bias": whole[0, 2:4], "epoch": 7, "names": ["a", "b"]}, path)
    found = read_linear(str(path), 8)
    np.testing.assert_array_equal(found.weight, whole[1:])
    np.testing.assert_array_equal(found.bias, whole[0, 2:4])
    assert set(TorchFile(path).tensors) == {"weight", "bias"}


def test_a_layer_without_a_bias_adds_nothing(path: Path) -> None:
    torch.save(torch.nn.Linear(8, 2, bias=False).state_dict(), path)
    assert read_linear(str(path), 8).bias.tolist() == [0.0, 0.0]


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


_SAVED = saved(make_linear().state_dict())


class _Call:
    """Pickled, it asks its reader to make a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


def test_what_a_file_asks_to_call_is_refused_by_name(path: Path, tmp_path: Path) -> None:
    torch.save({"weight": _Call(tmp_path / "called")}, path)
    with pytest.raises(ModelError, match=r"no plain state dict: it wants to call \w+\.mkdir"):
        TorchFile(path)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"weight": torch.ones(2, 8).to_sparse()}, "it wants to call"),
        ([torch.ones(2)], "it holds no map"),
        ({"weight": torch.ones(8, 2).T}, r"its rows do not follow each other \(strides"),
    ],
)
def test_what_is_no_plain_state_dict_is_refused(path: Path, value: object, message: str) -> None:
    torch.save(value, path)
    with pytest.raises(ModelError, match=message):
        TorchFile(path)


def test_older_and_other_files_are_refused(path: Path) -> None:
    torch.save(make_linear().state_dict(), path, _use_new_zipfile_serialization=False)
    with pytest.raises(ModelError, match=r"older than torch 1\.6"):
        TorchFile(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(ModelError, match=r"it has no data\.pkl"):
        TorchFile(path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="it is empty"):
        TorchFile(path)


def test_records_that_do_not_hold_their_tensors_are_refused(path: Path) -> None:
    torch.save(make_linear().state_dict(), path)
    rewrite(path, "/data/0", bytes(95))
    with pytest.raises(ModelError, match="'weight': ends at byte 96 of a record that has 95"):
        TorchFile(path)
    rewrite(path, "/data/0", bytes(96), zipfile.ZIP_DEFLATED)
    with pytest.raises(ModelError, match=r"record .* is compressed"):
        TorchFile(path)
    rewrite(path, "/byteorder", b"big")
    with pytest.raises(ModelError, match="not little-endian"):
        TorchFile(path)


@pytest.mark.parametrize(
    "pickle",
    [
        b"\x80\x02}" + b"(" * 100_000,  # nothing but marks
        b"\x80\x02})" + b"\x85" * 100_000 + b"Ns.",  # a key that nests deep
        b"\x80\x02})" + b"".join(b"q\x01h\x01\x86" for _ in range(64)) + b"Ns.",  # a key of 2^64 parts
        b"\x80\x02)" + b"".join(b"q\x01h\x01\x86" for _ in range(64)) + b"Q.",  # a storage of as many
        b"\x80\x02" + b"\x8a\xff" + b"\xff" * 255 + b"Q.",  # a large number for one
        b"\x80\x02h\x07.",
        b"s.",
        b"",
    ],
    ids=lambda data: repr(data[:12]),
)
def test_a_hostile_pickle_is_refused_at_once(path: Path, pickle: bytes) -> None:
    torch.save(make_linear().state_dict(), path)
    rewrite(path, "/data.pkl", pickle)
    with pytest.raises(ModelError, match="no plain state dict"):
        TorchFile(path)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"bias": torch.ones(3)}, "tensor weight is missing"),
        ({"weight": torch.ones(3, 7)}, "weight has 7 inputs, the model's hidden size is 8"),
        ({"weight": torch.ones(8)}, r"weight has shape \[8\], expected 2 dimensions"),
        ({"weight": torch.ones(3, 8), "bias": torch.ones(2)}, r"bias has shape \[2\], expected \[3\]"),
        ({"weight": torch.ones(3, 8, dtype=torch.int32)}, "weight is stored as I32"),
        ({"weight": torch.ones(2, 8)}, "weight has 2 outputs, must be 3"),
    ],
)
def test_a_layer_of_another_shape_is_refused(path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    torch.save(tensors, path)
    with pytest.raises(ModelError, match=message):
        read_linear(str(path), 8, 3)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_read_or_refused(path: Path, data: st.DataObject) -> None:
    """Whatever a byte is changed to: a ModelError, or tensors that lie within the file."""
    damaged = bytearray(_SAVED)
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=4)):
        damaged[at] = data.draw(st.integers(0, 255))
    path.write_bytes(damaged)
    try:
        tensors = TorchFile(path).tensors
    except ModelError:
        return
    assert all(one.offset + one.nbytes <= len(damaged) for one in tensors.values())


def test_torch_is_not_loaded(path: Path) -> None:
    torch.save(make_linear().state_dict(), path)
    code = (
        "import sys; from procengine.models.linear_file import read_linear; read_linear(sys.argv[1], 8); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
