"""`RequestBlocks`: which blocks of the pool hold a request's tokens, and under which content address others find them.

Owns: how requests use a `BlockPool`. Never does: decide which request gets its blocks next.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.kv_cache.block_hashes import extend_block_hashes
from procengine.kv_cache.block_pool import BlockPool
from procengine.request import Request

__all__ = ["RequestBlocks"]

Int32s = NDArray[np.int32]


class RequestBlocks:
    """Finds, takes and publishes the blocks of requests."""

    def __init__(self, pool: BlockPool, block_size: int, *, enable_prefix_caching: bool) -> None:
        self._pool = pool
        self._block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching

    def count_needed(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self._block_size)

    def count_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request's prompt that are in the cache now."""
        return len(self._pool.match(self._hashes(request))) * self._block_size

    def match(self, request: Request) -> list[int]:
        """Cached blocks of a waiting request's tokens. At least one token is left to compute.

        A prefix that another request is computing is not computed twice: a prompt that is not finished takes the whole
        budget of a step, so nobody is admitted before its blocks are published.
        """
        num_usable = len(request.token_ids) - 1
        if request.wants_prompt_logits:
            # What the cache holds are keys and values; logits that nobody has seen yet must be computed.
            num_usable = min(num_usable, request.num_scored_tokens)
        return self._pool.match(self._hashes(request)[: num_usable // self._block_size])

    def take(self, request: Request, matched: list[int], num_reserved: int) -> Int32s | None:
        """The matched blocks and fresh ones for the other tokens, int32 [n]; None if that would leave less than
        `num_reserved` for others.
        """
        self._pool.acquire(matched)
        held = np.array(matched, np.int32)
        num_fresh = self.count_needed(len(request.token_ids) - held.size * self._block_size)
        has_room = num_fresh + num_reserved <= self._pool.num_available
        fresh = self._pool.allocate(num_fresh) if has_room else None
        if fresh is None:
            self._pool.release(held)
            return None
        return np.concatenate((held, fresh))

    def publish_prompt(self, request: Request, blocks: Int32s, start: int, end: int) -> None:
        """Make those of a running request's blocks findable that tokens `start` to `end` of its prompt complete."""
        first = start // self._block_size
        hashes = request.block_hashes[first : end // self._block_size]  # none, without caching
        self._pool.publish(blocks[first : first + len(hashes)], hashes)

    def release(self, request: Request, blocks: Int32s, token_ids: Int32s) -> None:
        """Give a request's blocks back. Those that its confirmed tokens, int32 [n], fill stay findable until they are
        needed. Output blocks are hashed here, once, and not as they fill: a steady step pays nothing for the cache.
        """
        if self._enable_prefix_caching:
            num_full = token_ids.size // self._block_size
            request.block_hashes = extend_block_hashes(
                request.block_hashes[:num_full],
                token_ids[: num_full * self._block_size],
                self._block_size,
                request.cache_salt,
            )
            self._pool.publish(blocks[:num_full], request.block_hashes)
        self._pool.release(blocks)

    def _hashes(self, request: Request) -> list[bytes]:
        """Content addresses of the full blocks of a waiting request, kept with it."""
        if self._enable_prefix_caching:
            request.block_hashes = extend_block_hashes(
                request.block_hashes, request.token_ids, self._block_size, request.cache_salt
            )
        return request.block_hashes
