"""Blocks are free, used or cached; nothing is lost, nothing is handed out twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from procengine.kv_cache.block_pool import BlockPool


def names(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def taken(pool: BlockPool, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    blocks = pool.allocate(count)
    assert blocks is not None
    pool.check_integrity()
    return blocks


def test_allocate_gives_distinct_blocks_and_all_of_them() -> None:
    pool = BlockPool(10)
    blocks = np.concatenate((taken(pool, 3), taken(pool, 7)))
    assert sorted(blocks.tolist()) == list(range(10))
    assert (pool.num_available, pool.num_used, pool.num_cached) == (0, 10, 0)


@pytest.mark.parametrize("count", [4, 100])
def test_allocate_changes_nothing_when_there_are_not_enough(count: int) -> None:
    pool = BlockPool(8)
    cached = taken(pool, 3)
    pool.publish(cached, names("a", "b", "c"))
    pool.release(cached)
    held = taken(pool, 5)
    assert pool.allocate(count) is None
    assert pool.match(names("a", "b", "c")) == cached.tolist()
    assert (pool.num_available, pool.num_cached) == (3, 3)
    pool.release(held)
    pool.check_integrity()


def test_allocate_of_nothing_is_nothing() -> None:
    pool = BlockPool(1)
    assert taken(pool, 0).size == 0
    assert pool.num_used == 0


def test_released_block_without_content_is_free_and_one_with_content_is_cached() -> None:
    pool = BlockPool(4)
    blocks = taken(pool, 3)
    pool.publish(blocks[:2], names("a", "b"))
    pool.release(blocks)
    pool.check_integrity()
    assert (pool.num_used, pool.num_cached, pool.num_available) == (0, 2, 4)


def test_match_gives_the_longest_prefix_and_stops_at_the_first_hole() -> None:
    pool = BlockPool(4)
    blocks = taken(pool, 3)
    pool.publish(blocks[[0, 2]], names("a", "c"))
    assert pool.match(names("a", "b", "c")) == [blocks[0]]
    assert pool.match(names("b")) == []
    assert pool.match([]) == []


def test_shared_block_is_used_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.publish(blocks, names("a"))
    pool.acquire(pool.match(names("a")))
    pool.release(blocks)
    pool.check_integrity()
    assert pool.num_used == 1
    pool.release(blocks)
    pool.check_integrity()
    assert (pool.num_used, pool.num_cached) == (0, 1)


def test_acquired_cached_block_cannot_be_evicted() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.publish(blocks, names("a"))
    pool.release(blocks)
    pool.acquire(pool.match(names("a")))
    assert pool.allocate(2) is None
    assert taken(pool, 1).tolist() != blocks.tolist()


def test_eviction_takes_the_least_recently_used_sequence_and_its_tail_first() -> None:
    pool = BlockPool(4)
    old, new = taken(pool, 2), taken(pool, 2)
    pool.publish(old, names("old-0", "old-1"))
    pool.publish(new, names("new-0", "new-1"))
    pool.release(old)
    pool.release(new)
    expected = [*old[::-1].tolist(), *new[::-1].tolist()]
    assert [int(taken(pool, 1)[0]) for _ in range(4)] == expected


def test_use_makes_a_cached_block_recent() -> None:
    pool = BlockPool(2)
    for name in ("a", "b"):
        block = taken(pool, 1)
        pool.publish(block, names(name))
        pool.release(block)
    first = pool.match(names("a"))
    pool.acquire(first)
    pool.release(np.array(first, np.int32))
    taken(pool, 1)
    assert pool.match(names("a")) == first
    assert pool.match(names("b")) == []


def test_evicted_content_cannot_be_found() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 2)
    pool.publish(blocks, names("a", "b"))
    pool.release(blocks)
    taken(pool, 1)
    assert pool.match(names("a", "b")) == [blocks[0]]


def test_second_block_with_known_content_stays_anonymous() -> None:
    pool = BlockPool(3)
    first, second = taken(pool, 1), taken(pool, 1)
    pool.publish(first, names("a"))
    pool.publish(second, names("a"))
    pool.check_integrity()
    pool.release(second)
    pool.check_integrity()
    assert pool.num_cached == 0
    assert pool.match(names("a")) == first.tolist()


def test_block_keeps_its_first_content() -> None:
    pool = BlockPool(2)
    block = taken(pool, 1)
    pool.publish(block, names("a"))
    pool.publish(block, names("b"))
    pool.check_integrity()
    assert pool.match(names("b")) == []


def test_publish_wants_a_hash_for_each_block() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="zip"):
        pool.publish(taken(pool, 2), names("a"))


def test_nothing_is_cached_when_prefix_caching_is_off() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    blocks = taken(pool, 2)
    pool.publish(blocks, names("a", "b"))
    pool.release(blocks)
    pool.check_integrity()
    assert pool.match(names("a")) == []
    assert pool.num_cached == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_the_pool_whole(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(12)
    held: list[np.ndarray[tuple[int], np.dtype[np.int32]]] = []
    for _ in range(300):
        action = rng.random()
        if action < 0.4:
            matched = pool.match([b"%d" % rng.randrange(6)])
            pool.acquire(matched)
            fresh = pool.allocate(rng.randrange(4))
            mine = (
                np.array(matched, np.int32) if fresh is None else np.concatenate((np.array(matched, np.int32), fresh))
            )
            held.append(mine)
        elif action < 0.6 and held:
            blocks = rng.choice(held)
            pool.publish(blocks, [b"%d" % rng.randrange(6) for _ in blocks])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check_integrity()
        assert pool.num_used == len({block for blocks in held for block in blocks.tolist()})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._ref_counts.__setitem__(0, -1), "negative"),
        (lambda pool: pool._ref_counts.__setitem__(3, 1), "two states"),
        (lambda pool: pool._ref_counts.__setitem__(0, 0), "lost"),
        (lambda pool: pool._hash_by_block.clear(), "disagree"),
        (lambda pool: pool._is_cached.__setitem__(0, True), "disagree"),
    ],
)
def test_check_integrity_sees_damage(damage: object, message: str) -> None:
    pool = BlockPool(4)
    blocks = taken(pool, 2)
    pool.publish(blocks[:1], names("a"))
    assert callable(damage)
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
