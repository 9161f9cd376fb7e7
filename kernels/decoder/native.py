"""A forward pass of the Llama family by the native library: one call for all layers, one for the head.

Owns: the structs of `native/llama.h`, the memory of activations, and the checks that the C functions rely on. Never
does: read a checkpoint, or know about requests. Free of torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.errors import ConfigError
from procengine.kernels.decoder.limits import DecoderSizes, why_not
from procengine.kernels.linear.packed import PackedMatrix
from procengine.kernels.native import library
from procengine.kernels.native.arguments import KV_CACHE_IDS, address

__all__ = ["BoundDecoder", "Decoder", "DecoderLayer"]

_ALIGNMENT = 64
_INT8_SCALE_BYTES = 4

Array = NDArray[Any]
Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block. Vectors are float32; what a model does not have is None."""

    input_norm: Float32s  # [hidden]
    qkv: tuple[PackedMatrix, ...]  # [(H + 2 Hkv) D, hidden], in up to three parts
    qkv_bias: Float32s | None
    q_norm: Float32s | None  # [D]
    k_norm: Float32s | None
    output: PackedMatrix  # [hidden, H D]
    output_bias: Float32s | None
    post_attention_norm: Float32s
    gate_up: PackedMatrix  # [2 I, hidden], rows in `gate_up_order`
    gate_up_bias: Float32s | None  # in the same order
    down: PackedMatrix  # [hidden, I]
    down_bias: Float32s | None


class _Layer(ctypes.Structure):
    """LlamaLayer."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_norm", "q_norm", "k_norm", "post_attention_norm")),
        *((name, ctypes.c_void_p) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        ("qkv", ctypes.c_void_p * 3),
        *((name, ctypes.c_void_p) for name in ("output", "gate_up", "down")),
    )


class _Model(ctypes.Structure):
    """LlamaModel."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("embedding", "final_norm", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner")),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "sliding_window")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
    )


