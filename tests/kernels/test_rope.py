"""Rotary embedding: the rotation itself, and each scaling against transformers' tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from procengine.errors import ConfigError
from procengine.kernels.rope import RopeSpec, make_rotary_table
from procengine.kernels.rope.reference import apply_rope


def tables(spec: RopeSpec, max_len: int) -> tuple[Tensor, Tensor]:
    table = make_rotary_table(spec, max_len)
    return torch.from_numpy(table.cos), torch.from_numpy(table.sin)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_each_pair_is_multiplied_by_a_unit_complex_number(index_dtype: torch.dtype) -> None:
    spec = RopeSpec(head_dim=6, theta=100.0)
    cos, sin = tables(spec, 20)
    q, k = torch.randn(3, 4, 6), torch.randn(3, 2, 6)
    positions = torch.tensor([0, 19, 7], dtype=index_dtype)
    for x, rotated in zip((q, k), apply_rope(q, k, cos, sin, positions), strict=True):
        angles = positions.double()[:, None] * 100.0 ** (-torch.arange(3).double() / 3)
        expected = torch.complex(x[..., :3].double(), x[..., 3:].double()) * torch.exp(1j * angles)[:, None]
        torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), -1).float())


def test_low_precision_is_rounded_once() -> None:
    cos, sin = tables(RopeSpec(head_dim=8), 4000)
    x = torch.randn(5, 1, 8).bfloat16()
    positions = torch.tensor([0, 1, 1000, 2000, 3999])
    low, _ = apply_rope(x, x, cos, sin, positions)
    high, _ = apply_rope(x.float(), x.float(), cos, sin, positions)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, high.bfloat16())


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(ConfigError, match="longrope"):
        make_rotary_table(RopeSpec(head_dim=4, kind="dynamic"), 4)


SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    {
        "rope_type": "yarn",
        "factor": 2.5,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: scaling["rope_type"])
def test_tables_equal_those_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 50000.0, **scaling},
    )
    positions = torch.arange(256)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    parameters = {name: value for name, value in scaling.items() if name != "rope_type"}
    kind = scaling["rope_type"].replace("default", "none")
    own_cos, own_sin = tables(RopeSpec(head_dim=32, theta=50000.0, kind=kind, **parameters), 256)
    torch.testing.assert_close(own_cos, cos[0, :, :16], atol=1e-5, rtol=0)
    torch.testing.assert_close(own_sin, sin[0, :, :16], atol=1e-5, rtol=0)
