"""Writes to the paged KV cache.

Owns: what callers may use. Never does: arithmetic; that is in the backends' modules beside it.
"""

from __future__ import annotations

from procengine.kernels.kv_cache.reference import write_kv

__all__ = ["write_kv"]
