"""`LogitsState`: what changes the logits of slots before a token is drawn: penalties, biases, bans.

Owns: its tables on the device, made when a slot first needs one. Never does: draw a token, or know a request.
Everything is kept from step to step by the device's own tokens, so that nothing lags behind the pipeline.
"""

from __future__ import annotations

from typing import Generic

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A, Arrays, ElementType
from procengine.row_features import BAD_WORDS, BIAS, EARLY_STOPS, NEEDS_HISTORY, NEEDS_LOGITS_STATE, PENALTIES
from procengine.step_payload import SlotList, iter_slot_lists

__all__ = ["LogitsState"]

Int32s = NDArray[np.int32]
_NO_TOKEN = -1
_WIDTH = 8  # smallest width of lists; they grow by need


class LogitsState(Generic[A]):
    """Tables over `max_num_seqs` slots."""

    def __init__(self, max_num_seqs: int, vocab_size: int, arrays: Arrays[A]) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._arrays = arrays
        self._kernels = arrays.kernels
        self._features = np.zeros(max_num_seqs, np.int32)
        self._penalties = arrays.new([max_num_seqs, 3], "float32")  # repetition, frequency, presence
        self._output_counts: A | None = None  # int32 [slots, vocab]
        self._prompt_mask: A | None = None  # bool [slots, vocab]
        self._biases: A | None = None  # float32 [slots, vocab]
        self._recent = arrays.new([max_num_seqs, _WIDTH], "int32", _NO_TOKEN)
        self._early_ids = arrays.new([max_num_seqs, _WIDTH], "int64", _NO_TOKEN)
        self._early_ends = np.zeros(max_num_seqs, np.int32)
        self._bad_words: list[list[Int32s]] = [[] for _ in range(max_num_seqs)]

    def place(self, slots: Int32s, features: Int32s, penalties: NDArray[np.float32]) -> None:
        """New holders of `slots`: their feature bits and [n, 3] repetition, frequency and presence penalties."""
        self._features[slots] = features
        self._penalties[self._send(slots)] = self._arrays.send(np.ascontiguousarray(penalties))
        for slot in slots[(features & BAD_WORDS) != 0].tolist():
            self._bad_words[slot] = []

    def take_lists(self, section: Int32s) -> None:
        """The `slot_lists` section of a step, on the host."""
        for kind, slot, data in iter_slot_lists(section):
            if kind is SlotList.HISTORY:
                self._take_history(slot, int(data[0]), data[1:])
            elif kind is SlotList.BIAS:
                self._take_bias(slot, data[:1].view(np.float32), data[1::2], data[2::2].copy().view(np.float32))
            elif kind is SlotList.EARLY_STOPS:
                self._early_ends[slot] = data[0]
                self._early_ids = self._widened(self._early_ids, data.size - 1, "int64")
                self._early_ids[slot] = _NO_TOKEN
                self._early_ids[slot, : data.size - 1] = self._send(data[1:])
            elif kind is SlotList.BAD_WORD:
                self._bad_words[slot].append(data.copy())
                self._recent = self._widened(self._recent, data.size - 1, "int32", at_left=True)

    def adjust(self, logits: A, slots: Int32s, positions: Int32s) -> A:
        """Logits of the tokens to draw, float32 [n, vocab], changed in place.

        Args:
            slots: int32 [n], on the host.
            positions: int32 [n], of the tokens to draw.
        """
        features = self._features[slots]
        if not (features & NEEDS_LOGITS_STATE).any():
            return logits
        self._add_biases(logits, slots, features)
        self._ban_words(logits, slots, features)
        self._ban_early_stops(logits, slots, positions, features)
        self._penalize(logits, slots, features)
        return logits

    def record(self, slots: Int32s, tokens: A) -> None:
        """These tokens, int32 [n] on the device, were drawn for `slots` (int32 [n] on the host, none twice)."""
        rows = np.flatnonzero(self._features[slots] & NEEDS_HISTORY)
        if not rows.size:
            return
        index, drawn = self._send(slots[rows]), tokens[self._send(rows)]
        if self._output_counts is not None:
            self._output_counts[index, self._arrays.widen(drawn)] += 1
        self._recent[index] = self._arrays.concatenate((self._recent[index, 1:], drawn[:, None]), axis=1)

    def _take_history(self, slot: int, prompt_length: int, tokens: Int32s) -> None:
        if self._features[slot] & PENALTIES:
            if self._output_counts is None or self._prompt_mask is None:
                self._output_counts = self._arrays.new(self._shape, "int32")
                self._prompt_mask = self._arrays.new(self._shape, "bool")
            self._prompt_mask[slot] = False
            # Not a plain True: torch brings the value of an indexed assignment to a GPU by a copy that waits.
            self._prompt_mask[slot, self._send(tokens[:prompt_length])] = self._arrays.new(
                [prompt_length], "bool", True
            )
            counts = np.bincount(tokens[prompt_length:], minlength=self._shape[1]).astype(np.int32)
            self._output_counts[slot] = self._arrays.send(counts)
        tail = tokens[-self._recent.shape[1] :]
        self._recent[slot] = _NO_TOKEN
        self._recent[slot, self._recent.shape[1] - tail.size :] = self._arrays.send(tail.copy())

    def _take_bias(self, slot: int, fill: NDArray[np.float32], ids: Int32s, values: NDArray[np.float32]) -> None:
        if self._biases is None:
            self._biases = self._arrays.new(self._shape, "float32")
        self._biases[slot] = float(fill[0])
        self._biases[slot, self._send(ids)] = self._arrays.send(values)

    def _add_biases(self, logits: A, slots: Int32s, features: Int32s) -> None:
        rows = np.flatnonzero(features & BIAS)
        if rows.size and self._biases is not None:
            self._kernels.add_rows(logits, self._send(rows), self._biases, self._send(slots[rows]))

    def _ban_words(self, logits: A, slots: Int32s, features: Int32s) -> None:
        rows = np.flatnonzero(features & BAD_WORDS)
        entries = [(row, word) for row in rows.tolist() for word in self._bad_words[slots[row]]]
        if not entries:
            return
        width = self._recent.shape[1]
        prefixes = np.full((len(entries), width), _NO_TOKEN, np.int32)
        for prefix, (_, word) in zip(prefixes, entries, strict=True):
            prefix[width - word.size + 1 :] = word[:-1]
        at = np.array([row for row, _ in entries], np.int64)
        last = np.array([word[-1] for _, word in entries], np.int64)
        recent = self._recent[self._send(slots[at])]
        self._kernels.ban_sequences(logits, self._send(at), recent, self._arrays.send(prefixes), self._send(last))

    def _ban_early_stops(self, logits: A, slots: Int32s, positions: Int32s, features: Int32s) -> None:
        is_early = ((features & EARLY_STOPS) != 0) & (positions < self._early_ends[slots])
        rows = np.flatnonzero(is_early)
        if rows.size:
            early = self._arrays.new([rows.size], "bool", True)
            ids = self._early_ids[self._send(slots[rows])]
            self._kernels.ban_tokens_before(logits, self._send(rows), ids, early)

    def _penalize(self, logits: A, slots: Int32s, features: Int32s) -> None:
        rows = np.flatnonzero(features & PENALTIES)
        if not rows.size or self._output_counts is None or self._prompt_mask is None:
            return
        of = self._send(slots[rows])
        self._kernels.apply_penalties(
            logits, self._send(rows), self._output_counts, self._prompt_mask, of, self._penalties[of]
        )

    def _send(self, indices: NDArray[np.integer]) -> A:
        """int64."""
        return self._arrays.send(indices.astype(np.int64))

    def _widened(self, table: A, width: int, dtype: ElementType, *, at_left: bool = False) -> A:
        """`table` with at least `width` columns, the new ones empty."""
        missing = width - table.shape[1]
        if missing <= 0:
            return table
        blank = self._arrays.new([table.shape[0], missing], dtype, _NO_TOKEN)
        return self._arrays.concatenate((blank, table) if at_left else (table, blank), axis=1)
