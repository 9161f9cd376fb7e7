"""A forward pass of a bidirectional encoder by the native library: one call for all layers.

Owns: the structs of `native/encoder.h`, weights as 14-bit integers (`WideMatrix`), the memory of activations, and the
checks that the C functions rely on. Never does: read a checkpoint, or pool. Free of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from procengine.kernels.native import library
from procengine.kernels.native.arguments import address

__all__ = ["ACTIVATIONS", "Encoder", "EncoderLayer", "EncoderSizes", "EncoderTables", "WideMatrix"]

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]

ACTIVATIONS: Final = ("gelu", "gelu_tanh", "relu", "silu")  # `EncoderActivation`
_PANEL, _GROUP, _STEP = 16, 16, 32  # WIDE_PANEL, WIDE_GROUP, WIDE_STEP
_ALIGNMENT = 64


class _Matrix(ctypes.Structure):
    """WideMatrix."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
    )


class WideMatrix:
    """W [outputs, inputs] as integers of 14 bits with a float32 scale for each 16 of a row; new ones are zero."""

    def __init__(self, outputs: int, inputs: int) -> None:
        panels, padded = -(-outputs // _PANEL), -(-inputs // _STEP) * _STEP
        self.outputs, self.inputs = outputs, inputs
        self._values = _aligned(panels * padded * _PANEL * 2)
        self._scales = np.zeros(panels * -(-inputs // _GROUP) * _PANEL, np.float32)
        self.num_bytes = self._values.nbytes + self._scales.nbytes
        self.struct = _Matrix(address(self._values), address(self._scales), outputs, inputs)

    def pack(self, rows: Float32s, first: int = 0) -> None:
        """Store `rows`, float32 [n, inputs], as outputs `first` .. `first + n`."""
        assert rows.dtype == np.float32
        assert rows.shape[1:] == (self.inputs,)
        assert 0 <= first <= first + rows.shape[0] <= self.outputs
        rows = np.ascontiguousarray(rows)
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        pack = library.native_function("pe_wide_pack", None, pointer, pointer, integer, integer)
        pack(ctypes.addressof(self.struct), address(rows), rows.shape[0], first)


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """What the layers have in common; the names are those of ModelConfig and EncoderConfig."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    norm_eps: float
    activation: str  # one of ACTIVATIONS
    is_gated: bool
    is_pre_norm: bool


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One block; what a model does not have is None. Where norms stand, `EncoderSizes.is_pre_norm` says."""

    attention_norm: Float32s | None  # [hidden]
    attention_norm_bias: Float32s | None
    mlp_norm: Float32s
    mlp_norm_bias: Float32s | None
    qkv_bias: Float32s | None  # [3 hidden]
    output_bias: Float32s | None
    up_bias: Float32s | None
    down_bias: Float32s | None
    cos: Float32s | None  # [positions, head_dim / 2]
    sin: Float32s | None
    qkv: WideMatrix  # [3 hidden, hidden]
    output: WideMatrix
    up: WideMatrix  # [I, hidden], or [2 I, hidden]: act(first half) * second half
    down: WideMatrix  # [hidden, I]
    window: int = -1  # a token sees those at most so far away; -1: all


@dataclass(frozen=True, slots=True)
class EncoderTables:
    """What a token is before the first layer, and the norms outside the layers."""

    tokens: Float32s  # [V, hidden]
    positions: Float32s | None  # [positions, hidden], from a sequence's first
    types: Float32s | None  # [types, hidden]
    embedding_norm: Float32s
    embedding_norm_bias: Float32s | None
    final_norm: Float32s | None
    final_norm_bias: Float32s | None


class _Layer(ctypes.Structure):
    """EncoderLayer."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "output_bias", "up_bias", "down_bias", "cos", "sin")),
        *((name, ctypes.c_void_p) for name in ("qkv", "output", "up", "down")),
        ("window", ctypes.c_int64),
    )


class _Model(ctypes.Structure):
    """EncoderModel."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("tokens", "positions", "types", "embedding_norm")),
        *((name, ctypes.c_void_p) for name in ("embedding_norm_bias", "final_norm", "final_norm_bias")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner")),
        *((name, ctypes.c_int32) for name in ("num_heads", "head_dim", "pre_norm", "gated", "activation")),
        ("eps", ctypes.c_float),
    )


class _Step(ctypes.Structure):
    """EncoderStep."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_ids", "token_types", "query_start_loc", "hidden", "arena")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_tokens")),
        *((name, ctypes.c_int32) for name in ("num_layers", "is_whole")),
    )


class Encoder:
    """Packed weights and their forward pass. One caller at a time."""

    def __init__(self, sizes: EncoderSizes, tables: EncoderTables, layers: Sequence[EncoderLayer]) -> None:
        self.sizes = sizes
        self.num_layers = len(layers)
        self._kept = (tables, tuple(layers))  # what the pointers point to
        self.num_bytes = tables.tokens.nbytes + sum(
            matrix.num_bytes for layer in layers for matrix in (layer.qkv, layer.output, layer.up, layer.down)
        )
        self.max_positions = min(
            [table.shape[0] for layer in layers for table in (layer.cos,) if table is not None]
            + ([] if tables.positions is None else [tables.positions.shape[0]])
        )
        self.num_types = 1 if tables.types is None else tables.types.shape[0]
        self._structs = (_Layer * len(layers))(*(_Layer(**_members(layer)) for layer in layers))
        self._model = _Model(
            **_members(tables),
            layers=self._structs,
            hidden=sizes.hidden_size,
            inner=sizes.intermediate_size,
            num_heads=sizes.num_heads,
            head_dim=sizes.hidden_size // sizes.num_heads,
            pre_norm=sizes.is_pre_norm,
            gated=sizes.is_gated,
            activation=ACTIVATIONS.index(sizes.activation),
            eps=sizes.norm_eps,
        )
        self._arena = np.empty(0, np.uint8)

    def forward(
        self, input_ids: Int32s, token_types: Int32s | None, query_start_loc: Int32s, num_layers: int | None = None
    ) -> Float32s:
        """Hidden states of whole sequences, one behind the other: float32 [T, hidden].

        Args:
            input_ids: int32 [T], tokens of the model.
            token_types: int32 [T], or None for all 0.
            query_start_loc: int32 [R + 1], where each sequence begins, and T.
            num_layers: how many are run; None: all, and the final norm where there is one.
        """
        num_tokens, num_rows = input_ids.shape[0], query_start_loc.shape[0] - 1
        for indices in (input_ids, query_start_loc, *([] if token_types is None else [token_types])):
            assert indices.dtype == np.int32
            assert indices.flags.c_contiguous
        assert token_types is None or token_types.shape == input_ids.shape
        assert num_layers is None or 0 <= num_layers <= self.num_layers
        assert not num_rows or int(np.diff(query_start_loc).max()) <= self.max_positions
        hidden = np.empty((num_tokens, self.sizes.hidden_size), np.float32)
        step = _Step(
            input_ids=address(input_ids),
            token_types=None if token_types is None else address(token_types),
            query_start_loc=address(query_start_loc),
            hidden=address(hidden),
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_layers=self.num_layers if num_layers is None else num_layers,
            is_whole=num_layers is None or num_layers == self.num_layers,
        )
        arena, forward = _functions()
        model = ctypes.addressof(self._model)
        num_bytes = arena(model, ctypes.addressof(step))
        if self._arena.size < num_bytes:
            self._arena = np.empty(0, np.uint8)  # the old one goes first: both need not be there at once
            self._arena = _aligned(num_bytes)
        step.arena = address(self._arena)
        forward(model, ctypes.addressof(step))
        return hidden


def _aligned(num_bytes: int) -> NDArray[np.uint8]:
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -address(memory) % _ALIGNMENT
    return memory[start : start + num_bytes]


def _members(values: EncoderLayer | EncoderTables) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for field in fields(values):
        value = getattr(values, field.name)
        if isinstance(value, np.ndarray):
            assert value.dtype == np.float32
            assert value.flags.c_contiguous
            value = address(value)
        elif isinstance(value, WideMatrix):
            value = ctypes.addressof(value.struct)
        members[field.name] = value
    return members


@cache
def _functions() -> tuple[Any, Any]:
    pointer = ctypes.c_void_p
    return (
        library.native_function("pe_encoder_arena", ctypes.c_int64, pointer, pointer),
        library.native_function("pe_encoder_forward", None, pointer, pointer),
    )
