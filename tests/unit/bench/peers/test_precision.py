"""In which class a precision is compared."""

from __future__ import annotations

import pytest

from procengine.bench.peers.precision import precision_of, weights_class
from procengine.config import DType, EngineConfig, GroupConfig, ModelConfig, WorkerConfig

MODEL = ModelConfig("m", "", "safetensors", "llama", 10, 8, 8, 1, 1, 1, 8, 64)


@pytest.mark.parametrize(
    ("precision", "weights"),
    [
        *(("int4", "4-bit"), ("Q4_0", "4-bit"), ("Q4_1", "4-bit"), ("Q4_K", "4-bit"), ("IQ4_NL", "4-bit")),
        *(("int8", "8-bit"), ("Q8_0", "8-bit"), ("Q6_K", "8-bit"), ("Q5_K", "4-bit")),
        *(("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32")),
    ],
)
def test_class(precision: str, weights: str) -> None:
    assert weights_class(precision) == weights


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16"), ("float32", "fp32"), ("float16", "fp16")])
def test_precision_is_that_of_the_worker(dtype: DType, precision: str) -> None:
    config = EngineConfig(MODEL, GroupConfig("g", "/"), worker=WorkerConfig(dtype=dtype))
    assert precision_of(config) == precision
