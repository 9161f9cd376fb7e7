"""A Llama-family checkpoint, packed for the native decoder as it is read: no float copy of the model ever exists.

Owns: which tensor goes where, and the threads that pack. Never does: choose a format (`packed_formats`), compute, or
load torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from procengine.config import ModelConfig, Quantization
from procengine.decoder_sizes import decoder_sizes
from procengine.errors import ModelError
from procengine.kernels.decoder.native import Decoder, DecoderLayer
from procengine.kernels.linear.packed import (
    GGML_FORMATS,
    LARGEST_BY_TILES,
    PackedFormat,
    PackedMatrix,
    WeightMemory,
    gate_up_order,
)
from procengine.kernels.native.library import Isa, best_isa
from procengine.models.float_tensors import check_tensor, read_float32
from procengine.models.packed_formats import common_format, packed_format
from procengine.models.rotary import rotary_table
from procengine.models.tensor_names import EMBEDDING, LM_HEAD
from procengine.models.weights import RowPiece, WeightSource

__all__ = ["load_packed"]

Int64s = NDArray[np.int64]
Float32s = NDArray[np.float32]


def load_packed(
    config: ModelConfig, source: WeightSource, quantization: Quantization, *, num_threads: int, progress: bool
) -> Decoder:
    """Read and pack all weights.

    Raises ModelError naming the tensor that is missing, of the wrong shape or of an unreadable type. `progress` draws a
    bar on stderr.
    """
    plan = _Plan(config, source, quantization)
    decoder = plan.allocate()
    _run_all(plan.jobs(), num_threads, progress)
    return decoder


class _Part(NamedTuple):
    """A tensor of the checkpoint and the outputs of a packed matrix that its rows are."""

    name: str
    outputs: Int64s


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A packed matrix to be: its size, its format, and what it is made of."""

    format: PackedFormat
    outputs: int
    inputs: int
    parts: tuple[_Part, ...]


