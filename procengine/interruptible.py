"""`Interruptible`: a stretch of Python code in one thread that another thread may end.

Owns: that the exception arrives inside that stretch and nowhere else. Never does: interrupt a single operation of the
interpreter: what such a one may cost has to be bounded by who runs it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

__all__ = ["Interrupted", "Interruptible"]

_T = TypeVar("_T")
_raise_in: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Interrupted(Exception):  # noqa: N818 - no error: somebody wanted it
    """The stretch was ended from outside."""


class Interruptible:
    """One stretch at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._started_s = 0.0

    def run(self, function: Callable[[], _T]) -> _T:
        """What `function` returns.

        Raises:
            Interrupted: it was ended from outside.
        """
        try:
            with self._lock:
                self._thread, self._started_s = threading.get_ident(), time.monotonic()
            try:
                return function()
            finally:
                with self._lock:  # an exception that was sent before arrives here, still inside
                    self._thread = None
        except Interrupted:
            with self._lock:
                self._thread = None
            raise

    def end_if_longer_than(self, limit_s: float) -> bool:
        """End the stretch that runs, if it has for so long. Whether it has."""
        with self._lock:
            if self._thread is None or time.monotonic() - self._started_s < limit_s:
                return False
            _raise_in(ctypes.c_ulong(self._thread), ctypes.py_object(Interrupted))
            self._thread = None
            return True
