"""The distributions, built once from a copy of the tree: the sdist, and the wheel from that sdist."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_LEFT_OUT = (".*", "__pycache__", "build", "dist", "*.gguf", "*.safetensors")


@dataclass(frozen=True)
class Distributions:
    """Files that a release would upload."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """sdist and wheel as `python -m build` makes them: the wheel comes from the unpacked sdist."""
    folder = tmp_path_factory.mktemp("packaging")
    tree, dist = folder / "tree", folder / "dist"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    shutil.copy(ROOT / ".gitignore", tree)  # the build backend reads it
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    return Distributions(sdist, wheel)
