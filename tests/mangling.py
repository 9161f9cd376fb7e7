"""Spoils bytes: what a broken disk, a hostile peer or a careless program would hand us."""

from __future__ import annotations

import random
from typing import Final

__all__ = ["mangled"]

_NUMBERS: Final = [0, 1, 0x7F, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 2**63 - 1, 2**63, 2**64 - 1, 2**32, 2**40]
_DIGITS: Final = b"0123456789"


def mangled(rnd: random.Random, data: bytes) -> bytes:
    """`data` with a few changes: bits flipped, bytes put in, left out, doubled or cut off, numbers made odd."""
    changed = bytearray(data)
    for _ in range(rnd.choice([1, 1, 1, 2, 5])):
        _change(rnd, changed)
    return bytes(changed)


def _change(rnd: random.Random, data: bytearray) -> None:
    at = rnd.randrange(len(data)) if data else 0
    match rnd.randrange(8):
        case 0 if data:
            data[at] ^= 1 << rnd.randrange(8)
        case 1:
            data.insert(at, rnd.randrange(256))
        case 2:
            del data[at : at + rnd.randint(1, 4)]
        case 3:
            del data[at:]
        case 4:
            data[at:at] = data[at : at + rnd.randint(1, 16)]
        case 5:  # a number as the containers write it
            width = rnd.choice([4, 8])
            data[at : at + width] = (rnd.choice(_NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
        case 6:  # a number as JSON writes it
            at = next((place for place in range(at, len(data)) if data[place] in _DIGITS), at)
            data[at : at + 1] = rnd.choice(
                [b"-1", b"0", b"99", b"18446744073709551615", b"1e9", b"[3]", b"null", b'""']
            )
        case _:
            data[at : at + 8] = rnd.randbytes(rnd.randint(0, 16))
