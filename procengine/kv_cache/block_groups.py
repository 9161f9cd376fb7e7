"""`BlockGroups`: which blocks of a sequence each group of layers needs, and how many that makes.

Owns: the arithmetic of windows. Never does: hold a block. All groups have the same block size, and entry i of each
group's table stands for the tokens i * block_size and those behind it.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

__all__ = ["BlockGroups"]

Int32s = NDArray[np.int32]


class BlockGroups:
    """Groups by the tokens that a query sees in each, its own included; None is all.

    Attributes:
        sliding: intp, the groups that have a window.
        whole: those that have none.
    """

    def __init__(self, windows: tuple[int | None, ...], block_size: int) -> None:
        self.windows = windows
        self.block_size = block_size
        self.num_groups = len(windows)
        self.whole = [group for group, window in enumerate(windows) if window is None]
        self.sliding = np.array([group for group, window in enumerate(windows) if window is not None], np.intp)
        self._reaches = [window - 1 for window in windows if window is not None]  # tokens before a query
        # A block more is kept. Results under way may end a request some tokens before the place planned for it, and a
        # prefix is only found again with all of the window behind its last full block.
        self._kept = np.array(self._reaches, np.int32)[:, None] + np.int32(block_size)

    @property
    def has_windows(self) -> bool:
        """Whether there is a group that lets go of blocks."""
        return self.sliding.size > 0

    def first_kept(self, positions: Int32s) -> Int32s:
        """The first table index of each sliding group, int32 [sliding, n], that is still held when the next query
        stands at `positions`, int32 [n]."""
        kept: Int32s = np.maximum(positions - self._kept, 0) // self.block_size
        return kept

    def first_seen(self, group: int, position: int) -> int:
        """The first table index that a query at `position` sees."""
        window = self.windows[group]
        return 0 if window is None else max(position - window + 1, 0) // self.block_size

    def first_seen_by_sliding(self, position: int) -> int:
        """The same of the sliding group that sees most."""
        return max(position - max(self._reaches), 0) // self.block_size

    def most_blocks(self, num_tokens: int, num_queries: int) -> int:
        """Blocks of all groups that a sequence may hold at once while it grows to `num_tokens`, at most `num_queries`
        tokens a step."""
        num_indices = -(-num_tokens // self.block_size)
        total = len(self.whole) * num_indices
        for reach in self._reaches:
            seen = reach + self.block_size + num_queries  # consecutive tokens, which begin anywhere in a block
            total += min(num_indices, -(-(seen - 1) // self.block_size) + 1)
        return total

    def most_tokens(self, num_blocks: int, num_queries: int, max_tokens: int) -> int:
        """The longest sequence, of at most `max_tokens` if a window lets go of blocks, that so many hold."""
        if not self.has_windows:
            return num_blocks // self.num_groups * self.block_size
        indices = range(-(-max_tokens // self.block_size) + 1)
        fitting = bisect_right(
            indices, num_blocks, key=lambda count: self.most_blocks(count * self.block_size, num_queries)
        )
        return (fitting - 1) * self.block_size
