"""`LogitsState`: what changes the logits of slots before a token is drawn: penalties, biases, bans.

Owns: its tables on the device, made when a slot first needs one. Never does: draw a token, or know a request.
Everything is kept from step to step by the device's own tokens, so that nothing lags behind the pipeline.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.kernels.logits import apply_penalties, ban_sequences, ban_tokens_before
from procengine.row_features import BAD_WORDS, BIAS, EARLY_STOPS, NEEDS_HISTORY, NEEDS_LOGITS_STATE, PENALTIES
from procengine.step_payload import SlotList, iter_slot_lists

__all__ = ["LogitsState"]

Int32s = NDArray[np.int32]
_NO_TOKEN = -1
_WIDTH = 8  # smallest width of lists; they grow by need


class LogitsState:
    """Tables over `max_num_seqs` slots.

    `repetition`, `frequency`, `presence` are float32 [slots] views of the values each slot came with.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_num_seqs, vocab_size)
        self._device = device
        self._features = np.zeros(max_num_seqs, np.int32)
        self._penalties = torch.zeros((max_num_seqs, 3), device=device)
        self._output_counts: Tensor | None = None  # int32 [slots, vocab]
        self._prompt_mask: Tensor | None = None  # bool [slots, vocab]
        self._biases: Tensor | None = None  # float32 [slots, vocab]
        self._recent = torch.full((max_num_seqs, _WIDTH), _NO_TOKEN, dtype=torch.int32, device=device)
        self._early_ids = torch.full((max_num_seqs, _WIDTH), _NO_TOKEN, dtype=torch.int64, device=device)
        self._early_ends = np.zeros(max_num_seqs, np.int32)
        self._bad_words: list[list[Int32s]] = [[] for _ in range(max_num_seqs)]

    def place(self, slots: Int32s, features: Int32s, penalties: NDArray[np.float32]) -> None:
        """New holders of `slots`: their feature bits and [n, 3] repetition, frequency and presence penalties."""
        self._features[slots] = features
        self._penalties[torch.from_numpy(slots.astype(np.int64)).to(self._device)] = torch.from_numpy(
            np.ascontiguousarray(penalties)
        ).to(self._device)
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
                self._early_ids = _widened(self._early_ids, data.size - 1)
                self._early_ids[slot] = _NO_TOKEN
                self._early_ids[slot, : data.size - 1] = self._ids(data[1:])
            else:
                self._bad_words[slot].append(data.copy())
                self._recent = _widened(self._recent, data.size - 1, at_left=True)

    def adjust(self, logits: Tensor, slots: Int32s, positions: Int32s) -> Tensor:
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

    def record(self, slots: Int32s, tokens: Tensor) -> None:
        """These tokens, int32 [n] on the device, were drawn for `slots` (int32 [n] on the host, none twice)."""
        rows = np.flatnonzero(self._features[slots] & NEEDS_HISTORY)
        if not rows.size:
            return
        index, drawn = self._index(slots[rows]), tokens[self._index(rows)]
        if self._output_counts is not None:
            self._output_counts[index, drawn.long()] += 1
        self._recent[index] = torch.cat((self._recent[index, 1:], drawn[:, None]), dim=1)

    def _take_history(self, slot: int, prompt_length: int, tokens: Int32s) -> None:
        if self._features[slot] & PENALTIES:
            if self._output_counts is None or self._prompt_mask is None:
                self._output_counts = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
                self._prompt_mask = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
            self._prompt_mask[slot] = False
            self._prompt_mask[slot, self._ids(tokens[:prompt_length])] = True
            counts = np.bincount(tokens[prompt_length:], minlength=self._shape[1]).astype(np.int32)
            self._output_counts[slot] = torch.from_numpy(counts).to(self._device)
        tail = tokens[-self._recent.shape[1] :]
        self._recent[slot] = _NO_TOKEN
        self._recent[slot, self._recent.shape[1] - tail.size :] = self._ids(tail).int()

    def _take_bias(self, slot: int, fill: NDArray[np.float32], ids: Int32s, values: NDArray[np.float32]) -> None:
        if self._biases is None:
            self._biases = torch.zeros(self._shape, device=self._device)
        self._biases[slot] = float(fill[0])
        self._biases[slot, self._ids(ids)] = torch.from_numpy(values).to(self._device)

    def _add_biases(self, logits: Tensor, slots: Int32s, features: Int32s) -> None:
        rows = np.flatnonzero(features & BIAS)
        if rows.size and self._biases is not None:
            logits.index_add_(0, self._index(rows), self._biases[self._index(slots[rows])])

    def _ban_words(self, logits: Tensor, slots: Int32s, features: Int32s) -> None:
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
        recent = self._recent[self._index(slots[at])]
        ban_sequences(logits, self._index(at), recent, torch.from_numpy(prefixes).to(self._device), self._index(last))

    def _ban_early_stops(self, logits: Tensor, slots: Int32s, positions: Int32s, features: Int32s) -> None:
        is_early = ((features & EARLY_STOPS) != 0) & (positions < self._early_ends[slots])
        rows = np.flatnonzero(is_early)
        if rows.size:
            early = torch.ones(rows.size, dtype=torch.bool, device=self._device)
            ban_tokens_before(logits, self._index(rows), self._early_ids[self._index(slots[rows])], early)

    def _penalize(self, logits: Tensor, slots: Int32s, features: Int32s) -> None:
        rows = np.flatnonzero(features & PENALTIES)
        if not rows.size or self._output_counts is None or self._prompt_mask is None:
            return
        at, of = self._index(rows), self._index(slots[rows])
        repetition, frequency, presence = self._penalties[of].unbind(1)
        some = logits[at]
        apply_penalties(some, self._output_counts[of], self._prompt_mask[of], repetition, frequency, presence)
        logits[at] = some

    def _index(self, rows: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self._device)

    def _ids(self, token_ids: Int32s) -> Tensor:
        return self._index(token_ids)


def _widened(table: Tensor, width: int, *, at_left: bool = False) -> Tensor:
    """`table` with at least `width` columns, the new ones empty."""
    missing = width - table.shape[1]
    if missing <= 0:
        return table
    blank = table.new_full((table.shape[0], missing), _NO_TOKEN)
    return torch.cat((blank, table) if at_left else (table, blank), dim=1)
