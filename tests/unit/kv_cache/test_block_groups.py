"""The arithmetic of windows, and prefixes whose beginning is gone, against their definitions token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.kv_cache.block_groups import BlockGroups
from procengine.kv_cache.block_pool import BlockPool
from procengine.kv_cache.cached_prefix import find_prefix, group_hashes

WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4).map(tuple)
BLOCK_SIZES = st.sampled_from([1, 3, 4, 16])


def seen_blocks(window: int | None, position: int, block_size: int) -> set[int]:
    """Table indices of the tokens that a query sees, itself included."""
    first = 0 if window is None else max(0, position - window + 1)
    return {token // block_size for token in range(first, position + 1)}


@given(windows=WINDOWS, block_size=BLOCK_SIZES, position=st.integers(0, 200))
def test_what_is_kept_is_what_a_query_sees_and_at_most_a_block_more(
    windows: tuple[int | None, ...], block_size: int, position: int
) -> None:
    groups = BlockGroups(windows, block_size)
    kept = groups.first_kept(np.array([position], np.int32))
    assert kept.dtype == np.int32
    for row, group in enumerate(groups.sliding.tolist()):
        first = min(seen_blocks(windows[group], position, block_size))
        assert groups.first_seen(group, position) == first
        assert max(0, first - 1) <= kept[row, 0] <= first
    for group in groups.whole:
        assert groups.first_seen(group, position) == 0


@given(
    windows=WINDOWS,
    block_size=BLOCK_SIZES,
    num_tokens=st.integers(1, 120),
    num_queries=st.integers(1, 30),
)
def test_most_blocks_is_never_exceeded_and_is_reached_up_to_a_block(
    windows: tuple[int | None, ...], block_size: int, num_tokens: int, num_queries: int
) -> None:
    groups = BlockGroups(windows, block_size)
    most, firsts = 0, [0]
    for start in range(num_tokens):
        end = min(num_tokens, start + num_queries)
        firsts = groups.first_kept(np.array([start], np.int32))[:, 0].tolist()
        held = [-(-end // block_size) - first for first in firsts]
        most = max(most, sum(held) + len(groups.whole) * -(-end // block_size))
    allowed = groups.most_blocks(num_tokens, num_queries)
    assert most <= allowed <= most + len(firsts)


@given(windows=WINDOWS, block_size=BLOCK_SIZES, num_blocks=st.integers(0, 300), num_queries=st.integers(1, 9))
def test_most_tokens_is_the_longest_sequence_that_fits(
    windows: tuple[int | None, ...], block_size: int, num_blocks: int, num_queries: int
) -> None:
    groups, longest = BlockGroups(windows, block_size), 100
    found = groups.most_tokens(num_blocks, num_queries, longest)
    assert found == 0 or groups.most_blocks(found, num_queries) <= num_blocks
    if not groups.has_windows or found < longest:
        assert groups.most_blocks(found + 1, num_queries) > num_blocks


@settings(max_examples=300)
@given(data=st.data(), windows=WINDOWS, block_size=BLOCK_SIZES, num_hashes=st.integers(0, 12))
def test_a_prefix_is_the_longest_with_all_that_the_next_token_sees(
    data: st.DataObject, windows: tuple[int | None, ...], block_size: int, num_hashes: int
) -> None:
    groups = BlockGroups(windows, block_size)
    hashes = [b"%d" % index for index in range(num_hashes)]
    pool = BlockPool(len(windows) * num_hashes + 1)
    block_of: dict[tuple[int, int], int] = {}
    for group in range(len(windows)):
        for index, name in enumerate(group_hashes(hashes, group)):
            if data.draw(st.integers(0, 9)) < 8:
                blocks = pool.allocate(1)
                assert blocks is not None
                pool.publish(blocks, [name])
                block_of[group, index] = int(blocks[0])

    def is_usable(num_blocks: int, widest: bool) -> bool:
        """`widest`: where windows differ, all sliding groups are asked for what the widest sees."""
        reach, position = max(window or 0 for window in windows) if widest else 0, num_blocks * block_size
        return all(
            (group, index) in block_of
            for group, window in enumerate(windows)
            for index in seen_blocks(window and max(window, reach), position, block_size)
            if index < num_blocks
        )

    prefix = find_prefix(pool, groups, hashes)
    assert is_usable(prefix.num_blocks, widest=False)
    assert not any(is_usable(longer, widest=True) for longer in range(prefix.num_blocks + 1, num_hashes + 1))
    table = prefix.table()
    assert table.shape == (len(windows), prefix.num_blocks)
    assert prefix.num_held == sum(prefix.num_blocks - first for first in prefix.firsts)
    for group, first in enumerate(prefix.firsts):
        assert first == groups.first_seen(group, prefix.num_blocks * block_size)
        assert table[group, :first].tolist() == [0] * min(first, prefix.num_blocks)
        assert table[group, first:].tolist() == [block_of[group, i] for i in range(first, prefix.num_blocks)]
