"""Dense projections.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.linear.reference import linear

__all__ = ["linear"]
