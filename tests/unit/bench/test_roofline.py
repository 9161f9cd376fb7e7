"""What a decode step takes at least: bytes and operations of a known model, and which of them counts."""

from __future__ import annotations

from functools import partial

import pytest

from procengine.bench.roofline import DecoderShape, MachineLimits, decode_bound_ms

SMOLLM2 = DecoderShape(30, 576, 1536, 9, 3, 64, 49152)
LIMITS = MachineLimits(read_gb_per_s=20.0, gop_per_s={"bf16": 400.0, "int8": 800.0})
NUM_WEIGHTS = 134_479_872  # of its matrices: 134,515,008 parameters less 61 norms of 576

bound = partial(decode_bound_ms, SMOLLM2, LIMITS)


def test_weights_of_a_known_model() -> None:
    assert SMOLLM2.num_layer_weights + SMOLLM2.num_head_weights == NUM_WEIGHTS
    assert SMOLLM2.kv_bytes(1, 2) == 30 * 2 * 3 * 64 * 2


def test_one_request_is_bound_by_its_weights() -> None:
    assert bound(2 * NUM_WEIGHTS, "bf16", 1, 0) == pytest.approx(2 * NUM_WEIGHTS / 20e9 * 1e3)
    assert bound(NUM_WEIGHTS, "int8", 1, 0) == pytest.approx(bound(2 * NUM_WEIGHTS, "bf16", 1, 0) / 2)


def test_many_requests_are_bound_by_arithmetic() -> None:
    assert bound(2 * NUM_WEIGHTS, "bf16", 256, 0) == pytest.approx(2 * 256 * NUM_WEIGHTS / 400e9 * 1e3)
    assert bound(NUM_WEIGHTS, "int8", 256, 0) == pytest.approx(2 * 256 * NUM_WEIGHTS / 800e9 * 1e3)


def test_contexts_are_read_once_for_each_request() -> None:
    one, two = (bound(0, "int8", batch_size, 100_000) for batch_size in (1, 2))
    assert two == pytest.approx(2 * one) == pytest.approx(2 * 100_000 * 23_040 / 20e9 * 1e3)
