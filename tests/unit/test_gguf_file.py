"""GGUFFile against the gguf package's own writer and reader, and on files that are cut short or wrong."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from procengine.errors import ModelError
from procengine.gguf_file import GGUFFile


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("a.u32", 7)
    writer.add_float32("a.f32", 0.5)
    writer.add_bool("a.bool", True)
    writer.add_int64("a.i64", -(1 << 40))
    writer.add_string("a.string", "日本 ok")
    writer.add_array("a.strings", ["x", "", "é" * 200])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.floats", [1.5, 2.5])
    writer.add_tensor("f32", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("f16", np.arange(6, dtype=np.float16).reshape(2, 3))
    q8 = gguf.quants.quantize(
        np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("q8", q8, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(tiny: Path) -> None:
    metadata = GGUFFile(tiny).metadata
    scalars = {key: metadata[f"a.{key}"] for key in ("u32", "f32", "bool", "i64", "string")}
    assert scalars == {"u32": 7, "f32": 0.5, "bool": True, "i64": -(1 << 40), "string": "日本 ok"}
    assert metadata["general.architecture"] == "llama"
    strings = metadata["a.strings"]
    assert len(strings) == 3 and list(strings) == ["x", "", "é" * 200] and strings[-1] == "é" * 200
    assert strings[:2] == ["x", ""]
    assert metadata["a.ints"].tolist() == [1, -2, 3]
    assert metadata["a.floats"].tolist() == [1.5, 2.5]


def test_tensors_equal_those_of_the_gguf_package(tiny: Path) -> None:
    ours = GGUFFile(tiny)
    theirs = gguf.GGUFReader(tiny)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.ggml_type, info.offset, info.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert ours.tensor_bytes(tensor.name).tobytes() == tensor.data.tobytes()


def test_tensor_bytes_are_views_that_outlive_the_file_object(tiny: Path) -> None:
    view = GGUFFile(tiny).tensor_bytes("f32")
    assert not view.flags.owndata and not view.flags.writeable
    assert view.view(np.float32).reshape(3, 4)[2, 3] == 11.0


def test_unknown_tensor_is_named(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny\.gguf.*'nope'"):
        GGUFFile(tiny).tensor_bytes("nope")


def test_every_truncation_is_a_model_error_naming_the_file(tiny: Path, tmp_path: Path) -> None:
    data = tiny.read_bytes()
    end = max(info.offset + info.nbytes for info in GGUFFile(tiny).tensors.values())  # what follows is padding
    cut = tmp_path / "cut.gguf"
    for length in range(end):
        cut.write_bytes(data[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf: "):
            GGUFFile(cut)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(position=st.integers(0, 700), value=st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused_but_never_crashes(
    tiny: Path, tmp_path: Path, position: int, value: int
) -> None:
    data = bytearray(tiny.read_bytes())
    data[position] = value
    path = tmp_path / "flipped.gguf"
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        file = GGUFFile(path)
        for item in file.metadata.values():
            list(item) if hasattr(item, "__iter__") else item
        for name in file.tensors:
            file.tensor_bytes(name)


def header(version: int = 3, num_tensors: int = 0, num_keys: int = 0, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + body


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"\x80\x02abc", "starts with"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(num_tensors=1 << 60), "cannot fit"),
        (header(num_keys=1, body=string("k") + struct.pack("<I", 99)), "'k'.*type 99"),
        (header(num_keys=1, body=string("k") + struct.pack("<IIQ", 9, 8, 1 << 50)), "'k'.*does not fit"),
        (header(num_keys=1, body=string("general.alignment") + struct.pack("<II", 4, 3)), "power of two"),
        (header(num_keys=1, body=struct.pack("<Q", 1 << 63)), "truncated"),
        (header(num_tensors=1, body=string("t") + struct.pack("<IQIQ", 1, 4, 77, 0)), "'t'.*type 77"),
        (header(num_tensors=1, body=string("t") + struct.pack("<IQIQ", 1, 33, 8, 0)), "'t'.*blocks"),
        (header(num_tensors=1, body=string("t") + struct.pack("<IQIQ", 1, 4, 0, 0)), "'t'.*beyond the end"),
        (header(num_tensors=1, body=string("t") + struct.pack("<I", 1000)), "'t'.*1000 dimensions"),
        (
            header(num_keys=1, body=string("general.alignment") + struct.pack("<II", 4, 1)),
            "alignment is 1, not a power",
        ),
        (header(num_keys=2, body=2 * (string("k") + struct.pack("<II", 4, 1))), "'k' is there twice"),
        (header(num_tensors=1, body=string("t") + struct.pack("<IQIQ", 1, 4, 0, 4) + b"\0" * 64), "'t'.*offset 4"),
        (
            header(
                num_tensors=2,
                body=string("t")
                + struct.pack("<IQIQ", 1, 16, 0, 0)
                + string("u")
                + struct.pack("<IQIQ", 1, 4, 0, 32)
                + b"\0" * 128,
            ),
            "'u' overlaps",
        ),
    ],
)
def test_malformed_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=rf"bad\.gguf.*{message}"):
        GGUFFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent"):
        GGUFFile(tmp_path / "absent.gguf")


@pytest.mark.model
def test_real_file_equals_the_gguf_package(smollm2_gguf: Path) -> None:
    ours: Any = GGUFFile(smollm2_gguf)
    theirs = gguf.GGUFReader(smollm2_gguf)
    assert len(ours.tensors) == 272
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.ggml_type, info.offset, info.nbytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        assert list(ours.metadata[key]) == theirs.fields[key].contents()
