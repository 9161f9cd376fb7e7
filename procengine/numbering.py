"""How requests and steps are numbered, so that no number is ever used again.

Owns: the rule. A frontend counts its requests and each worker's steps from the first number of its epoch on, so numbers
grow from each one to the next, also from a frontend to its successor, and a number says whose it is. They stay below
2**53, the largest integers that every language can hold.
"""

from __future__ import annotations

from typing import Final

__all__ = ["epoch_of", "first_number"]

_BITS: Final = 40  # 17 years of 2000 a second


def first_number(epoch: int) -> int:
    """The first key and the first step id of the frontend of this epoch."""
    return epoch << _BITS


def epoch_of(number: int) -> int:
    """The epoch of the frontend that gave this number."""
    return number >> _BITS
