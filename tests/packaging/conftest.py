"""The distributions, built once from a copy of the tree: the sdist, and the wheel from that sdist."""

from __future__ import annotations

import os
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
    """sdist and wheel as `python -m build` makes them: the wheel comes from the unpacked sdist.

    No compiler is on the path: compiling takes long in a new folder, and installing must not depend on it.
    """
    folder = tmp_path_factory.mktemp("packaging")
    tree, dist = folder / "tree", folder / "dist"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    shutil.copy(ROOT / ".gitignore", tree)  # the build backend reads it
    output = build_distributions(tree, dist, {**os.environ, "PATH": str(folder)})
    assert "no C++ compiler found" in output
    (sdist,) = dist.glob("*.tar.gz")
    (wheel,) = dist.glob("*.whl")
    return Distributions(sdist, wheel)


def build_distributions(tree: Path, dist: Path, environment: dict[str, str], *options: str) -> str:
    """Build into `dist`; returns what the build printed."""
    command = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(dist), str(tree)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
