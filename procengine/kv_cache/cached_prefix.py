"""`CachedPrefix`: what a pool still has of a sequence's beginning, for each group of layers.

Owns: how long a prefix is when windows have let go of its beginning, and the names of blocks by group. Never does: hold
a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.kv_cache.block_groups import BlockGroups
from procengine.kv_cache.block_pool import BlockPool

__all__ = ["CachedPrefix", "find_prefix", "group_hashes"]


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """The first `num_blocks` full blocks of a sequence. Of each group those from `firsts[group]` on are there, which is
    all that the tokens behind them see."""

    num_blocks: int
    firsts: list[int]
    blocks: list[list[int]]

    @property
    def num_held(self) -> int:
        """Blocks of all groups."""
        return sum(map(len, self.blocks))

    def table(self) -> NDArray[np.int32]:
        """Block tables, int32 [groups, num_blocks]; entries that nobody reads are 0."""
        table = np.zeros((len(self.blocks), self.num_blocks), np.int32)
        for row, first, blocks in zip(table, self.firsts, self.blocks, strict=True):
            row[first:] = blocks
        return table


def group_hashes(hashes: Sequence[bytes], group: int) -> Sequence[bytes]:
    """The names of a group's blocks: what other layers computed of the same tokens is another content."""
    return hashes if group == 0 else [block_hash + bytes((group,)) for block_hash in hashes]


def find_prefix(pool: BlockPool, groups: BlockGroups, hashes: Sequence[bytes]) -> CachedPrefix:
    """The longest prefix of the blocks with these `hashes` behind which a sequence can go on."""
    whole = [pool.match(group_hashes(hashes, group)) for group in groups.whole]
    num_blocks = min(map(len, whole), default=len(hashes))
    if not groups.has_windows:
        return CachedPrefix(num_blocks, [0] * groups.num_groups, [blocks[:num_blocks] for blocks in whole])
    num_blocks = _end_of_windows(pool, groups, hashes, num_blocks)
    firsts = [groups.first_seen(group, num_blocks * groups.block_size) for group in range(groups.num_groups)]
    needed = [group_hashes(hashes[first:num_blocks], group) for group, first in enumerate(firsts)]
    return CachedPrefix(num_blocks, firsts, [pool.match(group) for group in needed])


def _end_of_windows(pool: BlockPool, groups: BlockGroups, hashes: Sequence[bytes], end: int) -> int:
    """The most blocks, at most `end`, of which all sliding groups have the last ones, as far back as they see.

    Blocks are looked at from the window's beginning: whoever ends behind a hole, within a window of it, sees it too. So
    where nothing is cached, one look is taken for each window.
    """
    sliding = groups.sliding.tolist()

    def is_hole(index: int) -> bool:
        names = (group_hashes(hashes[index : index + 1], group)[0] for group in sliding)
        return any(pool.find(name) is None for name in names)

    while True:
        first = groups.first_seen_by_sliding(end * groups.block_size)
        hole = next((index for index in range(first, end) if is_hole(index)), None)
        if hole is None:
            return end
        end = hole
