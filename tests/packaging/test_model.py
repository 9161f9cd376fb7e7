"""The model that the quickstart and the model lane use can be had, and is what it says."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.mark.model
def test_smollm2_is_a_gguf_file(smollm2_gguf: Path) -> None:
    with smollm2_gguf.open("rb") as file:
        assert file.read(4) == b"GGUF"
