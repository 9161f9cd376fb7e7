"""What the kernel says this CPU can do.

Owns: reading /proc/cpuinfo. Never does: decide what follows from a flag.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["cpu_flags"]


def cpu_flags() -> set[str]:
    """Names such as "avx512_bf16" (proc(5), cpuinfo: `flags` on x86, `Features` on ARM); empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())
