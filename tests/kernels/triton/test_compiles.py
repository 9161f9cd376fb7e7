"""Every kernel compiles for a GPU, with no GPU there: the interpreter accepts more than the compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def run(folder: Path, program: str, *arguments: str) -> list[dict[str, Any]]:
    """What a program of this folder says, in which Triton compiles."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    command = [sys.executable, "-m", f"tests.kernels.triton.{program}", *arguments]
    done = subprocess.run(command, check=False, env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_kernel_compiles_for_a_gpu_and_fits(tmp_path: Path) -> None:
    compiled = run(tmp_path, "compile_kernels")
    assert {line["kernel"] for line in compiled} == KERNELS
    assert all(line["shared"] <= SHARED_MEMORY for line in compiled), compiled


@pytest.mark.parametrize("weights", ["none", pytest.param("int4", marks=pytest.mark.slow)])
def test_no_step_waits_for_a_compiler(weights: str, tmp_path: Path) -> None:
    """Whatever steps there are, wherever their inputs lie: all they run has been compiled before the first."""
    (found,) = run(tmp_path, "launched_kernels", weights)
    assert len(found["warm"]) > 10
    assert set(found["all"]) - set(found["warm"]) == set()
