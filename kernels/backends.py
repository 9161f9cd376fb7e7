"""Which implementation of an operation runs where.

Owns: the table of backends and the choice among them. Never does: run an operation, or read the environment.
An operation's public functions live in its own folder; only `reference` (plain torch) exists so far, for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from procengine.errors import ConfigError

__all__ = ["OPERATIONS", "Backend", "resolve_backend"]

logger = logging.getLogger(__name__)

OPERATIONS = ("activation", "attention", "kv_cache", "linear", "norm", "rope", "sampling")


@dataclass(frozen=True, slots=True)
class Backend:
    """A named implementation; `why_not(device_type)` is None where it can run, else the reason it cannot."""

    name: str
    why_not: Callable[[str], str | None]


def _runs_everywhere(device_type: str) -> str | None:
    return None


# Best first: "auto" takes the first one that can run.
_BACKENDS: dict[str, tuple[Backend, ...]] = {op: (Backend("reference", _runs_everywhere),) for op in OPERATIONS}


def resolve_backend(op: str, name: str, device: str) -> str:
    """The backend that `op` uses on `device` ("cpu", "cuda:0", ...).

    `name` is a backend or "auto". Raises ConfigError for a backend that does not exist or cannot run there.
    """
    return _resolve(op, name, device.partition(":")[0])


@cache  # one answer, and with it one log line, for each question
def _resolve(op: str, name: str, device_type: str) -> str:
    if op not in _BACKENDS:
        raise ConfigError(f"unknown operation {op!r}; there are: {', '.join(OPERATIONS)}")
    reasons = {backend.name: backend.why_not(device_type) for backend in _BACKENDS[op]}
    if name == "auto":
        return _choose(op, device_type, reasons)
    if name not in reasons:
        raise ConfigError(f"unknown {op} backend {name!r}; there are: auto, {', '.join(reasons)}")
    if reasons[name] is not None:
        raise ConfigError(f"{op} backend {name!r} cannot run on {device_type}: {reasons[name]}")
    return name


def _choose(op: str, device_type: str, reasons: dict[str, str | None]) -> str:
    runnable = [backend for backend, reason in reasons.items() if reason is None]
    refused = "; ".join(f"not {backend}: {reason}" for backend, reason in reasons.items() if reason is not None)
    if not runnable:
        raise ConfigError(f"no {op} backend runs on {device_type}: {refused}")
    logger.info("%s on %s: %s%s", op, device_type, runnable[0], f" ({refused})" if refused else "")
    return runnable[0]
