"""Every role suffers every fault in every phase: what comes of it stands in `faults.table`.

Cells whose groups are started alike share one, fault after fault, as long as it lives: what leaks, adds up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.procs.faults.experiment import Experiment, options_of
from tests.procs.faults.injection import SIGNALS, Injector
from tests.procs.faults.table import CELLS, FAST_CELLS, Cell
from tests.procs.harness import Served


class Groups:
    """Running groups by their options."""

    def __init__(self, model: Path, folder: Path, stack: ExitStack) -> None:
        self._model = model
        self._folder = folder
        self._stack = stack
        self._shared: dict[tuple[object, ...], tuple[Served, Injector]] = {}
        self._count = 0

    def shared(self, options: tuple[object, ...]) -> tuple[Served, Injector]:
        """One that other cells may have used."""
        if options not in self._shared:
            group, injector = self.start(options)
            self._shared[options] = group.wait_ready(), injector
        return self._shared[options]

    def start(self, options: tuple[object, ...], armed: Cell | None = None) -> tuple[Served, Injector]:
        """A new one, that may not be ready."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        injector = Injector(folder)
        if armed is not None:
            injector.arm(armed.role, "start", armed.fault)
        name = f"faults{self._count}"
        group = Served(self._model, folder, *options, name=name, env=injector.environment)
        return self._stack.enter_context(group), injector

    def give_up(self, options: tuple[object, ...]) -> None:
        """It is not what it was; the next cell gets another one."""
        if options in self._shared:
            self._shared.pop(options)[0].stop()


@pytest.fixture(scope="module")
def groups(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    with ExitStack() as stack:
        yield Groups(model, tmp_path_factory.mktemp("faults"), stack)


def _marks(cell: Cell) -> list[pytest.MarkDecorator]:
    return [] if str(cell) in FAST_CELLS else [pytest.mark.slow]


@pytest.mark.parametrize("cell", [pytest.param(cell, id=str(cell), marks=_marks(cell)) for cell in CELLS])
def test_nothing_is_lost(cell: Cell, groups: Groups) -> None:
    options = options_of(cell)
    is_shared = cell.outcome in ("exact", "lost") and cell.phase not in ("starting", "draining")
    if is_shared:
        group, injector = groups.shared(options)
    else:
        is_armed = cell.phase == "starting" and cell.fault not in SIGNALS
        group, injector = groups.start(options, armed=cell if is_armed else None)
        if cell.phase != "starting":
            group.wait_ready()
    experiment = Experiment(cell, group, injector)
    try:
        experiment.run()
    except BaseException:
        groups.give_up(options)
        print(group.log)
        raise
    finally:
        if not is_shared:
            group.stop()
    print(f"{cell}: {cell.outcome} after {experiment.recovery_s:.3f} s")


def test_every_fast_cell_exists() -> None:
    assert {str(cell) for cell in CELLS} >= FAST_CELLS
