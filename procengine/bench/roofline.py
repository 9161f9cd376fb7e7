"""The least that a decode step of a Llama-like model can take: what it must read, and what it must multiply.

Owns: counting bytes and operations, and the bound that follows. Pure. Never does: measure a machine.

A step of `batch_size` requests reads each matrix once and each request's keys and values once; memory and arithmetic
overlap at best, so the bound is the longer of the two times (Williams, Waterman, Patterson, *Roofline*, 2009).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DecoderShape", "MachineLimits", "decode_bound_ms"]


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder-only model with gated MLPs and tied embeddings."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def num_layer_weights(self) -> int:
        """Weights of the matrices of all layers."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Weights that make logits of hidden states."""
        return self.vocab_size * self.hidden_size

    def kv_bytes(self, num_tokens: int, bytes_per_value: int) -> int:
        """Keys and values of so many tokens, in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value * num_tokens

    def attention_operations(self, num_tokens: int) -> int:
        """Multiplications and additions of one new token with the keys and values of so many, in all layers."""
        return 4 * self.num_layers * self.num_heads * self.head_dim * num_tokens


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What a machine can do at best, with all the threads that the worker has.

    Attributes:
        read_gb_per_s: 1e9 bytes a second out of memory.
        gop_per_s: 1e9 multiplications and additions a second, by format: "bf16", "int8".
    """

    read_gb_per_s: float
    gop_per_s: dict[str, float]


def decode_bound_ms(
    shape: DecoderShape,
    limits: MachineLimits,
    weight_bytes: int,
    operand: str,
    batch_size: int,
    context_len: int,
    kv_bytes_per_value: int = 2,
) -> float:
    """The bound of a step of `batch_size` requests with `context_len` tokens each.

    Args:
        weight_bytes: of all matrices, the head included.
        operand: in which format weights are multiplied, a key of `limits.gop_per_s`; attention is in bf16.
    """
    tokens = batch_size * context_len
    read_s = (weight_bytes + shape.kv_bytes(tokens, kv_bytes_per_value)) / (limits.read_gb_per_s * 1e9)
    products = 2 * batch_size * (shape.num_layer_weights + shape.num_head_weights)
    operations_s = products / (limits.gop_per_s[operand] * 1e9)
    operations_s += shape.attention_operations(tokens) / (limits.gop_per_s["bf16"] * 1e9)
    return max(read_s, operations_s) * 1e3
