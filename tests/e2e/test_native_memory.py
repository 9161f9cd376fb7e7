"""What a native worker of the real model holds at most: its packed weights, its KV pool, and little else."""

from __future__ import annotations

from pathlib import Path

import pytest

from procengine import SamplingParams
from procengine.child_process import peak_rss_bytes
from procengine.kernels.native import library
from tests.e2e.running_group import RunningGroup

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not library.is_available(), reason="the native library is not built"),
]

_BLOCKS = 256  # 4096 tokens: few enough that the load below fills them
_ROOM_MB = 150


@pytest.mark.parametrize("quantization", [pytest.param("int4", marks=pytest.mark.slow), "int8", "none"])
def test_peak_memory_is_weights_and_pool_and_little_else(quantization: str, smollm2_gguf: Path) -> None:
    """Prompts of the whole budget of a step, then decodes of all kinds, until every block has been in use."""
    with RunningGroup(smollm2_gguf, device="cpu", quantization=quantization, num_blocks=_BLOCKS) as group:
        prompts = [[(7 * i * i + row) % 49000 for i in range(480)] for row in range(6)]
        kinds = [
            SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True),
            SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=32, ignore_eos=True),
            SamplingParams(temperature=0.0, repetition_penalty=1.1, max_tokens=32, ignore_eos=True),
            SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=1, max_tokens=32, ignore_eos=True),
        ]
        group.generate(prompts, [kinds[row % len(kinds)] for row in range(len(prompts))])
        worker = group.ready["worker"]
        weights, pool = float(worker["weights_mb"]), float(worker["kv_pool_mb"])
        peak = peak_rss_bytes(group.pids["worker-0"]) / 1e6
    print(f"{quantization}: peak {peak:.0f} MB, packed weights {weights:.0f} MB, KV pool {pool:.0f} MB")
    assert peak <= weights + pool + _ROOM_MB
