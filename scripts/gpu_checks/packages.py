"""Finds what the engine imports, on a machine that may have torch, triton and numpy alone.

Owns: wheels brought along, and what stands in for msgspec where there is none. Never does: install, or replace what is
there: all of it goes to the end of the path.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["NEEDED_BY", "make_importable", "missing"]

ROOT = Path(__file__).resolve().parents[2]
_STAND_IN = Path(__file__).resolve().parent / "stand_in"

# Beyond torch, triton and numpy. Parts that are not named need no more than these three.
NEEDED_BY: dict[str, tuple[str, ...]] = {
    "greedy": ("transformers",),
    "peer": ("transformers", "accelerate"),
    "group": ("msgspec", "zmq", "uvloop", "tokenizers", "tqdm", "jinja2", "gguf", "llguidance", "transformers"),
}


def make_importable(wheels: Path | None) -> list[str]:
    """Put the working tree, and the wheels of the folder, on the path. Returns what there is to say about it."""
    sys.path.insert(0, str(ROOT))
    said = []
    if wheels is not None:
        said.append(f"wheels: {', '.join(_unpack(sorted(wheels.glob('*.whl')))) or 'none needed'}")
    if importlib.util.find_spec("msgspec") is None:
        sys.path.append(str(_STAND_IN))
        said.append("no msgspec: messages are plain objects, and the part `group` cannot run")
    return said


def missing(part: str) -> list[str]:
    """What a part needs and cannot have."""
    lacking = [name for name in NEEDED_BY.get(part, ()) if importlib.util.find_spec(name) is None]
    if "msgspec" in NEEDED_BY.get(part, ()) and "msgspec" not in lacking and _is_stand_in("msgspec"):
        lacking.append("msgspec")
    return lacking


def _is_stand_in(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and str(spec.origin).startswith(str(_STAND_IN))


def _unpack(wheels: list[Path]) -> list[str]:
    """A wheel is a zip whose root is what goes to the path. Those whose packages are installed are left alone."""
    folder, names = tempfile.mkdtemp(prefix="gpu-check-wheels-"), []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            roots = {name.split("/")[0].removesuffix(".py") for name in archive.namelist()}
            if not any(root.isidentifier() and importlib.util.find_spec(root) for root in roots):
                archive.extractall(folder)
                names.append(wheel.name.split("-")[0])
    sys.path.append(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return names
