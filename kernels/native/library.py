"""The shared library: found, checked against its sources, and opened once.

Owns: the handle, the typed functions it gives out, the instruction set and the number of threads its kernels use. Never
does: build the library (`build.py` does), or fall back on its own: callers ask `why_not` first.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import cache
from typing import Any

from procengine.errors import ConfigError
from procengine.kernels.native.build import LIBRARY, SOURCE_ID_SYMBOL, source_id

__all__ = [
    "Isa",
    "best_isa",
    "forced_isa",
    "is_available",
    "isa",
    "native_function",
    "num_threads",
    "set_num_threads",
    "why_not",
]

logger = logging.getLogger(__name__)

_REBUILD = "python -m procengine.kernels.native.build"


class Isa(IntEnum):
    """Instruction sets that kernels are written for; `cpu.h` says what each takes."""

    PORTABLE = 0
    AVX2 = 1
    AVX512 = 2
    AMX = 3


def why_not(device_type: str) -> str | None:
    """Why native kernels cannot run on a device of this type ("cpu", "cuda"); None where they can."""
    if device_type != "cpu":
        return "native kernels are for the CPU"
    return _open()[1]


def is_available() -> bool:
    """Whether the library is there and was built from these sources. Says so in the log, once, where it is not."""
    return _open()[0] is not None


def native_function(name: str, restype: Any, *argtypes: Any) -> Any:
    """The C function `name`, which then converts and checks its arguments. Raises ConfigError without the library.

    The call releases the GIL. Pointers are `ctypes.c_void_p`, given as the integer that `Tensor.data_ptr()` returns.
    """
    library, reason = _open()
    if library is None:
        raise ConfigError(f"the native kernels cannot be used: {reason}")
    function = library[name]  # a new object each time, unlike the attribute: the types are this caller's alone
    function.restype = restype
    function.argtypes = argtypes
    return function


def best_isa() -> Isa:
    """The best instruction set of this CPU that kernels are written for."""
    return Isa(native_function("pe_best_isa", ctypes.c_int32)())


def isa() -> Isa:
    """The instruction set in use: the best, but for tests."""
    return Isa(native_function("pe_isa", ctypes.c_int32)())


@contextmanager
def forced_isa(level: Isa) -> Iterator[None]:
    """Within the block, all kernels use `level`. For tests: it holds for the whole process. Raises ConfigError."""
    set_isa = native_function("pe_set_isa", ctypes.c_int32, ctypes.c_int32)
    before = native_function("pe_isa", ctypes.c_int32)()
    if set_isa(level) != 0:
        raise ConfigError(f"this CPU cannot run {level.name} kernels; the best it can is {best_isa().name}")
    try:
        yield
    finally:
        set_isa(before)


def num_threads() -> int:
    """The threads that kernels run on, the caller's included. 1 until `set_num_threads` is called."""
    return int(native_function("pe_num_threads", ctypes.c_int32)())


def set_num_threads(count: int) -> int:
    """Resize the pool (1 to 256 threads); returns its new size, which is less where the system refuses more threads.

    No kernel may be running.
    """
    if not 1 <= count <= 256:
        raise ConfigError(f"threads must be between 1 and 256, not {count}")
    return int(native_function("pe_set_num_threads", ctypes.c_int32, ctypes.c_int32)(count))


@cache
def _open() -> tuple[ctypes.CDLL | None, str | None]:
    """The library, or why there is none."""
    library, reason = None, None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        reason = _mismatch(library)
    except OSError as error:
        reason = f"cannot be loaded ({error})" if LIBRARY.exists() else "not built (no C++ compiler at install time?)"
    if library is not None and reason is None:
        return library, None
    logger.warning(
        "native CPU kernels are %s: CPU inference uses plain torch, several times slower; %s", reason, _REBUILD
    )
    return None, f"{reason}; to build: {_REBUILD}"


def _mismatch(library: ctypes.CDLL) -> str | None:
    """Why a library that loaded must not be used: its functions may not be those that these sources declare."""
    tell = library[SOURCE_ID_SYMBOL]
    tell.restype = ctypes.c_char_p
    built_from, here = tell().decode(), source_id()
    return None if built_from == here else f"built from other sources ({built_from}, not {here})"