class _Step(ctypes.Structure):
    """LlamaStep."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input_ids", "query_start_loc", "seq_lens", "table_rows")),
        *((name, ctypes.c_void_p) for name in ("block_tables", "keys", "values", "wanted", "hidden", "arena")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_rows", "num_tokens", "num_wanted", "max_seq_len")),
        *((name, ctypes.c_int32) for name in ("block_size", "kv_dtype")),
    )


class _Scratch:
    """Memory that grows to the largest asked for."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def at_least(self, num_bytes: int) -> int:
        """The address of so many bytes, aligned to 64."""
        if self._memory.size < num_bytes + _ALIGNMENT:
            self._memory = np.empty(0, np.uint8)  # the old one goes first: both need not be there at once
            self._memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        return -(-address(self._memory) // _ALIGNMENT) * _ALIGNMENT


class Decoder:
    """Packed weights and their forward pass. One caller at a time."""

    def __init__(
        self,
        sizes: DecoderSizes,
        embedding: PackedMatrix,
        layers: Sequence[DecoderLayer],
        final_norm: Float32s,
        head: PackedMatrix,
        cos: Float32s,
        sin: Float32s,
    ) -> None:
        """embedding, head: [V, hidden], and may be one; cos, sin: float32 [positions, D / 2]."""
        reason = why_not(sizes, 2)
        if reason is not None:
            raise ConfigError(f"the native decoder cannot run this model: {reason}")
        self.sizes = sizes
        self.max_positions = cos.shape[0]
        matrices = [embedding, head, *(part for layer in layers for part in _matrices(layer))]
        self.formats = sorted({matrix.format.kind for matrix in matrices})
        self.num_bytes = sum({id(matrix): matrix.num_bytes for matrix in matrices}.values())
        self.embedding = embedding
        self.layers = tuple(layers)
        self.final_norm = final_norm
        self.head = head
        self._rotary = (cos, sin)
        self._structs = (_Layer * len(layers))(*map(_layer_struct, layers))
        self._model = _Model(
            layers=self._structs,
            embedding=ctypes.addressof(embedding.struct),
            final_norm=address(final_norm),
            cos=address(cos),
            sin=address(sin),
            hidden=sizes.hidden_size,
            inner=sizes.intermediate_size,
            num_layers=len(layers),
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            sliding_window=sizes.sliding_window or 0,
            eps=sizes.rms_norm_eps,
            scale=sizes.head_dim**-0.5,
        )
        self._shortened: dict[int, _Model] = {}
        self._functions = _functions()
        self._arena, self._head_scratch = _Scratch(), _Scratch()

    def bind(self, keys: Sequence[Array], values: Sequence[Array]) -> BoundDecoder:
        """The forward pass over a paged cache: of each layer [num_blocks, block_size, Hkv, D], contiguous, float32 or,
        as uint16, bfloat16, or [num_blocks, block_size, Hkv, D + 4] of int8. The order of elements in a block is the
        kernels' own."""
        return BoundDecoder(self, keys, values)

    def run(self, step: _Step, num_layers: int | None = None) -> None:
        """The C function, in an arena that is large enough: all of the model, or its first layers without the norm."""
        model = ctypes.addressof(self._model if num_layers is None else self._first_layers(num_layers))
        step.arena = self._arena.at_least(self._functions.arena(model, ctypes.addressof(step)))
        self._functions.forward(model, ctypes.addressof(step))

    def compute_logits(self, hidden: Float32s) -> Float32s:
        """float32 [S, V] of hidden states, float32 [S, hidden]."""
        self._check_hidden(hidden)
        logits = np.empty((hidden.shape[0], self.head.outputs), np.float32)
        head = ctypes.addressof(self.head.struct)
        memory = self._head_scratch.at_least(self._functions.head_bytes(head, hidden.shape[0]))
        self._functions.logits(head, address(hidden), hidden.shape[0], address(logits), memory)
        return logits

    def greedy_tokens(self, hidden: Float32s) -> Int32s:
        """int32 [S]: the first largest logit of each row of hidden states, float32 [S, hidden]."""
        self._check_hidden(hidden)
        tokens = np.empty(hidden.shape[0], np.int32)
        head = ctypes.addressof(self.head.struct)
        memory = self._head_scratch.at_least(self._functions.head_bytes(head, hidden.shape[0]))
        self._functions.greedy(head, address(hidden), hidden.shape[0], address(tokens), memory)
        return tokens

    def _first_layers(self, count: int) -> _Model:
        assert 0 <= count <= len(self.layers), (count, len(self.layers))
        if count not in self._shortened:
            model = _Model.from_buffer_copy(self._model)  # the pointers are the same
            model.num_layers, model.final_norm = count, None
            self._shortened[count] = model
        return self._shortened[count]

    def _check_hidden(self, hidden: Float32s) -> None:
        assert hidden.dtype == np.float32
        assert hidden.flags.c_contiguous
        assert hidden.shape[1:] == (self.sizes.hidden_size,)


class BoundDecoder:
    """A decoder's forward pass over one paged cache."""

    def __init__(self, decoder: Decoder, keys: Sequence[Array], values: Sequence[Array]) -> None:
        first = keys[0]
        assert first.dtype in KV_CACHE_IDS
        block_size, (num_kv_heads, width) = first.shape[1], first.shape[2:]
        head_dim = width - _INT8_SCALE_BYTES if first.dtype == np.int8 else width
        reason = why_not(decoder.sizes, block_size)
        if reason is not None:
            raise ConfigError(f"the native decoder cannot use this cache: {reason}")
        assert (num_kv_heads, head_dim) == (decoder.sizes.num_kv_heads, decoder.sizes.head_dim)
        assert first.dtype != np.int8 or head_dim % 4 == 0
        for array in (*keys, *values):
            assert (array.dtype, array.shape) == (first.dtype, first.shape)
            assert array.flags.c_contiguous
        self._decoder = decoder
        self._kept = (keys, values)  # what the pointers point to
        self._keys = (ctypes.c_void_p * len(keys))(*map(address, keys))
        self._values = (ctypes.c_void_p * len(values))(*map(address, values))
        self._step = _Step(
            keys=ctypes.addressof(self._keys),
            values=ctypes.addressof(self._values),
            block_size=block_size,
            kv_dtype=KV_CACHE_IDS[first.dtype],
        )

    def forward(
        self,
        input_ids: Int32s,
        query_start_loc: Int32s,
        seq_lens: Int32s,
        table_rows: NDArray[np.int64],
        block_tables: Int32s,
        max_seq_len: int,
        wanted: NDArray[np.int64] | None,
        num_layers: int | None = None,
    ) -> Float32s:
        """Computes a step's tokens, writes their keys and values, and gives hidden states after the final norm.

        Args:
            input_ids: int32 [T], rows one behind the other; each row's tokens are the last of its context.
            query_start_loc: int32 [R + 1].
            seq_lens: int32 [R], this step's tokens included, at most max_positions.
            table_rows: int64 [R], the row of block_tables that belongs to each.
            block_tables: int32 [any, blocks].
            max_seq_len: the largest of seq_lens.
            wanted: int64 [W], ascending: the tokens whose hidden states are asked for. None: all.
            num_layers: only the first so many are run, and what comes out of them is not normed. None: all.

        Returns:
            float32 [W, hidden].
        """
        decoder, step = self._decoder, self._step
        assert max_seq_len <= decoder.max_positions, (max_seq_len, decoder.max_positions)
        for indices in (input_ids, query_start_loc, seq_lens):
            assert indices.dtype == np.int32
            assert indices.flags.c_contiguous
        assert table_rows.dtype == np.int64
        assert table_rows.flags.c_contiguous
        assert block_tables.dtype == np.int32
        num_tokens = input_ids.shape[0]
        num_wanted = num_tokens if wanted is None else wanted.shape[0]
        hidden = np.empty((num_wanted, decoder.sizes.hidden_size), np.float32)
        step.input_ids = address(input_ids)
        step.query_start_loc = address(query_start_loc)
        step.seq_lens = address(seq_lens)
        step.table_rows = address(table_rows)
        step.block_tables = address(block_tables)
        step.table_stride = block_tables.strides[0] // 4
        step.wanted = None if wanted is None else address(wanted)
        step.hidden = address(hidden)
        step.num_rows = seq_lens.shape[0]
        step.num_tokens = num_tokens
        step.num_wanted = num_wanted
        step.max_seq_len = max_seq_len
        decoder.run(step, num_layers)
        return hidden


def _matrices(layer: DecoderLayer) -> tuple[PackedMatrix, ...]:
    return (*layer.qkv, layer.output, layer.gate_up, layer.down)


def _layer_struct(layer: DecoderLayer) -> _Layer:
    values: dict[str, Any] = {}
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, np.ndarray):
            assert value.dtype == np.float32
            assert value.flags.c_contiguous
            values[field.name] = address(value)
        elif isinstance(value, PackedMatrix):
            values[field.name] = ctypes.addressof(value.struct)
        elif value is not None:
            parts = [ctypes.addressof(part.struct) for part in value]
            values[field.name] = (ctypes.c_void_p * 3)(*parts, *[None] * (3 - len(parts)))
    return _Layer(**values)


@dataclass(frozen=True, slots=True)
class _Functions:
    arena: Any
    forward: Any
    head_bytes: Any
    logits: Any
    greedy: Any


@cache
def _functions() -> _Functions:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    return _Functions(
        library.native_function("pe_llama_arena", integer, pointer, pointer),
        library.native_function("pe_llama_forward", None, pointer, pointer),
        library.native_function("pe_llama_head_bytes", integer, pointer, integer),
        library.native_function("pe_llama_logits", None, pointer, pointer, integer, pointer, pointer),
        library.native_function("pe_llama_greedy", None, pointer, pointer, integer, pointer, pointer),
    )