class _Plan:
    """All tensors of a model, checked against its configuration, and where they go."""

    def __init__(self, config: ModelConfig, source: WeightSource, quantization: Quantization) -> None:
        self._config = config
        self._source = source
        self._quantization: Quantization = quantization
        self._packed: list[tuple[PackedMatrix, _Matrix]] = []
        self._q_size, self._kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def allocate(self) -> Decoder:
        """The decoder, its matrices still zero; vectors are read."""
        config = self._config
        table = self._matrix(((EMBEDDING, config.vocab_size),), config.hidden_size, is_table=True)
        head = table if config.tie_word_embeddings else self._matrix(
            ((LM_HEAD, config.vocab_size),), config.hidden_size, is_table=True
        )  # fmt: skip
        matrices = [self._layer_matrices(f"model.layers.{index}.") for index in range(config.num_layers)]
        flat = [matrix for layer in matrices for group in layer for matrix in group]
        all_matrices = [table, *flat, *([] if head is table else [head])]
        memory = WeightMemory(sum(PackedMatrix.packed_bytes(m.format, m.outputs, m.inputs) for m in all_matrices))
        embedding = self._place(table, memory)
        layers = [self._layer(index, groups, memory) for index, groups in enumerate(matrices)]
        rotary = rotary_table(config)
        return Decoder(
            decoder_sizes(config),
            embedding,
            layers,
            self._vector("model.norm.weight", config.hidden_size),
            embedding if head is table else self._place(head, memory),
            rotary.cos,
            rotary.sin,
        )

    def jobs(self) -> Iterator[tuple[Callable[[], None], int]]:
        """What remains to be done, in any order, with its cost. No two write to one panel of a matrix."""
        for packed, matrix in sorted(self._packed, key=lambda item: -item[1].outputs * item[1].inputs):
            yield partial(self._pack, packed, matrix), matrix.outputs * matrix.inputs

    def _layer_matrices(self, prefix: str) -> tuple[Sequence[_Matrix], ...]:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = self._split_by_format(
            [(f"{prefix}self_attn.{name}_proj.weight", size) for name, size in self._qkv_sizes()], hidden
        )
        order = gate_up_order(inner)
        gate_up = self._matrix(
            tuple((f"{prefix}mlp.{name}_proj.weight", inner) for name in ("gate", "up")), hidden, order=order
        )
        output = self._matrix(((f"{prefix}self_attn.o_proj.weight", hidden),), self._q_size)
        down = self._matrix(((f"{prefix}mlp.down_proj.weight", hidden),), inner)
        return qkv, (output,), (gate_up,), (down,)

    def _qkv_sizes(self) -> tuple[tuple[str, int], ...]:
        return ("q", self._q_size), ("k", self._kv_size), ("v", self._kv_size)

    def _split_by_format(self, tensors: list[tuple[str, int]], inputs: int) -> list[_Matrix]:
        """One matrix for neighbours of one format."""
        groups: list[list[tuple[str, int]]] = []
        for tensor in tensors:
            if groups and self._format(groups[-1][0][0]) == self._format(tensor[0]):
                groups[-1].append(tensor)
            else:
                groups.append([tensor])
        return [self._matrix(tuple(group), inputs) for group in groups]

    def _format(self, name: str, *, is_table: bool = False) -> PackedFormat:
        if name not in self._source.names:
            raise ModelError(f"{self._config.path}: tensor {name} is missing")
        return packed_format(self._quantization, self._source.ggml_type(name), is_table=is_table)

    def _matrix(
        self,
        tensors: tuple[tuple[str, int], ...],
        inputs: int,
        *,
        is_table: bool = False,
        order: Int64s | None = None,
    ) -> _Matrix:
        """`tensors` (name, rows) one below the other, their rows placed in `order`."""
        outputs = sum(rows for _, rows in tensors)
        places = np.split(np.arange(outputs) if order is None else order, np.cumsum([rows for _, rows in tensors])[:-1])
        chosen = common_format(self._format(name, is_table=is_table) for name, _ in tensors)
        for name, rows in tensors:
            check_tensor(self._config.path, self._source, name, (rows, inputs))
        parts = tuple(_Part(name, own) for (name, _), own in zip(tensors, places, strict=True))
        return _Matrix(chosen, outputs, inputs, parts)

    def _place(self, matrix: _Matrix, memory: WeightMemory) -> PackedMatrix:
        packed = PackedMatrix(matrix.format, matrix.outputs, matrix.inputs, memory)
        self._packed.append((packed, matrix))
        return packed

    def _layer(self, index: int, groups: tuple[Sequence[_Matrix], ...], memory: WeightMemory) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv, (output,), (gate_up,), (down,) = groups
        gate_up_bias = self._biases(config.mlp_bias, *((f"{prefix}mlp.{n}_proj.bias", inner) for n in ("gate", "up")))
        if gate_up_bias is not None:
            gate_up_bias = _placed(gate_up_bias, gate_up_order(inner))
        return DecoderLayer(
            input_norm=self._vector(f"{prefix}input_layernorm.weight", hidden),
            qkv=tuple(self._place(part, memory) for part in qkv),
            qkv_bias=self._biases(
                config.qkv_bias, *((f"{prefix}self_attn.{n}_proj.bias", size) for n, size in self._qkv_sizes())
            ),
            q_norm=self._biases(config.qk_norm, (f"{prefix}self_attn.q_norm.weight", config.head_dim)),
            k_norm=self._biases(config.qk_norm, (f"{prefix}self_attn.k_norm.weight", config.head_dim)),
            output=self._place(output, memory),
            output_bias=self._biases(config.attention_output_bias, (f"{prefix}self_attn.o_proj.bias", hidden)),
            post_attention_norm=self._vector(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._place(gate_up, memory),
            gate_up_bias=gate_up_bias,
            down=self._place(down, memory),
            down_bias=self._biases(config.mlp_bias, (f"{prefix}mlp.down_proj.bias", hidden)),
        )

    def _biases(self, has: bool, *tensors: tuple[str, int]) -> Float32s | None:
        return np.concatenate([self._vector(name, size) for name, size in tensors]) if has else None

    def _vector(self, name: str, size: int) -> Float32s:
        return read_float32(self._config.path, self._source, name, (size,))

    def _pack(self, packed: PackedMatrix, matrix: _Matrix) -> None:
        for name, outputs in matrix.parts:
            stored = GGML_FORMATS.get(self._source.ggml_type(name) or "")
            keeps = self._quantization == "stored" and stored is not None and packed.format.kind != "bf16"
            for piece in self._source.pieces(name, keep_blocks=keeps):
                _pack_piece(packed, piece, outputs[piece.rows])
        if best_isa() >= Isa.AMX and not packed.largest() <= LARGEST_BY_TILES:
            raise ModelError(
                f"{self._config.path}: tensor {matrix.parts[0].name} has weights of up to {packed.largest():.4g}, and"
                f" the kernels of this CPU take integers that stand for {LARGEST_BY_TILES} at most; use --kernels torch"
            )


def _pack_piece(packed: PackedMatrix, piece: RowPiece, outputs: Int64s) -> None:
    if piece.ggml_type is None:
        packed.pack(piece.values, outputs)
    else:
        packed.pack_blocks(piece.values, piece.ggml_type, outputs)


def _placed(vector: Float32s, places: Int64s) -> Float32s:
    placed = np.empty_like(vector)
    placed[places] = vector
    return placed


def _run_all(jobs: Iterator[tuple[Callable[[], None], int]], num_threads: int, progress: bool) -> None:
    """Run them on threads (packing releases the GIL), in the order given."""
    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="load") as pool:
        pending = {pool.submit(job): cost for job, cost in jobs}
        with tqdm(
            total=sum(pending.values()), desc="Loading weights", unit="", unit_scale=True, disable=not progress
        ) as bar:
            try:
                for done in as_completed(pending):
                    done.result()
                    bar.update(pending[done])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
