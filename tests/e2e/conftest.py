"""Groups that several files share: a launch costs seconds, so each mode of the tiny model is launched once a session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.modes import Mode
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_prompts import TinyCase, make_tiny_case


class TinyGroups:
    """Groups of the tiny llama by mode, launched when they are first asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._by_mode: dict[Mode, RunningGroup] = {}

    def __getitem__(self, mode: Mode) -> RunningGroup:
        if mode not in self._by_mode:
            self._by_mode[mode] = self._stack.enter_context(RunningGroup(self._folder, **mode.options))
        return self._by_mode[mode]


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> TinyCase:
    """The tiny llama and what transformers says of the 32 prompts."""
    return make_tiny_case("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def tiny_groups(tiny_llama: TinyCase) -> Iterator[TinyGroups]:
    """`tiny_groups[mode]` is a running group of the tiny llama."""
    with ExitStack() as stack:
        yield TinyGroups(tiny_llama.folder, stack)
