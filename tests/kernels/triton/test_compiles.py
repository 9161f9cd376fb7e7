"""Every kernel compiles for a GPU, with no GPU there: the interpreter accepts more than the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHARED_MEMORY = 227 << 10  # bytes a block may have on compute capability 9.0, CUDA C++ Programming Guide
KERNELS = {
    "_bitmask_kernel",
    "_decode_kernel",
    "_dequantize_kernel",
    "_gate_kernel",
    "_join_kernel",
    "_logprobs_kernel",
    "_penalties_kernel",
    "_prefill_kernel",
    "_quantized_linear_kernel",
    "_rms_norm_kernel",
    "_rope_kernel",
    "_sample_kernel",
    "_write_kv_kernel",
}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_kernel_compiles_for_a_gpu_and_fits(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_kernels"]
    done = subprocess.run(command, check=False, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {line["kernel"] for line in compiled} == KERNELS
    assert all(line["shared"] <= SHARED_MEMORY for line in compiled), compiled
