"""Root-mean-square normalisation.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.norm.reference import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
