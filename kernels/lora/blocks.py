"""`AdapterBlocks`: the tokens of a batch that have adapters, lined up so that one batched product serves all of them.

Owns: the order. Never does: compute; free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["AdapterBlocks", "adapter_blocks"]

A = TypeVar("A")
_MAX_WIDTH: Final = 16  # tokens; for each block an adapter's matrices are gathered once


@dataclass(frozen=True, slots=True)
class AdapterBlocks(Generic[A]):
    """Blocks of `width` places, each with tokens of one adapter; the last block of an adapter may have places to spare.

    Attributes:
        tokens: int64 [N], the tokens of the batch that have an adapter, those of one adapter one behind the other.
        places: int64 [N], where each of them stands among the places of all blocks.
        adapters: int64 [blocks], whose each block is.
    """

    tokens: A
    places: A
    adapters: A
    width: int


def adapter_blocks(token_adapters: NDArray[np.int32]) -> AdapterBlocks[NDArray[Any]] | None:
    """Blocks for tokens with these adapters, int32 [T], where -1 is none; None if nobody has one.

    Blocks are as wide as the adapter with most tokens needs them, up to a limit: a decode step of 64 rows gives 64
    blocks of one place with 64 adapters, and four of sixteen places with one.
    """
    having = np.flatnonzero(token_adapters >= 0)
    if not having.size:
        return None
    tokens = having[np.argsort(token_adapters[having], kind="stable")]
    adapters, counts = np.unique(token_adapters[having], return_counts=True)
    width = min(_MAX_WIDTH, 1 << (int(counts.max()) - 1).bit_length())
    num_blocks = -(-counts // width)
    within = np.arange(tokens.size) - np.repeat(np.cumsum(counts) - counts, counts)
    first_places = (np.cumsum(num_blocks) - num_blocks) * width
    places = within + np.repeat(first_places, counts)
    return AdapterBlocks(tokens, places, np.repeat(adapters, num_blocks).astype(np.int64), width)
