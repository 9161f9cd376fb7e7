"""The work load of `procengine bench`."""

from __future__ import annotations

from pathlib import Path

import pytest

from procengine.cli.bench import random_prompts, read_prompts
from procengine.errors import ConfigError


def test_random_prompts_are_the_same_for_the_same_seed() -> None:
    prompts = random_prompts(3, 5, 100, seed=1)
    assert prompts == random_prompts(3, 5, 100, seed=1) != random_prompts(3, 5, 100, seed=2)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]
    assert all(0 <= int(token_id) < 100 for prompt in prompts for token_id in prompt)


def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text('["a", [1, 2]]')
    assert read_prompts(path) == ["a", [1, 2]]


@pytest.mark.parametrize("text", ["{}", "[1]", "nonsense"])
def test_file_of_another_shape_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prompts\.json is no readable JSON list"):
        read_prompts(path)
    with pytest.raises(ConfigError, match="missing"):
        read_prompts(tmp_path / "missing")
