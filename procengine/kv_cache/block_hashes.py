"""Content addresses of KV blocks: a salted sha256 chain over full blocks of confirmed tokens.

Owns: the hash. Never does: remember one. Equal hashes mean equal tokens at equal positions under the same salt; sha256
because a collision would show one user's context to another.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

__all__ = ["adapter_salt", "extend_block_hashes"]


def adapter_salt(number: int, salt: bytes) -> bytes:
    """The salt of a request with the LoRA adapter of this number: keys and values are not those without it. What a
    client chose is UTF-8, in which there is no byte 255: no salt without an adapter is the same.
    """
    return b"\xff" + number.to_bytes(8, "little") + salt


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
