"""What counts as available memory."""

from __future__ import annotations

import os
from pathlib import Path

from procengine.free_memory import available_bytes

MEMINFO = "MemTotal:       16000 kB\nMemFree:          100 kB\nMemAvailable:    9000 kB\nCached: 8 kB\n"


def machine(root: Path, meminfo: str = MEMINFO, cgroup: str | None = None) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(meminfo)
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
    return root


def limit(root: Path, path: str, most: str, used: int, inactive_file: int = 0) -> None:
    folder = root / "sys/fs/cgroup" / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive_file}\nactive_file 7\n")


def test_page_cache_counts_as_available(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path)) == 9000 * 1024


def test_systems_without_it_tell_what_is_free(tmp_path: Path) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for root in (machine(tmp_path / "old", "MemTotal:       16000 kB\n"), tmp_path / "none"):
        assert 0 < available_bytes(root) <= total
    assert 0 < available_bytes() <= total


def test_limit_of_a_container_counts_with_what_files_hold_there(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/\n")
    limit(root, "", "1000000", 700000, inactive_file=200000)
    assert available_bytes(root) == 500000


def test_narrowest_limit_around_counts_and_none_is_below_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="1:cpu:/\n0::/system.slice/procengine.service\n")
    limit(root, "system.slice/procengine.service", "max", 10)
    assert available_bytes(root) == 9000 * 1024
    limit(root, "system.slice", "3000", 4000)
    assert available_bytes(root) == 0


def test_limits_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    root = machine(tmp_path, cgroup="0::/x\n")
    limit(root, "x", "many", 10)
    assert available_bytes(root) == 9000 * 1024
