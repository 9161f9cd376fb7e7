"""Which GPU a worker has, and which CPUs are near it.

Owns: this choice, from what the driver and the kernel show in files. Never does: load CUDA, or start a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["Placement", "cpus_near", "place_worker"]

_DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder a GPU, named by its PCI address
_SYSFS = Path("/sys")
_DEVICES = Path("/dev")
_VISIBLE, _ORDER, _BY_ADDRESS = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PCI_BUS_ID"


class Placement(NamedTuple):
    """`environment`: variables that the worker is started with, beside ours. `cpus`: where it runs; empty: anywhere."""

    environment: dict[str, str]
    cpus: frozenset[int]


def place_worker(
    rank: int, environ: Mapping[str, str], driver: Path = _DRIVER, sysfs: Path = _SYSFS, devices: Path = _DEVICES
) -> Placement:
    """Worker `rank` sees one GPU: that one of those which `environ` lets us see, in turn if there are fewer."""
    gpus = sorted(driver.iterdir()) if driver.is_dir() else []
    addresses = [gpu.name for gpu in gpus if _is_here(gpu, devices)]
    given = [name.strip() for name in environ.get(_VISIBLE, "").split(",") if name.strip()]
    visible = given if _VISIBLE in environ else [str(index) for index in range(len(addresses))]
    if not visible:
        return Placement({}, frozenset())  # nothing is known, or there is to be none: CUDA will say so
    chosen = visible[rank % len(visible)]
    # Numbers of our own are by address; those that were given mean what they did.
    environment = {_VISIBLE: chosen} | ({} if _VISIBLE in environ or _ORDER in environ else {_ORDER: _BY_ADDRESS})
    is_by_address = {**environ, **environment}.get(_ORDER) == _BY_ADDRESS or len(addresses) == 1
    is_known = is_by_address and chosen.isdigit() and int(chosen) < len(addresses)
    return Placement(environment, cpus_near(addresses[int(chosen)], sysfs) if is_known else frozenset())


def _is_here(gpu: Path, devices: Path) -> bool:
    """Whether we have its device file: a container may be told of GPUs that it does not have."""
    try:
        lines = (gpu / "information").read_text().splitlines()
    except OSError:
        return True
    minors = [line.partition(":")[2].strip() for line in lines if line.startswith("Device Minor:")]
    return not minors or (devices / f"nvidia{minors[0]}").exists()


def cpus_near(address: str, sysfs: Path = _SYSFS) -> frozenset[int]:
    """CPUs of the NUMA node that a PCI device hangs on; empty if it hangs on none, or nothing is known of it."""
    try:
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        cpus = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return frozenset()
    return _cpu_list(cpus) if node >= 0 else frozenset()


def _cpu_list(text: str) -> frozenset[int]:
    """`0-3,8` (cpuset(7), "List format")."""
    spans = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1))
