"""Equal addresses mean equal tokens at equal positions under one salt."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.kv_cache.block_hashes import adapter_salt, extend_block_hashes


def tokens(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


@pytest.mark.parametrize(("num_tokens", "num_hashes"), [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (9, 2)])
def test_only_full_blocks_have_a_hash(num_tokens: int, num_hashes: int) -> None:
    assert len(extend_block_hashes([], np.arange(num_tokens, dtype=np.int32), 4)) == num_hashes


def test_hash_is_a_salted_sha256_chain() -> None:
    root = hashlib.sha256(b"procengine-kv" + b"salt").digest()
    first = hashlib.sha256(root + tokens(1, 2).tobytes()).digest()
    second = hashlib.sha256(first + tokens(3, 4).tobytes()).digest()
    assert extend_block_hashes([], tokens(1, 2, 3, 4, 5), 2, b"salt") == [first, second]


@pytest.mark.parametrize("cut", range(10))
def test_extending_in_two_goes_equals_one(cut: int) -> None:
    whole = np.arange(9, dtype=np.int32)
    begun = extend_block_hashes([], whole[:cut], 2)
    assert extend_block_hashes(begun, whole, 2) == extend_block_hashes([], whole, 2)


def test_given_list_is_not_changed() -> None:
    begun = extend_block_hashes([], tokens(1, 2), 2)
    extend_block_hashes(begun, tokens(1, 2, 3, 4), 2)
    assert len(begun) == 1


def test_equal_tokens_behind_another_prefix_have_another_hash() -> None:
    assert extend_block_hashes([], tokens(1, 2, 3, 4), 2)[1] != extend_block_hashes([], tokens(9, 2, 3, 4), 2)[1]


def test_salt_and_block_order_count() -> None:
    base = extend_block_hashes([], tokens(1, 2, 3, 4), 2)
    assert not set(base) & set(extend_block_hashes([], tokens(1, 2, 3, 4), 2, b"x"))
    assert not set(base) & set(extend_block_hashes([], tokens(3, 4, 1, 2), 2))


def test_slices_that_are_not_contiguous_hash_like_copies() -> None:
    wide = np.arange(16, dtype=np.int32)[::2]
    assert extend_block_hashes([], wide, 4) == extend_block_hashes([], wide.copy(), 4)


@given(
    st.tuples(st.integers(0, 2**62), st.text(st.characters(codec="utf-8"))),
    st.tuples(st.integers(0, 2**62), st.text(st.characters(codec="utf-8"))),
)
def test_salts_of_adapters_are_apart_from_each_other_and_from_all_without(
    one: tuple[int, str], other: tuple[int, str]
) -> None:
    salts = [adapter_salt(number, salt.encode()) for number, salt in (one, other)]
    assert (salts[0] == salts[1]) == (one == other)
    assert not {one[1].encode(), other[1].encode()} & set(salts)
