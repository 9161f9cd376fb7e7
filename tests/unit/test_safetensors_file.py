"""SafetensorsFile against the format's own writer, and on headers that lie."""

from __future__ import annotations

import json
import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from procengine.errors import ModelError
from procengine.safetensors_file import SafetensorsFile
from tests.mangling import mangled

TENSORS: dict[str, np.ndarray[Any, Any]] = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6, dtype=np.float16),
    "empty": np.zeros((0, 7), np.int8),
    "scalar": np.array(7, np.int64),
}


def write(path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    """A file with this header (JSON, or bytes as they are) before `data`."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("safetensors") / "good.safetensors"
    save_file(TENSORS, path, metadata={"format": "np", "shape": "a text of that name"})
    return path


def test_what_the_formats_own_writer_wrote_is_read(good: Path) -> None:
    file = SafetensorsFile(good)
    assert file.metadata == {"format": "np", "shape": "a text of that name"}
    assert file.tensors.keys() == TENSORS.keys()
    dtypes = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "I64": np.int64}
    for name, expected in TENSORS.items():
        info, view = file.tensors[name], file.tensor_bytes(name)
        assert np.array_equal(view.view(dtypes[info.dtype]).reshape(info.shape), expected)
        assert not view.flags.writeable
        file.release(info.offset, info.nbytes)
        assert view.tobytes() == expected.tobytes()
    with pytest.raises(ModelError, match=r"good\.safetensors.*'nope'"):
        file.tensor_bytes("nope")


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


WRONG: list[tuple[str, Any, str]] = [
    ("not JSON", b"{", "header"),
    ("not UTF-8", b'{"\xff": {}}', "header"),
    ("a list", [], "header"),
    ("deep", b'{"a":' + b"[" * 5000, "header"),
    ("an entry that is a number", {"t": 7}, "header"),
    ("an entry of objects", {"t": {"dtype": {}}}, "header"),
    ("no dtype", {"t": {"shape": [2], "data_offsets": [0, 8]}}, "'t'.*dtype"),
    ("something more", {"t": {**entry(), "x": "y"}}, "'t'.*'x'"),
    ("metadata of lists", {"__metadata__": {"a": [1]}, "t": entry()}, "__metadata__"),
    ("unknown dtype", {"t": entry("F7")}, "'t'.*dtype 'F7'"),
    ("dtype a list", {"t": entry([1])}, "'t'.*dtype"),
    ("shape a text", {"t": entry(shape="2")}, "'t'.*shape"),
    ("negative size", {"t": entry(shape=[-1, -2])}, "'t'.*shape.*-1"),
    ("a fraction", {"t": entry(shape=[2.5])}, "header"),
    ("true as a size", {"t": entry(shape=[True])}, "header"),
    ("nine sizes", {"t": entry(shape=[1] * 8 + [2])}, "'t'.*shape"),
    ("sizes whose product overflows", {"t": entry(shape=[2**32, 2**32, 0, 2**63])}, "'t'.*0 bytes"),
    ("huge", {"t": entry(shape=[2**62])}, "'t'.*bytes"),
    ("one offset", {"t": entry(offsets=[0])}, "'t'.*data_offsets"),
    ("backwards", {"t": entry(offsets=[8, 0])}, "'t'.*data_offsets"),
    ("negative offset", {"t": entry(offsets=[-8, 0])}, "'t'.*data_offsets"),
    ("beyond the end", {"t": entry(shape=[4], offsets=[0, 16])}, "'t'.*beyond.*truncated"),
    ("far beyond the end", {"t": entry(offsets=[2**64, 2**64 + 8])}, "'t'|header"),
    ("shape and offsets differ", {"t": entry(shape=[1])}, "'t'.*4 bytes.*8"),
    ("overlap", {"t": entry(), "u": entry("F16", offsets=[4, 8])}, "'u'.*overlaps"),
    ("the same bytes twice", {"t": entry(), "u": entry()}, "overlaps"),
    ("a hole", {"t": entry("U8", [1], [0, 1]), "u": entry("U8", [6], [2, 8])}, "'u'.*hole"),
    ("bytes of nobody", {"t": entry("F16", [2], [0, 4])}, "4 bytes at its end"),
]


@pytest.mark.parametrize(("header", "named"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_a_header_that_lies_is_an_error_naming_file_and_field(tmp_path: Path, header: Any, named: str) -> None:
    with pytest.raises(ModelError, match=rf"x\.safetensors: .*({named})") as raised:
        SafetensorsFile(write(tmp_path / "x.safetensors", header))
    assert len(str(raised.value)) < 1000


def test_a_length_beyond_the_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for content in (b"", b"\0" * 7, b"\xff" * 8, (2**63).to_bytes(8, "little") + b"{}", b"\x03" + b"\0" * 7 + b"{}"):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=r"x\.safetensors: not a safetensors file"):
            SafetensorsFile(path)
    with pytest.raises(ModelError, match="cannot be opened"):
        SafetensorsFile(tmp_path)


def test_whatever_is_changed_in_a_file_it_is_read_or_refused_and_takes_no_more_memory_than_itself(
    good: Path, tmp_path: Path
) -> None:
    rnd, data, path = random.Random(7), good.read_bytes(), tmp_path / "x.safetensors"
    num_read, errors = 0, set()
    tracemalloc.start()
    try:
        for _ in range(4000):
            path.write_bytes(mangled(rnd, data))
            try:
                file = SafetensorsFile(path)
            except ModelError as error:
                errors.add(str(error))
                continue
            num_read += 1
            assert sum(file.tensor_bytes(name).size for name in file.tensors) <= path.stat().st_size
        assert 0 < num_read < 3000  # a change may well do no harm: of a name, or behind the header
        assert len(errors) > 100 and all(error.startswith(f"{path}: ") for error in errors)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
