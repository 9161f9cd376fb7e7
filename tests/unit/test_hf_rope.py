"""HuggingFaceRope: every form in which config.json has said how rotary frequencies are scaled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from procengine.config import RopeScaling
from tests.model_files import LLAMA, LLAMA3_ROPE, resolve


@pytest.mark.parametrize(
    ("rope", "theta", "expected"),
    [
        ({}, 1e4, RopeScaling()),
        ({"rope_scaling": None, "rope_theta": 7.0}, 7.0, RopeScaling()),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, 9.0, RopeScaling()),
        ({"rope_parameters": {"rope_theta": 9.0}, "rope_theta": 5.0}, 9.0, RopeScaling()),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 1e4, RopeScaling("linear", 2.0, 512)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}, "rope_theta": 5e5},
            5e5,
            RopeScaling("llama3", 8.0, 128),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
            5e5,
            RopeScaling("llama3", 8.0, 128),
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 1e4, RopeScaling("yarn", 4.0, 512)),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                    "beta_fast": 16,
                    "attention_factor": 1.5,
                    "truncate": False,
                }
            },
            1e4,
            RopeScaling("yarn", 4.0, 128, beta_fast=16.0, attention_factor=1.5, truncate=False),
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
            1e4,
            RopeScaling("yarn", 4.0, 512, attention_factor=1.0),
        ),
    ],
)
def test_rope_forms_old_and_new(tmp_path: Path, rope: dict[str, Any], theta: float, expected: RopeScaling) -> None:
    config = resolve(tmp_path, {**LLAMA, **rope})
    assert (config.rope_theta, config.rope_scaling) == (theta, expected)
