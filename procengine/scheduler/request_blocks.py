"""`RequestBlocks`: which blocks of the pool hold a request's tokens, and under which content address others find them.

Owns: how requests use a `BlockPool`. Never does: decide which request gets its blocks next.

Where no layer has a window, a request gets the blocks of all its tokens when it starts. Else it gets them chunk by
chunk, so that those that fall out of a window meanwhile make room for those that come.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.kv_cache.block_groups import BlockGroups
from procengine.kv_cache.block_hashes import extend_block_hashes
from procengine.kv_cache.block_pool import BlockPool
from procengine.kv_cache.cached_prefix import CachedPrefix, find_prefix, group_hashes
from procengine.request import Request
from procengine.scheduler.limits import SchedulerLimits
from procengine.scheduler.plan import BlockUpdate
from procengine.scheduler.slot_table import Slots, SlotTable

__all__ = ["RequestBlocks"]

Int32s = NDArray[np.int32]


class RequestBlocks:
    """Finds, takes, gives back and publishes the blocks of requests, in a pool and in the tables of their slots."""

    def __init__(self, pool: BlockPool, table: SlotTable, limits: SchedulerLimits) -> None:
        self.groups = BlockGroups(limits.windows, limits.block_size)
        self._pool = pool
        self._table = table
        self._block_size = limits.block_size
        self._max_chunk = limits.max_chunk_tokens
        self._enable_prefix_caching = limits.enable_prefix_caching

    def count_needed(self, num_tokens: int) -> int:
        """Blocks that a prompt of so many tokens takes at most while it is computed."""
        most = self.groups.most_blocks(num_tokens, min(num_tokens, self._max_chunk))
        return min(most, self._pool.num_blocks)  # where that is less, its chunks are

    def count_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request's prompt that are in the cache now."""
        return find_prefix(self._pool, self.groups, self._hashes(request)).num_blocks * self._block_size

    def match(self, request: Request) -> CachedPrefix:
        """Cached blocks of a waiting request's tokens. At least one token is left to compute.

        A prefix that another request is computing is not computed twice: a prompt that is not finished leaves nothing
        of a step to those behind it, so none of them is admitted before its blocks are published. Who overtakes it
        finds those that are.
        """
        num_usable = len(request.token_ids) - 1
        if request.wants_prompt_logits:
            # What the cache holds are keys and values; logits that nobody has seen yet must be computed.
            num_usable = min(num_usable, request.num_scored_tokens)
        return find_prefix(self._pool, self.groups, self._hashes(request)[: num_usable // self._block_size])

    def take(self, request: Request, prefix: CachedPrefix, num_reserved: int) -> Int32s | None:
        """Block tables for a request that starts, int32 [groups, n]: the cached blocks and, without windows, fresh ones
        for all other tokens. None if that would leave less than `num_reserved` for others.
        """
        for blocks in prefix.blocks:
            self._pool.acquire(blocks)
        num_fresh = max(0, self.count_needed(len(request.token_ids)) - prefix.num_held)
        if num_fresh + num_reserved > self._pool.num_available:
            for blocks in prefix.blocks:
                self._pool.release(np.array(blocks, np.int32))
            return None
        if self.groups.has_windows:
            return prefix.table()
        fresh = self._pool.allocate(num_fresh)
        assert fresh is not None
        return np.concatenate((prefix.table(), fresh.reshape(self.groups.num_groups, -1)), axis=1)

    def enter(self, slot: int, blocks: Int32s, prefix: CachedPrefix) -> list[BlockUpdate]:
        """Give a new slot the block tables of `take`; what is cached counts as computed. Returns what changed."""
        table = self._table
        indices = table.extend_blocks(slot, blocks)
        table.first_blocks[:, slot] = prefix.firsts
        table.num_computed[slot] = prefix.num_blocks * self._block_size
        return [BlockUpdate(np.full(indices.size, slot, np.intp), indices, blocks)] if indices.size else []

    def grow(self, slots: Slots) -> BlockUpdate:
        """One more block in each group for each of `slots` (no repeats); there are that many."""
        blocks = self._pool.allocate(slots.size * self.groups.num_groups)
        assert blocks is not None
        by_group = blocks.reshape(self.groups.num_groups, -1)
        return BlockUpdate(slots, self._table.append_blocks(slots, by_group), by_group)

    def reserve_chunk(self, slot: int, start: int, length: int, updates: list[BlockUpdate]) -> int:
        """Give a running prompt blocks for its tokens from `start` on, and note them in `updates`.

        Returns:
            For how many of the next `length` there are blocks. With none it waits for a row that decodes: alone it
            always finds one, and nobody behind it gets any before it has what it needs.
        """
        self.drop_passed(np.array([slot]))
        num_held = int(self._table.num_blocks[slot])
        num_missing = -(-(start + length) // self._block_size) - num_held
        num_fresh = max(0, min(num_missing, self._pool.num_available // self.groups.num_groups))
        if num_fresh:
            blocks = self._pool.allocate(num_fresh * self.groups.num_groups)
            assert blocks is not None
            by_group = blocks.reshape(self.groups.num_groups, -1)
            indices = self._table.extend_blocks(slot, by_group)
            updates.append(BlockUpdate(np.full(num_fresh, slot, np.intp), indices, by_group))
        return min(length, (num_held + num_fresh) * self._block_size - start)

    def drop_passed(self, slots: Slots) -> None:
        """Let blocks go that have fallen out of the windows of these rows. Who gets them may write to them in the very
        step that is planned: nothing in it reads them any more."""
        firsts = self.groups.first_kept(self._table.num_computed[slots])
        self._pool.release_shared(self._table.pass_blocks(self.groups.sliding, slots, firsts))

    def publish_prompt(self, request: Request, slot: int, start: int, end: int) -> None:
        """Make those of a running request's blocks findable that tokens `start` to `end` of its prompt complete."""
        first = start // self._block_size
        hashes = request.block_hashes[first : end // self._block_size]  # none, without caching
        for group, blocks in enumerate(self._table.block_tables[:, slot, first : first + len(hashes)]):
            self._pool.publish(blocks, group_hashes(hashes, group))

    def release(self, request: Request, slot: int, token_ids: Int32s) -> None:
        """Give a request's blocks back. Those that its confirmed tokens, int32 [n], fill stay findable until they are
        needed. Output blocks are hashed here, once, and not as they fill: a steady step pays nothing for the cache.
        """
        num_full = token_ids.size // self._block_size
        if self._enable_prefix_caching:
            request.block_hashes = extend_block_hashes(
                request.block_hashes[:num_full],
                token_ids[: num_full * self._block_size],
                self._block_size,
                request.cache_salt,
            )
        firsts = self._table.first_blocks[:, slot].tolist()
        for group, (first, blocks) in enumerate(zip(firsts, self._table.held_blocks(slot), strict=True)):
            if self._enable_prefix_caching:
                hashes = group_hashes(request.block_hashes[first:num_full], group)
                self._pool.publish(blocks[: len(hashes)], hashes)
            self._pool.release(blocks)

    def check_integrity(self, slots: list[int]) -> None:
        """Raise AssertionError if one of these rows lacks a block that its next token sees. For tests."""
        table, groups = self._table, self.groups
        for slot in slots:
            num_computed = int(table.num_computed[slot])
            assert table.num_blocks[slot] * self._block_size >= num_computed, "a computed token has no block"
            for group, first in enumerate(table.first_blocks[:, slot].tolist()):
                assert first <= groups.first_seen(group, num_computed), "a block went that a window still needs"

    def _hashes(self, request: Request) -> list[bytes]:
        """Content addresses of the full blocks of a waiting request, kept with it."""
        if self._enable_prefix_caching:
            request.block_hashes = extend_block_hashes(
                request.block_hashes, request.token_ids, self._block_size, request.cache_salt
            )
        return request.block_hashes
