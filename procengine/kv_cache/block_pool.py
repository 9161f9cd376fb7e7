"""Blocks of one worker's KV pool: free, in use (ref-counted), or cached for reuse (least recently used goes first).

Owns: ref counts, the map from content hash to block, the eviction order. Never does: know a request.
A block is in exactly one of three states: free (no content), used (ref > 0), cached (ref 0, content addressable).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockPool"]

BlockIds = NDArray[np.int32]


class BlockPool:
    """`num_blocks` blocks. All methods are O(blocks touched)."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self._enable_prefix_caching = enable_prefix_caching
        self._ref_counts = np.zeros(num_blocks, np.int32)
        self._free_stack = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)
        self._num_free = num_blocks
        self._is_cached = np.zeros(num_blocks, np.bool_)
        self._hash_by_block: dict[int, bytes] = {}
        self._block_by_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: the free ones, then the cached ones nobody uses."""
        return self._num_free + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Blocks some request holds."""
        return self.num_blocks - self.num_available

    @property
    def num_cached(self) -> int:
        """Blocks nobody holds whose content can be found again."""
        return len(self._evictable)

    def allocate(self, count: int) -> BlockIds | None:
        """`count` blocks with ref count 1, int32 [count]; None, and nothing changed, if there are not that many."""
        if count > self.num_available:
            return None
        while self._num_free < count:
            self._evict_oldest()
        self._num_free -= count
        taken = self._free_stack[self._num_free : self._num_free + count].copy()
        self._ref_counts[taken] = 1
        return taken

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix of `hashes` whose content is here."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """The block that has this content."""
        return self._block_by_hash.get(block_hash)

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more holder for each of `blocks` (as `match` returned them)."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._evictable[block]
            self._ref_counts[block] += 1

    def publish(self, blocks: BlockIds, hashes: Sequence[bytes]) -> None:
        """Make the content of held blocks findable. A content that is already here keeps its first block."""
        if not self._enable_prefix_caching:
            return
        for block, block_hash in zip(blocks.tolist(), hashes, strict=True):
            if block_hash not in self._block_by_hash and block not in self._hash_by_block:
                self._block_by_hash[block_hash] = block
                self._hash_by_block[block] = block_hash
                self._is_cached[block] = True

    def release(self, blocks: BlockIds) -> None:
        """One holder less for each of `blocks` (in table order, without repeats)."""
        self._ref_counts[blocks] -= 1
        idle = blocks[self._ref_counts[blocks] == 0]
        cached = self._is_cached[idle]
        self._push_free(idle[~cached])
        # The tail of a sequence is the least likely to be shared: it is evicted first.
        for block in idle[cached][::-1].tolist():
            self._evictable[block] = None

    def release_shared(self, blocks: BlockIds) -> None:
        """The same of `blocks` of several holders: one that they share is there once for each."""
        while blocks.size:
            _, firsts = np.unique(blocks, return_index=True)
            self.release(blocks[np.sort(firsts)[::-1]])  # `release` takes the end for the first to be evicted
            blocks = np.delete(blocks, firsts)

    def check_integrity(self, num_holders: NDArray[np.int64] | None = None) -> None:
        """Raise AssertionError unless free + used + cached is the whole pool and every index agrees.

        `num_holders`, int64 [num_blocks], is how often the block tables name each block.
        """
        assert num_holders is None or (num_holders == self._ref_counts).all(), "ref counts differ from the block tables"
        free = set(self._free_stack[: self._num_free].tolist())
        cached = set(self._evictable)
        used = set(np.flatnonzero(self._ref_counts > 0).tolist())
        assert (self._ref_counts >= 0).all(), "negative ref count"
        assert len(free) == self._num_free, "a block is free twice"
        assert not (free & cached or free & used or cached & used), "a block is in two states"
        assert len(free) + len(cached) + len(used) == self.num_blocks, "a block is lost"
        assert {h: b for b, h in self._hash_by_block.items()} == self._block_by_hash, "hash maps disagree"
        assert set(np.flatnonzero(self._is_cached).tolist()) == set(self._hash_by_block), "cached flags disagree"
        assert cached <= set(self._hash_by_block) <= cached | used, "a free block has content"

    def _evict_oldest(self) -> None:
        block, _ = self._evictable.popitem(last=False)
        del self._block_by_hash[self._hash_by_block.pop(block)]
        self._is_cached[block] = False
        self._free_stack[self._num_free] = block
        self._num_free += 1

    def _push_free(self, blocks: BlockIds) -> None:
        self._free_stack[self._num_free : self._num_free + blocks.size] = blocks
        self._num_free += blocks.size
