"""`EmbedRunner`: sequences to vectors on the device: forward over packed sequences, pool, normalise.

Owns: that order. Never does: keep anything from step to step: there is no KV cache here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A
from procengine.config import Pooling
from procengine.errors import ConfigError
from procengine.executor import Model
from procengine.kernels.pooling.native import shorten
from procengine.messages import EmbedInput
from procengine.step_output import EmbedOutput, PassTimes
from procengine.step_payload import EMBED_SECTIONS, cut_sections, join_int64

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["EmbedRunner", "open_runner"]


class EmbedRunner(Generic[A]):
    """Vectors have the model's hidden size and length 1."""

    def __init__(self, model: Model[A], pooling: Pooling) -> None:
        self._model = model
        if pooling not in ("last", "mean"):
            raise ConfigError(f"pooling: decoders pool by last or mean, not by {pooling}")
        kernels = model.arrays.kernels
        self._pool: Callable[[A, A], A] = kernels.pool_last if pooling == "last" else kernels.pool_mean
        self._run: Callable[[EmbedInput, NDArray[np.int32]], Iterator[EmbedOutput]]
        self._run = model.arrays.without_gradients(self._run_pass)

    def run(self, header: EmbedInput, payload: NDArray[np.int32]) -> Iterator[EmbedOutput]:
        """The one output of a step. `payload` is int32 [n] and not kept."""
        return self._run(header, payload)

    def keys_of(self, header: EmbedInput, payload: NDArray[np.int32]) -> list[int]:
        """The requests of a step."""
        keys: list[int] = join_int64(cut_sections(EMBED_SECTIONS, header.sizes, payload.copy())["key_words"]).tolist()
        return keys

    def _run_pass(self, header: EmbedInput, payload: NDArray[np.int32]) -> Iterator[EmbedOutput]:
        started_ns = time.monotonic_ns()
        arrays = self._model.arrays
        sections = cut_sections(EMBED_SECTIONS, header.sizes, payload.copy())
        sent = {name: arrays.send(section) for name, section in sections.items()}
        staged_ns = time.monotonic_ns()
        bounds = sent["query_start_loc"]
        positions = arrays.widen(sent["positions"])
        hidden = self._model.encode(sent["input_ids"], positions, bounds, header.max_query_len)
        forwarded_ns = time.monotonic_ns()
        copied = arrays.fetch([self._pool(hidden, bounds)])
        (dimensions,) = header.options or (0,)
        keys = join_int64(sections["key_words"])
        times = PassTimes(started_ns, staged_ns, forwarded_ns, time.monotonic_ns())
        yield EmbedOutput(header.step_id, keys, lambda: shorten(copied()[0], dimensions, normalize=True), times)


def open_runner(device: Device[A]) -> EmbedRunner[A]:
    """The runner of `embed` steps on `device`."""
    return EmbedRunner(device.model, device.config.model.pooling)
