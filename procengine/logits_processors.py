"""Logits processors that the server's operator plugs in: what they are given, and how they are found.

Owns: the plug-in interface (docs/PLUGINS.md). Never does: take one from a client: a name in the server's
configuration is code that runs in the worker.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from procengine.config import ModelConfig
from procengine.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LogitsContext", "LogitsProcessor", "load_logits_processors"]


@dataclass(frozen=True, slots=True)
class LogitsContext:
    """Whose logits they are, on the host: request keys int64 [n] and the positions of the tokens to draw, int32 [n]."""

    keys: NDArray[np.int64]
    positions: NDArray[np.int32]


class LogitsProcessor(Protocol):
    """Called once a forward pass, after penalties, biases and bans, before temperature and filters."""

    def __call__(self, logits: Tensor, context: LogitsContext) -> Tensor:
        """Logits to draw from, float32 [n, vocab]; `logits` may be changed in place and returned."""
        ...


def load_logits_processors(names: Sequence[str], model: ModelConfig) -> list[LogitsProcessor]:
    """The processors that these "module:callable" factories make for a model.

    Raises:
        ConfigError: one cannot be imported or called; names it.
    """
    return [_load(name, model) for name in names]


def _load(name: str, model: ModelConfig) -> LogitsProcessor:
    module, separator, attribute = name.partition(":")
    if not separator:
        raise ConfigError(f"logits_processors: {name!r} must have the form module:callable")
    try:
        processor: LogitsProcessor = getattr(importlib.import_module(module), attribute)(model)
    except Exception as error:
        raise ConfigError(f"logits_processors: {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not callable(processor):
        raise ConfigError(f"logits_processors: {name!r} made {processor!r}, which cannot be called")
    return processor
