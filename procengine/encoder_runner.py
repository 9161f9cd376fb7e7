"""`EncoderRunner`: sequences through a bidirectional encoder, and what a workflow makes of their hidden states.

Owns: that order, and the reductions of `embed` and `hidden_states`. Never does: keep anything from step to step: there
is no KV cache here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.config import Pooling
from procengine.encoder_model import EncoderModel
from procengine.kernels.pooling.native import pool, shorten
from procengine.messages import EmbedInput
from procengine.step_output import EmbedOutput, PassTimes
from procengine.step_payload import EMBED_SECTIONS, cut_sections, join_int64
from procengine.workflows.hidden_states import TOKENS

if TYPE_CHECKING:
    from procengine.encoder_device import EncoderDevice

__all__ = ["EncoderRunner", "Reduced", "open_embed", "open_hidden_states"]

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Options = tuple[int, ...]


class Reduced(NamedTuple):
    """What becomes of the hidden states of some sequences: as many numbers of each (`counts` None), or so many."""

    numbers: Float32s
    counts: Int32s | None = None


class EncoderRunner:
    """One workflow's steps. `reduce` gets hidden states [T, hidden], the sequences' bounds int32 [R + 1] and the step's
    options; `layers` says how many layers these ask for, None is all."""

    def __init__(
        self,
        workflow: str,
        model: EncoderModel,
        reduce: Callable[[Float32s, Int32s, Options], Reduced],
        layers: Callable[[Options], int | None] = lambda _options: None,
    ) -> None:
        self._workflow = workflow
        self._model = model
        self._reduce = reduce
        self._layers = layers

    def run(self, header: EmbedInput, payload: Int32s) -> Iterator[EmbedOutput]:
        """The one output of a step. `payload` is int32 [n] and not kept."""
        started_ns = time.monotonic_ns()
        sections = cut_sections(EMBED_SECTIONS, header.sizes, payload.copy())
        types, bounds = sections["token_types"], sections["query_start_loc"]
        staged_ns = time.monotonic_ns()
        hidden = self._model.encode(
            sections["input_ids"], types if types.size else None, bounds, self._layers(header.options)
        )
        forwarded_ns = time.monotonic_ns()
        numbers, counts = self._reduce(hidden, bounds, header.options)
        times = PassTimes(started_ns, staged_ns, forwarded_ns, time.monotonic_ns())
        keys = join_int64(sections["key_words"])
        yield EmbedOutput(header.step_id, keys, lambda: numbers, times, workflow=self._workflow, counts=counts)


def open_embed(device: EncoderDevice) -> EncoderRunner:
    """The runner of `embed` steps."""
    config = device.config.model

    def reduce(hidden: Float32s, bounds: Int32s, options: Options) -> Reduced:
        vectors = pool(hidden, bounds, config.pooling, normalize=config.normalize)
        return Reduced(shorten(vectors, options[0], normalize=config.normalize))

    return EncoderRunner("embed", device.model, reduce)


def open_hidden_states(device: EncoderDevice) -> EncoderRunner:
    """The runner of `hidden_states` steps."""

    def reduce(hidden: Float32s, bounds: Int32s, options: Options) -> Reduced:
        which = TOKENS[options[1]]
        if which == "all":
            return Reduced(hidden, np.diff(bounds) * np.int32(hidden.shape[1]))
        pooling: Pooling = "last" if which == "last" else "cls"
        return Reduced(pool(hidden, bounds, pooling, normalize=False))

    return EncoderRunner("hidden_states", device.model, reduce, lambda options: options[0])
