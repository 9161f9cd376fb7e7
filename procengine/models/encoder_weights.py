"""The tensors of an encoder's checkpoint, whatever its family calls them: `EncoderCheckpoint`.

Owns: names, shapes and how neighbours are joined. Never does: pack, compute, or load torch. Tensors come one by one, as
float32, so that a whole copy of the model never exists.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.config import EncoderConfig, ModelConfig
from procengine.errors import ModelError
from procengine.kernels.rope import RopeSpec, make_rotary_table
from procengine.models.float_tensors import read_float32
from procengine.models.weights import WeightSource

__all__ = ["EncoderBlock", "EncoderCheckpoint", "EncoderEmbedding", "EncoderHead"]

Float32s = NDArray[np.float32]
_PREFIXES = ("model.", "", "model.bert.", "bert.", "model.roberta.", "roberta.", "model.model.")


@dataclass(frozen=True, slots=True)
class EncoderBlock:
    """One layer; matrices are [outputs, inputs]."""

    attention_norm: Float32s | None
    attention_norm_bias: Float32s | None
    mlp_norm: Float32s
    mlp_norm_bias: Float32s | None
    qkv: Float32s
    qkv_bias: Float32s | None
    output: Float32s
    output_bias: Float32s | None
    up: Float32s
    up_bias: Float32s | None
    down: Float32s
    down_bias: Float32s | None
    cos: Float32s | None  # [positions, head_dim / 2]
    sin: Float32s | None
    window: int  # -1: all


@dataclass(frozen=True, slots=True)
class EncoderEmbedding:
    """What stands before the first layer and behind the last."""

    tokens: Float32s
    positions: Float32s | None  # from a sequence's first token
    types: Float32s | None
    norm: Float32s
    norm_bias: Float32s | None
    final_norm: Float32s | None
    final_norm_bias: Float32s | None


@dataclass(frozen=True, slots=True)
class EncoderHead:
    """logits = W norm(act(D x)) + b, of a pooled hidden state x."""

    dense: Float32s
    dense_bias: Float32s | None
    activation: str  # tanh, or one of the encoder's
    norm: Float32s | None
    norm_bias: Float32s | None
    classifier: Float32s
    classifier_bias: Float32s


class EncoderCheckpoint:
    """Tensors of `source`, checked against `config`."""

    def __init__(self, config: ModelConfig, source: WeightSource) -> None:
        assert config.encoder is not None
        self.config = config
        self.encoder: EncoderConfig = config.encoder
        self._source = source
        self._is_modern = config.architecture == "modernbert"
        self._table = "embeddings.tok_embeddings" if self._is_modern else "embeddings.word_embeddings"
        self._prefix = self._find_prefix()
        self._rotary: dict[float, tuple[Float32s, Float32s]] = {}

    def embedding(self) -> EncoderEmbedding:
        """The tables, and the norms outside the layers."""
        config, encoder, hidden = self.config, self.encoder, self.config.hidden_size
        tokens = self._read(f"{self._table}.weight", (config.vocab_size, hidden))
        if self._is_modern:
            norm = self._read("embeddings.norm.weight", (hidden,))
            final = self._read("final_norm.weight", (hidden,))
            biases = (self._maybe("embeddings.norm.bias", (hidden,)), self._maybe("final_norm.bias", (hidden,)))
            return EncoderEmbedding(tokens, None, None, norm, biases[0], final, biases[1])
        positions = self._read("embeddings.position_embeddings.weight", (encoder.num_positions, hidden))
        types = self._read("embeddings.token_type_embeddings.weight", (encoder.num_token_types, hidden))
        norm, bias = self._norm("embeddings.LayerNorm")
        return EncoderEmbedding(tokens, positions[encoder.position_offset :], types, norm, bias, None, None)

    def block(self, index: int) -> EncoderBlock:
        """Layer `index`."""
        return self._modern_block(index) if self._is_modern else self._bert_block(index)

    def head(self) -> EncoderHead:
        """What follows for a model with labels."""
        head, config = self.config.head, self.config
        assert head is not None
        hidden, count = config.hidden_size, len(head.labels)
        if self._is_modern:
            return EncoderHead(
                *(
                    self._read_outer("head.dense.weight", (hidden, hidden)),
                    self._maybe_outer("head.dense.bias", (hidden,)),
                ),
                self.encoder.activation,
                *(self._read_outer("head.norm.weight", (hidden,)), self._maybe_outer("head.norm.bias", (hidden,))),
                *(
                    self._read_outer("classifier.weight", (count, hidden)),
                    self._read_outer("classifier.bias", (count,)),
                ),
            )
        if config.architecture == "bert":
            dense, dense_bias = self._linear("pooler.dense", hidden, hidden)
            weight = self._read_outer("classifier.weight", (count, hidden))
            bias = self._read_outer("classifier.bias", (count,))
        else:
            dense = self._read_outer("classifier.dense.weight", (hidden, hidden))
            dense_bias = self._read_outer("classifier.dense.bias", (hidden,))
            weight = self._read_outer("classifier.out_proj.weight", (count, hidden))
            bias = self._read_outer("classifier.out_proj.bias", (count,))
        return EncoderHead(dense, dense_bias, "tanh", None, None, weight, bias)

    def _bert_block(self, index: int) -> EncoderBlock:
        at, hidden, inner = f"encoder.layer.{index}.", self.config.hidden_size, self.config.intermediate_size
        qkv = [self._linear(f"{at}attention.self.{name}", hidden, hidden) for name in ("query", "key", "value")]
        norms = (*self._norm(f"{at}attention.output.LayerNorm"), *self._norm(f"{at}output.LayerNorm"))
        return EncoderBlock(
            *norms,
            np.concatenate([weight for weight, _ in qkv]),
            np.concatenate([bias for _, bias in qkv]),
            *self._linear(f"{at}attention.output.dense", hidden, hidden),
            *self._linear(f"{at}intermediate.dense", inner, hidden),
            *self._linear(f"{at}output.dense", hidden, inner),
            None,
            None,
            -1,
        )

    def _modern_block(self, index: int) -> EncoderBlock:
        at, hidden, inner = f"layers.{index}.", self.config.hidden_size, self.config.intermediate_size
        is_local = index % self.encoder.global_every != 0
        cos, sin = self._angles(self.encoder.local_rope_theta if is_local else self.config.rope_theta)

        def linear(name: str, outputs: int, inputs: int) -> tuple[Float32s, Float32s | None]:
            weight = self._read(f"{at}{name}.weight", (outputs, inputs))
            return weight, self._maybe(f"{at}{name}.bias", (outputs,))

        first_norm = None if index == 0 else self._read(f"{at}attn_norm.weight", (hidden,))
        return EncoderBlock(
            *(first_norm, self._maybe(f"{at}attn_norm.bias", (hidden,))),
            *(self._read(f"{at}mlp_norm.weight", (hidden,)), self._maybe(f"{at}mlp_norm.bias", (hidden,))),
            *linear("attn.Wqkv", 3 * hidden, hidden),
            *linear("attn.Wo", hidden, hidden),
            *linear("mlp.Wi", 2 * inner, hidden),
            *linear("mlp.Wo", hidden, inner),
            cos,
            sin,
            self.encoder.local_window if is_local else -1,
        )

    def _angles(self, theta: float) -> tuple[Float32s, Float32s]:
        if theta not in self._rotary:
            table = make_rotary_table(RopeSpec(self.config.head_dim, theta), self.config.max_position_embeddings)
            self._rotary[theta] = (table.cos, table.sin)
        return self._rotary[theta]

    def _norm(self, name: str) -> tuple[Float32s, Float32s]:
        hidden = self.config.hidden_size
        return self._read(f"{name}.weight", (hidden,)), self._read(f"{name}.bias", (hidden,))

    def _linear(self, name: str, outputs: int, inputs: int) -> tuple[Float32s, Float32s]:
        return self._read(f"{name}.weight", (outputs, inputs)), self._read(f"{name}.bias", (outputs,))

    def _maybe(self, name: str, shape: tuple[int, ...]) -> Float32s | None:
        return self._read(name, shape) if self._prefix + name in self._source.names else None

    def _read(self, name: str, shape: tuple[int, ...]) -> Float32s:
        return self._read_named(self._prefix + name, shape)

    def _read_outer(self, name: str, shape: tuple[int, ...]) -> Float32s:
        return self._read_named(self._outer(name), shape)

    def _maybe_outer(self, name: str, shape: tuple[int, ...]) -> Float32s | None:
        return self._read_named(self._outer(name), shape) if self._outer(name) in self._source.names else None

    def _outer(self, name: str) -> str:
        """A tensor beside the encoder; a reader of files may have put a prefix before all names."""
        return next((prefix + name for prefix in ("", "model.") if prefix + name in self._source.names), name)

    def _read_named(self, name: str, shape: tuple[int, ...]) -> Float32s:
        return read_float32(self.config.path, self._source, name, shape)

    def _find_prefix(self) -> str:
        for prefix in _PREFIXES:
            if f"{prefix}{self._table}.weight" in self._source.names:
                return prefix
        raise ModelError(f"{self.config.path}: tensor {self._table}.weight is missing")
