"""`PrefillRunner`: sequences through a decoder, once and without sampling, and what a workflow makes of their hidden
states.

Owns: that order, the pieces of a sequence that is too long for a step, and the reductions of `embed` and
`hidden_states`. Never does: keep anything from step to step but one sequence that is not through yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A
from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.executor import Model
from procengine.kernels.pooling.native import shorten
from procengine.messages import EmbedInput
from procengine.open_sequence import OpenSequence
from procengine.step_output import EmbedOutput, PassTimes
from procengine.step_payload import EMBED_SECTIONS, cut_sections, join_int64
from procengine.workflows.hidden_states import TOKENS

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["PrefillRunner", "Reduction", "Sequences", "last_states", "open_embed", "open_hidden_states"]

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]


class Reduction(NamedTuple):
    """What becomes of the sequences of a step: `wait`, called once and on any thread, gives float32 [R, n] or, with
    `counts` (int32 [R]), so many numbers for each, one behind the other."""

    wait: Callable[[], Float32s]
    counts: Int32s | None = None


@dataclass(frozen=True, slots=True)
class Sequences(Generic[A]):
    """Sequences one behind the other: host arrays, but for `hidden`."""

    hidden: A  # [T, hidden_size]
    input_ids: Int32s  # [T]
    bounds: Int32s  # [R + 1], where each begins, and T
    options: tuple[int, ...]


class PrefillRunner(Generic[A]):
    """One workflow's steps. `layers` says how many layers a step's options ask for, None is all and the final norm.

    A sequence that comes in pieces is reduced piece by piece: numbers of its tokens are put together, of what it gives
    as a whole the last piece's counts. With `overlaps` each piece begins with the last token of the one before.
    """

    def __init__(
        self,
        workflow: str,
        model: Model[A],
        config: EngineConfig,
        reduce: Callable[[Sequences[A]], Reduction],
        layers: Callable[[tuple[int, ...]], int | None] = lambda _options: None,
        *,
        overlaps: bool = False,
    ) -> None:
        self._workflow = workflow
        self._model = model
        self._config = config
        self._reduce = reduce
        self._layers = layers
        self._overlaps = overlaps
        self._open: OpenSequence[A] | None = None
        self._run: Callable[[EmbedInput, Int32s], Iterator[EmbedOutput]]
        self._run = model.arrays.without_gradients(self._run_pass)

    def run(self, header: EmbedInput, payload: Int32s) -> Iterator[EmbedOutput]:
        """The one output of a step. `payload` is int32 [n] and not kept."""
        return self._run(header, payload)

    def keys_of(self, header: EmbedInput, payload: Int32s) -> list[int]:
        """The requests of a step."""
        keys: list[int] = join_int64(cut_sections(EMBED_SECTIONS, header.sizes, payload.copy())["key_words"]).tolist()
        return keys

    def _run_pass(self, header: EmbedInput, payload: Int32s) -> Iterator[EmbedOutput]:
        started_ns = time.monotonic_ns()
        arrays = self._model.arrays
        sections = cut_sections(EMBED_SECTIONS, header.sizes, payload.copy())
        input_ids, positions = arrays.send(sections["input_ids"]), arrays.widen(arrays.send(sections["positions"]))
        bounds, keys = sections["query_start_loc"], join_int64(sections["key_words"])
        staged_ns = time.monotonic_ns()
        if header.num_sequence_tokens:
            piece = self._opened(header, sections).forward(input_ids, positions, sections["input_ids"])
            forwarded_ns = time.monotonic_ns()
            keys, reduction = self._reduced_piece(piece, keys, header.options)
        else:
            self._open = None  # one that was given up halfway: its memory is of no use any more
            hidden = self._model.encode(
                input_ids, positions, arrays.send(bounds), header.max_query_len, self._layers(header.options)
            )
            forwarded_ns = time.monotonic_ns()
            reduction = self._reduce(Sequences(hidden, sections["input_ids"], bounds, header.options))
        times = PassTimes(started_ns, staged_ns, forwarded_ns, time.monotonic_ns())
        yield EmbedOutput(header.step_id, keys, reduction.wait, times, workflow=self._workflow, counts=reduction.counts)

    def _opened(self, header: EmbedInput, sections: dict[str, Int32s]) -> OpenSequence[A]:
        """The sequence that this step's piece belongs to."""
        if sections["positions"][0] == 0:
            self._open = None  # the memory of the last one goes before that of the next is taken
            self._open = OpenSequence(self._model, self._config, header.num_sequence_tokens, overlaps=self._overlaps)
        assert self._open is not None, "a sequence begins with its first piece"
        return self._open

    def _reduced_piece(
        self, piece: tuple[A, Int32s], keys: NDArray[np.int64], options: tuple[int, ...]
    ) -> tuple[NDArray[np.int64], Reduction]:
        """Whose result the step gives, nobody's if more pieces follow, and what that is."""
        hidden, input_ids = piece
        sequence = self._open
        assert sequence is not None
        bounds = np.array([0, len(input_ids)], np.int32)
        reduction = self._reduce(Sequences(hidden, input_ids, bounds, options))
        count = 0 if reduction.counts is None else int(reduction.counts[0])
        if not sequence.is_through:
            return keys[:0], Reduction(sequence.keep(reduction.wait, count))
        self._open = None
        if reduction.counts is None:
            return keys, reduction
        whole = np.array([sequence.num_kept + count], np.int32)
        return keys, Reduction(lambda: sequence.joined(reduction.wait()), whole)


def states_at(model: Model[A], states: Sequences[A], rows: Int32s) -> A:
    """[n, hidden_size], of the tokens `rows` ([n])."""
    hidden: A = states.hidden[model.arrays.send(rows.astype(np.int64))]
    return hidden


def last_states(model: Model[A], states: Sequences[A]) -> A:
    """[R, hidden_size], of each sequence's last token."""
    return states_at(model, states, states.bounds[1:] - 1)


def open_embed(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `embed` steps: vectors have the model's hidden size and length 1."""
    model, pooling = device.model, device.config.model.pooling
    if pooling not in ("last", "mean"):
        raise ConfigError(f"pooling: decoders pool by last or mean, not by {pooling}")
    arrays = model.arrays
    pool = arrays.kernels.pool_last if pooling == "last" else arrays.kernels.pool_mean

    def reduce(states: Sequences[A]) -> Reduction:
        copied = arrays.fetch([pool(states.hidden, arrays.send(states.bounds))])
        (dimensions,) = states.options or (0,)
        return Reduction(lambda: shorten(copied()[0], dimensions, normalize=True))

    return PrefillRunner("embed", model, device.config, reduce)


def open_hidden_states(device: Device[A]) -> PrefillRunner[A]:
    """The runner of `hidden_states` steps."""
    model, num_layers = device.model, device.config.model.num_layers
    arrays = model.arrays

    def reduce(states: Sequences[A]) -> Reduction:
        which, bounds = TOKENS[states.options[1]], states.bounds
        if which == "all":
            copied = arrays.fetch([arrays.to_float32(states.hidden)])
            width = np.int32(states.hidden.shape[1])
            return Reduction(lambda: copied()[0], np.diff(bounds) * width)
        rows = bounds[1:] - 1 if which == "last" else bounds[:-1]
        copied = arrays.fetch([arrays.to_float32(states_at(model, states, rows))])
        return Reduction(lambda: copied()[0])

    def layers(options: tuple[int, ...]) -> int | None:
        return None if options[0] == num_layers else options[0]

    return PrefillRunner("hidden_states", model, device.config, reduce, layers)
