"""Payload frames: what is packed comes out again, in the order that the protocol pins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.step_payload import (
    EMBED_SECTIONS,
    RESULT_SECTIONS,
    SLOT_ROW,
    STEP_SECTIONS,
    SlotList,
    block_update_width,
    cut_sections,
    iter_rounds,
    iter_slot_lists,
    join_int64,
    pack_sections,
    split_int64,
)


def test_order_of_sections_is_pinned() -> None:
    assert STEP_SECTIONS == (
        "slots",
        "query_start_loc",
        "seq_lens",
        "sample_rows",
        "row_steps",
        "input_ids",
        "positions",
        "slot_rows",
        "block_updates",
        "slot_lists",
        "masked_rows",
        "mask_words",
        "prompt_rows",
        "prompt_targets",
        "sample_counts",
    )
    assert SLOT_ROW == (
        "slot",
        "key_low",
        "key_high",
        "seed_low",
        "seed_high",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "num_logprobs",
        "features",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
    )
    assert [block_update_width(groups) for groups in (1, 6)] == [3, 8]
    assert RESULT_SECTIONS == (
        "key_words",
        "positions",
        "token_ids",
        "logprob_rows",
        "logprob_token_ids",
        "logprobs",
        "logprob_ranks",
        "prompt_spans",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "prompt_logprob_ranks",
    )
    assert {kind.name: kind.value for kind in SlotList} == {
        "HISTORY": 0,
        "BIAS": 1,
        "EARLY_STOPS": 2,
        "BAD_WORD": 3,
        "ADAPTER": 4,
    }
    assert EMBED_SECTIONS == ("key_words", "query_start_loc", "input_ids", "positions", "token_types")


def test_pack_and_cut_are_inverse_and_absent_sections_are_empty() -> None:
    buffer = np.full(16, -7, np.int32)
    sections = {"a": np.array([1, 2], np.int32), "c": np.array([3], np.int32)}
    payload, sizes = pack_sections(("a", "b", "c"), sections, buffer)
    assert (payload.tolist(), sizes) == ([1, 2, 3], (2, 0, 1))
    cut = cut_sections(("a", "b", "c"), sizes, payload)
    assert {name: values.tolist() for name, values in cut.items()} == {"a": [1, 2], "b": [], "c": [3]}
    assert buffer[3:].tolist() == [-7] * 13


def test_cut_gives_views_and_reads_unaligned_read_only_frames() -> None:
    frame = b"x" + np.array([1, 2, 3], np.int32).tobytes()
    payload = np.frombuffer(memoryview(frame)[1:], np.int32)
    cut = cut_sections(("a", "b"), (2, 1), payload)
    assert np.shares_memory(cut["a"], payload)
    assert not cut["a"].flags.writeable
    assert join_int64(cut["a"]).tolist() == [1 + (2 << 32)]


def test_sizes_must_fit_the_names() -> None:
    with pytest.raises(ValueError, match="zip"):
        cut_sections(("a", "b"), (1,), np.zeros(1, np.int32))


def test_section_that_does_not_fit_the_buffer_is_an_error() -> None:
    with pytest.raises(ValueError, match="broadcast"):
        pack_sections(("a",), {"a": np.zeros(3, np.int32)}, np.zeros(2, np.int32))


@pytest.mark.parametrize("value", [0, 1, -1, 2**31, -(2**31), 2**63 - 1, -(2**63)])
def test_int64_words_go_low_first(value: int) -> None:
    words = split_int64(np.array([value], np.int64))
    assert words.tolist() == np.frombuffer(value.to_bytes(8, "little", signed=True), "<i4").tolist()
    assert join_int64(words).tolist() == [value]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 4), max_size=8))
def test_rounds_take_every_row_once_and_no_key_twice(counts: list[int]) -> None:
    keys = np.repeat(np.arange(10, 10 + len(counts)), counts).astype(np.int64)
    expected = [
        (
            [sum(counts[:key]) + ordinal for key, count in enumerate(counts) if count > ordinal],
            [ordinal == count - 1 for count in counts if count > ordinal],
        )
        for ordinal in range(max(counts, default=0))
    ]
    assert [(rows.tolist(), is_last.tolist()) for rows, is_last in iter_rounds(keys)] == expected


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(SlotList), st.integers(0, 99), st.lists(st.integers(-5, 5), max_size=4))))
def test_slot_list_records_are_read_back(records: list[tuple[SlotList, int, list[int]]]) -> None:
    section = np.array([w for kind, slot, data in records for w in (kind, slot, len(data), *data)], np.int32)
    assert [(kind, slot, data.tolist()) for kind, slot, data in iter_slot_lists(section)] == records


def test_unknown_kind_of_slot_list_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 is not a valid SlotList"):
        list(iter_slot_lists(np.array([9, 0, 0], np.int32)))
