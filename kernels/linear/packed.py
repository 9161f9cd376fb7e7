"""Weights in the layouts that the native kernels read: integers of 8 or 4 bits with fp16 scales, or bf16.

Owns: their formats and memory, and the ways into and out of them. Never does: multiply; `native.py` does. The layouts
are described in `kernels/native/quant.h`. Free of torch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ConfigError
from procengine.kernels.native.arguments import FLOAT_IDS, address
from procengine.kernels.native.library import native_function
from procengine.kernels.native.zeroed_memory import zeroed_memory

__all__ = ["GGML_FORMATS", "LARGEST_BY_TILES", "PackedFormat", "PackedMatrix", "WeightMemory", "gate_up_order"]

PANEL = 32  # outputs that lie together
LARGEST_BY_TILES = 255.0  # what AMX multiplies in the place of integers (`gemm_amx.cpp`)
_ALIGNMENT = 64

_FORMAT_IDS = {"int8": 0, "int4": 1, "bf16": 2}
_BITS = {"int8": 8, "int4": 4, "bf16": 16}

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a matrix [N, K] is stored. K must be a multiple of 32 and of `group`.

    Integers stand for w = scale * q, or scale * q + min with `mins`, and meet activations that are quantised to int8
    with a scale for each `group` consecutive values of a row. Weights have theirs for the same groups, or with
    `channel_scales` one for each output.
    """

    kind: Literal["int8", "int4", "bf16"]
    group: int = 32
    mins: bool = False
    channel_scales: bool = False

    def __post_init__(self) -> None:
        if self.kind != "bf16" and (self.group < 16 or self.group % 16):
            raise ConfigError(f"a packed matrix's group must be a multiple of 16, not {self.group}")
        if self.mins and (self.channel_scales or self.kind == "bf16"):
            raise ConfigError("a packed matrix with mins must be of integers, with a scale for each group")

    def check(self, outputs: int, inputs: int) -> None:
        """Raise ConfigError for a matrix that cannot be stored so."""
        multiple = 32 if self.kind == "bf16" else max(32, self.group)
        if outputs < 1 or inputs < 1 or inputs % 32 or (self.kind != "bf16" and inputs % self.group):
            raise ConfigError(
                f"a packed {self.kind} matrix must be [N, multiple of {multiple}], not {outputs}x{inputs}"
            )

    def sections(self, outputs: int, inputs: int) -> tuple[int, int, int]:
        """Bytes of values, scales and mins, each a multiple of 64."""
        self.check(outputs, inputs)
        padded = -(-outputs // PANEL) * PANEL
        values = padded * inputs * _BITS[self.kind] // 8
        if self.kind == "bf16":
            return values, 0, 0
        scales = padded * 2 if self.channel_scales else padded * (inputs // self.group) * 2
        return values, scales, scales if self.mins else 0


# What holds each of ggml's types without loss (K-quants: their scales, products of two, are rounded to fp16).
GGML_FORMATS: dict[str, PackedFormat] = {
    "Q4_0": PackedFormat("int4"),
    "Q4_1": PackedFormat("int4", mins=True),
    "Q5_0": PackedFormat("int8"),
    "Q5_1": PackedFormat("int8", mins=True),
    "Q8_0": PackedFormat("int8"),
    "Q4_K": PackedFormat("int4", mins=True),
    "Q5_K": PackedFormat("int8", mins=True),
    "Q6_K": PackedFormat("int8", group=16),
}
_GGML_IDS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
_GGML_BLOCKS = {  # weights and bytes of a block
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}


class WeightMemory:
    """Zeroed memory in huge pages, where the system has them, given out piece after piece and never taken back."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = zeroed_memory(num_bytes, huge_pages=True)
        self._used = 0

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """uint8 [num_bytes], 64-byte aligned."""
        start, self._used = self._used, self._used + -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        assert start + num_bytes <= self._memory.size, "more weights than were counted"
        return self._memory[start : start + num_bytes]


class _Struct(ctypes.Structure):
    """PackedMatrix in `quant.h`."""

    _fields_ = (
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("mins", ctypes.c_void_p),
        ("channel_scales", ctypes.c_int32),
    )


class PackedMatrix:
    """W [outputs, inputs], packed. New ones are zero; rows are packed in any order, by any number of threads."""

    def __init__(
        self, packed_format: PackedFormat, outputs: int, inputs: int, memory: WeightMemory | None = None
    ) -> None:
        """`memory` has at least `packed_bytes` left; without one, the matrix has memory of its own."""
        sections = packed_format.sections(outputs, inputs)
        self.format = packed_format
        self.outputs = outputs
        self.inputs = inputs
        self._memory = (memory or WeightMemory(sum(sections))).take(sum(sections))
        values = address(self._memory)
        scales = values + sections[0]
        self.struct = _Struct(
            format=_FORMAT_IDS[packed_format.kind],
            group=packed_format.group,
            outputs=outputs,
            inputs=inputs,
            values=values,
            scales=scales if sections[1] else None,
            mins=scales + sections[1] if sections[2] else None,
            channel_scales=packed_format.channel_scales,
        )

    @staticmethod
    def packed_bytes(packed_format: PackedFormat, outputs: int, inputs: int) -> int:
        """What a matrix takes of a WeightMemory."""
        return sum(packed_format.sections(outputs, inputs))

    @property
    def num_bytes(self) -> int:
        """What a product reads."""
        return self._memory.size

    def pack(self, rows: NDArray[Any], outputs: Int64s | None = None) -> None:
        """Store `rows` ([n, inputs] of float32, float16 or, as uint16, bfloat16), rounded to the format; row i as
        outputs[i].

        outputs: int64 [n]; None counts from 0.
        """
        if rows.ndim != 2 or rows.shape[1] != self.inputs or rows.dtype not in FLOAT_IDS:
            raise ConfigError(f"rows to pack must be floats [n, {self.inputs}], not {rows.dtype} {list(rows.shape)}")
        rows, outputs = np.require(rows, None, ["C", "A"]), self._checked(outputs, rows.shape[0])
        pack = native_function("pe_pack_floats", None, *_PACK)
        pack(ctypes.byref(self.struct), address(rows), FLOAT_IDS[rows.dtype], rows.shape[0], address(outputs))

    def pack_blocks(self, blocks: NDArray[np.uint8], ggml_type: str, outputs: Int64s | None = None) -> None:
        """Store rows of ggml blocks (uint8 [n, bytes of a row]) as they are; row i as outputs[i].

        The matrix's format is that of GGML_FORMATS, or one that can hold it: int8 for int4, a smaller group, with mins.
        """
        self._check_holds(ggml_type)
        size, size_bytes = _GGML_BLOCKS[ggml_type]
        row_bytes = self.inputs // size * size_bytes
        if blocks.dtype != np.uint8 or blocks.ndim != 2 or self.inputs % size or blocks.shape[1] != row_bytes:
            shape = list(blocks.shape)
            raise ConfigError(f"{ggml_type} rows of {self.inputs} must be uint8 [n, {row_bytes}], not {shape}")
        blocks, outputs = np.require(blocks, None, ["C", "A"]), self._checked(outputs, blocks.shape[0])
        pack = native_function("pe_pack_blocks", None, *_PACK)
        pack(
            *(ctypes.byref(self.struct), address(blocks), _GGML_IDS[ggml_type]),
            *(blocks.shape[0], address(outputs)),
        )

    def largest(self) -> float:
        """A bound of its weights' sizes, by the scales and mins of integers. 0 for bf16, which have none."""
        if self.format.kind == "bf16":
            return 0.0
        values, scales, mins = self.format.sections(self.outputs, self.inputs)
        halves = np.abs(self._memory[values : values + scales + mins].view(np.float16).astype(np.float32))
        steps = {"int8": 128.0, "int4": 15.0 if self.format.mins else 8.0}[self.format.kind]
        num_scales = scales // 2
        sizes = halves[:num_scales] * steps
        if mins:
            sizes += halves[num_scales:]
        return float(sizes.max())

    def unpack(self, outputs: Int64s | None = None) -> NDArray[np.float32]:
        """The weights it stands for, float32 [n, inputs]: of the rows `outputs` (int64 [n]), or of all."""
        outputs = self._checked(outputs, self.outputs if outputs is None else outputs.shape[0])
        result = np.empty((outputs.size, self.inputs), np.float32)
        unpack = native_function("pe_unpack", None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        unpack(ctypes.byref(self.struct), outputs.size, address(outputs), address(result))
        return result

    def _checked(self, outputs: Int64s | None, num_rows: int) -> Int64s:
        if outputs is None:
            outputs = np.arange(num_rows, dtype=np.int64)
        if outputs.shape != (num_rows,):
            raise ConfigError(f"{num_rows} rows need as many outputs, not {list(outputs.shape)}")
        if num_rows and not (int(outputs.min()) >= 0 and int(outputs.max()) < self.outputs):
            raise ConfigError(f"outputs must be between 0 and {self.outputs - 1}")
        return np.ascontiguousarray(outputs, np.int64)

    def _check_holds(self, ggml_type: str) -> None:
        wanted = GGML_FORMATS.get(ggml_type)
        if wanted is None:
            raise ConfigError(f"no packed format for ggml type {ggml_type}; there are: {', '.join(GGML_FORMATS)}")
        own = self.format
        narrow = own.kind == "bf16" or (wanted.kind == "int8" and own.kind == "int4")
        if narrow or own.channel_scales or wanted.group % own.group or (wanted.mins and not own.mins):
            raise ConfigError(f"{own} cannot hold {ggml_type} without loss")


_PACK = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p)


def gate_up_order(intermediate_size: int) -> Int64s:
    """Where rows of [gate | up] go in a matrix for `silu_mul`: int64 [2 * intermediate_size].

    Each panel of 32 holds 16 gates and the 16 ups that they multiply. intermediate_size: a multiple of 16.
    """
    index = np.arange(intermediate_size, dtype=np.int64)
    gates = index // 16 * PANEL + index % 16
    return np.concatenate((gates, gates + 16))
