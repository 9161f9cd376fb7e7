"""Groups and oracles that several files share: a launch costs seconds, so each is made once a session, if asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.modes import Mode
from tests.e2e.running_group import RunningGroup
from tests.e2e.smollm2 import SMOLLM2_OPTIONS, save_plain_copy
from tests.e2e.tiny_prompts import TinyCase, make_tiny_case


class TinyGroups:
    """Groups of the tiny llama by mode, launched when they are first asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._by_mode: dict[Mode, RunningGroup] = {}

    def __getitem__(self, mode: Mode) -> RunningGroup:
        if mode not in self._by_mode:
            # In order of arrival, so that tests know whose blocks are left.
            group = RunningGroup(self._folder, max_overtaken_tokens=0, **mode.options)
            self._by_mode[mode] = self._stack.enter_context(group)
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


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Iterator[RunningGroup]:
    """A running group of the real model, everything in float32 and the rest as the defaults have it."""
    with RunningGroup(smollm2_gguf, **SMOLLM2_OPTIONS) as group:
        yield group


@pytest.fixture(scope="session")
def smollm2_copy(smollm2_oracle: Any, smollm2: RunningGroup, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What transformers saves of that: a Hugging Face folder with safetensors. The tokenizer is ours: see LOD-04."""
    folder = tmp_path_factory.mktemp("smollm2-copy")
    save_plain_copy(smollm2_oracle, folder)
    (folder / "tokenizer.json").symlink_to(smollm2.config.model.tokenizer_path)
    return folder
