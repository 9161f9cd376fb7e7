"""Which GPU a worker sees, and near which CPUs it runs, from folders as the driver and the kernel make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from procengine.gpu_placement import cpus_near, place_worker

ADDRESSES = ["0000:3b:00.0", "0000:af:00.0", "0000:d8:00.0"]
CPUS = {0: "0-3,8-11", 1: "4-7,12-15"}
NEAR = {
    node: frozenset(cpus) for node, cpus in {0: (0, 1, 2, 3, 8, 9, 10, 11), 1: (4, 5, 6, 7, 12, 13, 14, 15)}.items()
}


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    for address in ADDRESSES:
        (tmp_path / "gpus" / address).mkdir(parents=True)
    return tmp_path / "gpus"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    root = tmp_path / "sys"
    for address, node in zip(ADDRESSES, (0, 1, -1), strict=True):
        device = root / "bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for node, cpus in CPUS.items():
        (root / f"devices/system/node/node{node}").mkdir(parents=True)
        (root / f"devices/system/node/node{node}/cpulist").write_text(f"{cpus}\n")
    return root


def test_each_worker_has_a_gpu_of_its_own_and_runs_near_it(driver: Path, sysfs: Path) -> None:
    placed = [place_worker(rank, {}, driver, sysfs) for rank in range(4)]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in placed] == ["0", "1", "2", "0"]
    assert all(one.environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" for one in placed)
    assert [one.cpus for one in placed] == [NEAR[0], NEAR[1], frozenset(), NEAR[0]]


def test_what_the_user_lets_us_see_is_shared_out_in_his_order(driver: Path, sysfs: Path) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert [place_worker(rank, environ, driver, sysfs).environment for rank in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": "1"},
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    assert place_worker(0, environ, driver, sysfs).cpus == frozenset(), "which of them CUDA calls 1 is not known"
    by_address = environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert place_worker(0, by_address, driver, sysfs).cpus == NEAR[1]
    named = by_address | {"CUDA_VISIBLE_DEVICES": "GPU-8f6e"}
    assert place_worker(0, named, driver, sysfs) == ({"CUDA_VISIBLE_DEVICES": "GPU-8f6e"}, frozenset())


@pytest.mark.parametrize("environ", [{}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_without_a_gpu_nothing_is_changed(tmp_path: Path, environ: dict[str, str]) -> None:
    assert place_worker(0, environ, tmp_path / "none", tmp_path) == ({}, frozenset())


def test_a_device_that_the_kernel_does_not_know_is_near_nothing(sysfs: Path) -> None:
    assert cpus_near("0000:00:00.0", sysfs) == frozenset()


def test_gpus_that_a_container_is_told_of_and_does_not_have_are_not_counted(driver: Path, sysfs: Path) -> None:
    for minor, address in enumerate(ADDRESSES):
        (driver / address / "information").write_text(f"Model: \t NVIDIA H200\nDevice Minor: \t {minor}\n")
    devices = sysfs / "dev"
    devices.mkdir()
    (devices / "nvidia1").touch()
    placed = [place_worker(rank, {}, driver, sysfs, devices) for rank in range(2)]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in placed] == ["0", "0"], "it is the only one"
    assert [one.cpus for one in placed] == [NEAR[1], NEAR[1]]
