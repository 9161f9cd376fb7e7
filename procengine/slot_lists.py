"""Records of a slot that have no fixed length: token histories, biases, stops, bad words; and what few slots have:
adapters.

Owns: how a request's rules are laid into the `slot_lists` section. Never does: read one (`step_payload` does).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from procengine.request import Request
from procengine.row_features import ADAPTER, BAD_WORDS, BIAS, EARLY_STOPS, NEEDS_HISTORY, NEEDS_LOGITS_STATE
from procengine.step_payload import SlotList

__all__ = ["float32_bits", "slot_lists"]


def slot_lists(requests: Sequence[Request]) -> NDArray[np.int32]:
    """The section for requests that get their slot in this step, int32 [n]; empty if none has a rule."""
    words: list[int] = []
    for request in requests:
        if request.sampling.features & (NEEDS_LOGITS_STATE | ADAPTER):
            for kind, data in _records(request):
                words += [kind, request.slot, len(data), *data]
    return np.array(words, np.int32)


def float32_bits(value: float) -> int:
    """The int32 that has the bits of `value` as a float32."""
    return int(np.array([value], np.float32).view(np.int32)[0])


def _records(request: Request) -> list[tuple[SlotList, list[int]]]:
    features, rules = request.sampling.features, request.rules
    records: list[tuple[SlotList, list[int]]] = []
    if features & BAD_WORDS:  # first: the longest one says how much history is kept
        records += [(SlotList.BAD_WORD, list(word)) for word in rules.bad_words]
    if features & NEEDS_HISTORY:
        # A request that comes back says where its prompt ends, so that its output can be counted again.
        records.append((SlotList.HISTORY, [len(request.prompt_token_ids), *request.token_ids.tolist()]))
    if features & BIAS:
        records.append((SlotList.BIAS, _bias(request)))
    if features & EARLY_STOPS:
        records.append((SlotList.EARLY_STOPS, [request.min_position, *rules.early_stop_ids]))
    if features & ADAPTER:
        records.append((SlotList.ADAPTER, [request.adapter]))
    return records


def _bias(request: Request) -> list[int]:
    bias, allowed = dict(request.rules.logit_bias), request.rules.allowed_token_ids
    if allowed is None:
        return [float32_bits(0.0), *_pairs(bias)]
    return [float32_bits(float("-inf")), *_pairs({token_id: bias.get(token_id, 0.0) for token_id in allowed})]


def _pairs(values: dict[int, float]) -> list[int]:
    return [word for token_id, value in values.items() for word in (token_id, float32_bits(value))]
