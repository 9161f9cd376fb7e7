"""The kernels' thread pool, by a program of its own: `thread_pool_test.cpp` says what must hold."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from procengine.kernels.native.build import FOLDER

COMPILER = shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_thread_pool_keeps_its_promises(tmp_path: Path) -> None:
    program = tmp_path / "thread_pool_test"
    sources = (Path(__file__).with_name("thread_pool_test.cpp"), FOLDER / "thread_pool.cpp")
    subprocess.run(
        [str(COMPILER), "-std=c++17", "-O1", "-pthread", f"-I{FOLDER}", "-o", program, *sources], check=True, timeout=60
    )
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
