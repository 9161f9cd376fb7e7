"""Compiles the C++ sources in this folder into one shared library beside them.

    python -m procengine.kernels.native.build

Owns: compiler flags, what is stale, and the library's name. Never does: import anything but the standard library; the
build backend loads this file by its path, before the package or what it depends on is installed.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LIBRARY", "SOURCE_ID_SYMBOL", "BuildError", "build", "source_id"]

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "libprocengine_native.so"
SOURCE_ID_SYMBOL = "pe_source_id"

_OBJECTS = FOLDER / ".objects"  # compiled units, by the hash of all that went into them
_OBJECTS_LAST_S = 7 * 24 * 3600
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno")
_WARNINGS = ("-Wall", "-Wextra", "-Wno-maybe-uninitialized", "-Wno-uninitialized")
_X86 = ("x86_64", "AMD64")
# By the end of a unit's name. The level must be one that `cpu.h` tells apart at run time.
_ISA_FLAGS = {
    "_avx2": ("-mavx2", "-mfma", "-mf16c"),
    "_avx512": (
        *("-mavx2", "-mfma", "-mf16c", "-mprefer-vector-width=512"),
        *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl", "vnni", "bf16")),
    ),
}
_ISA_FLAGS["_amx"] = (*_ISA_FLAGS["_avx512"], "-mavx512fp16", "-mamx-tile", "-mamx-bf16")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """There is no compiler, or it refused a source; the text says which and why."""


def source_id() -> str:
    """What identifies the sources, 16 hexadecimal digits. The library holds that of the sources it was built from."""
    digest = hashlib.sha256()
    sources = [*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h"), FOLDER / "build.py"]
    for path in sorted(sources, key=lambda path: path.name):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def build() -> Path:
    """Compile what changed and link. Returns the library's path; raises BuildError.

    The new library takes the old one's place at once, so that a process which starts meanwhile finds either.
    """
    compiler = _find_compiler()
    _OBJECTS.mkdir(exist_ok=True)
    identity = source_id()
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(functools.partial(_compile, compiler), _units()))
    marker = _compile_marker(compiler, identity)
    _remove_old_objects()
    fresh = LIBRARY.with_suffix(f".{os.getpid()}.so")
    _run([compiler, "-shared", "-pthread", "-o", str(fresh), str(marker), *map(str, objects)])
    fresh.replace(LIBRARY)
    return LIBRARY


def _find_compiler() -> str:
    for name in _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise BuildError(f"no C++ compiler found (looked for {', '.join(_COMPILERS)})")


def _units() -> list[Path]:
    """Sources to compile here. Units for any CPU come first: the linker keeps the first copy of a shared function."""
    on_x86 = platform.machine() in _X86
    units = [path for path in FOLDER.glob("*.cpp") if on_x86 or not path.stem.endswith(tuple(_ISA_FLAGS))]
    return sorted(units, key=lambda path: (bool(_isa_flags(path)), path.name))


def _isa_flags(unit: Path) -> tuple[str, ...]:
    return next((flags for ending, flags in _ISA_FLAGS.items() if unit.stem.endswith(ending)), ())


def _compile(compiler: str, unit: Path) -> Path:
    command = [compiler, *_FLAGS, *_WARNINGS, *_isa_flags(unit)]
    digest = hashlib.sha256(" ".join(command).encode())
    for path in sorted(_with_includes(unit)):
        digest.update(path.read_bytes())
    target = _OBJECTS / f"{unit.stem}-{digest.hexdigest()[:16]}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.o")
        _run([*command, "-c", str(unit), "-o", str(partial)])
        partial.replace(target)
    target.touch()
    return target


def _with_includes(unit: Path) -> set[Path]:
    """The unit and the files of this folder that it includes, directly or not."""
    seen: set[Path] = set()
    todo = [unit]
    while todo:
        path = todo.pop()
        if path not in seen and path.exists():
            seen.add(path)
            todo.extend(FOLDER / name for name in _INCLUDE.findall(path.read_text(encoding="utf-8")))
    return seen


def _compile_marker(compiler: str, identity: str) -> Path:
    """The object that tells the library's source id."""
    target = _OBJECTS / f"source_id-{identity}.o"
    code = (
        f'extern "C" __attribute__((visibility("default"))) const char* {SOURCE_ID_SYMBOL}() {{ return "{identity}"; }}'
    )
    _run([compiler, "-fPIC", "-x", "c++", "-c", "-", "-o", str(target)], text=code)
    return target


def _remove_old_objects() -> None:
    """By age, and not by name: another build, of other sources, may be about to link its own."""
    for path in _OBJECTS.glob("*.o"):
        if path.stat().st_mtime < time.time() - _OBJECTS_LAST_S:
            path.unlink(missing_ok=True)


def _run(command: list[str], text: str = "") -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def main() -> int:
    start = time.monotonic()
    try:
        path = build()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path} ({path.stat().st_size >> 10} KiB, {time.monotonic() - start:.1f} s)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
