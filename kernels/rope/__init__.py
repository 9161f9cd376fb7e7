"""Rotary position embedding: the tables and their application.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.rope.reference import apply_rope
from procengine.kernels.rope.table import RopeSpec, RotaryTable, make_rotary_table

__all__ = ["RopeSpec", "RotaryTable", "apply_rope", "make_rotary_table"]
