"""Where `scripts/clients` puts clients that are no part of the development environment. Tests skip what is missing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

__all__ = ["node_folder", "python_of", "script_of"]


def python_of(name: str) -> Path:
    """The interpreter of the environment that a Python client is installed in."""
    return script_of(name, "python")


def script_of(name: str, script: str) -> Path:
    """A command that a Python client brings along."""
    return _require(_home() / name / "bin" / script, name)


def node_folder(folder: Path, *sources: Path) -> Path:
    """`folder` with copies of these sources, and Node's packages where these will look for them."""
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed")
    modules = _require(_home() / "node" / "node_modules", "node")
    folder.mkdir(parents=True)
    (folder / "node_modules").symlink_to(modules)
    for source in sources:
        shutil.copy(source, folder)
    return folder


def _home() -> Path:
    asked = os.environ.get("PROCENGINE_CLIENTS_HOME")
    return Path(asked) if asked else Path.home() / ".cache" / "procengine-clients"


def _require(path: Path, name: str) -> Path:
    if not path.exists() or not (_home() / name / ".stamp").exists():
        pytest.skip(f"{name} is not installed: scripts/clients {name}")
    return path
