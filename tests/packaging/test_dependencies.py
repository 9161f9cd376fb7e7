"""pyproject.toml declares what the product imports: nothing missing, nothing left over."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Distribution -> import root, where the two differ.
IMPORT_ROOT = {"pyzmq": "zmq"}

# Imported only where present: the extras, and backends that come with a GPU build of torch or alone.
OPTIONAL = {"flash_attn", "huggingface_hub", "matplotlib", "opentelemetry", "transformers", "triton"}


def declared() -> set[str]:
    """Import roots of [project] dependencies."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    names = {re.split(r"[<>=!~;\[ ]", requirement, maxsplit=1)[0] for requirement in table["project"]["dependencies"]}
    return {IMPORT_ROOT.get(name, name) for name in names}


def imported() -> set[str]:
    """Import roots of others that the product names, lazy imports included."""
    roots = set()
    for folder in ("procengine", "procs", "kernels"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    roots |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    roots.add(node.module.split(".")[0])
    return roots - set(sys.stdlib_module_names) - {"procengine"}


def test_every_import_is_declared() -> None:
    assert imported() - declared() - OPTIONAL == set()


def test_every_dependency_is_imported() -> None:
    assert declared() - imported() == set()
