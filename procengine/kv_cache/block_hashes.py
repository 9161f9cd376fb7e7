"""Content addresses of KV blocks: a salted sha256 chain over full blocks of confirmed tokens.

Owns: the hash. Never does: remember one. Equal hashes mean equal tokens at equal positions under the same salt; sha256
because a collision would show one user's context to another.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["extend_block_hashes"]


def extend_block_hashes(
    hashes: list[bytes], token_ids: NDArray[np.int32], block_size: int, salt: bytes = b""
) -> list[bytes]:
    """`hashes` continued over all full blocks of `token_ids` (int32 [n]); the given list is not changed."""
    chain = list(hashes)
    previous = chain[-1] if chain else hashlib.sha256(b"procengine-kv" + salt).digest()
    for start in range(len(chain) * block_size, len(token_ids) - block_size + 1, block_size):
        previous = hashlib.sha256(previous + token_ids[start : start + block_size].tobytes()).digest()
        chain.append(previous)
    return chain
