"""What counts as available memory."""

from __future__ import annotations

import os
from pathlib import Path

from procengine.free_memory import available_bytes


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       16000 kB\nMemFree:          100 kB\nMemAvailable:    9000 kB\nCached: 8 kB\n")
    assert available_bytes(meminfo) == 9000 * 1024


def test_systems_without_it_tell_what_is_free(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("MemTotal:       16000 kB\n")
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in (tmp_path / "old", tmp_path / "none"):
        assert 0 < available_bytes(path) <= total
    assert 0 < available_bytes() <= total
