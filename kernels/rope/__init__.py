"""Rotary position embedding: the tables, which are free of torch, and their application in `reference`.

Owns: what callers may use without torch. Never does: arithmetic; that is in the modules beside it.
"""

from __future__ import annotations

from procengine.kernels.rope.table import RopeSpec, RotaryTable, make_rotary_table

__all__ = ["RopeSpec", "RotaryTable", "make_rotary_table"]
