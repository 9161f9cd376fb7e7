"""Fixtures that every test may ask for. Nothing here runs unless a test asks; the real model is fetched once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Oracles (transformers, tokenizers) read these when they are imported: no network, no threads behind a fork.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# So do torch and numpy. Tensors are tiny here, and lanes run side by side: threads that spin for each other, on cores
# that others use, take twice the time. Workers of ours are told their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# An example takes as long as the machine lets it: `timeout` in pyproject.toml is for what hangs.
settings.register_profile("patient", parent=settings(), deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def procengine_home() -> Path:
    """The user's own home folder of procengine (PROCENGINE_HOME or the default): a model is not fetched on each run."""
    from procengine.paths import procengine_home as home

    return home()


@pytest.fixture(scope="session")
def smollm2_gguf(procengine_home: Path) -> Path:
    """The GGUF file of smollm2-135m, fetched when it is not there yet. For tests marked `model`."""
    from procengine.hub import pull

    pulled = pull("smollm2-135m", procengine_home)
    if pulled.is_file():
        return pulled
    files = sorted(pulled.rglob("*.gguf"))
    assert files, f"no .gguf file below {pulled}"
    return files[0]


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_gguf: Path) -> Any:
    """The GGUF file as transformers reads it, in float32: it shares no code of ours. Once, for it takes seconds."""
    import torch
    from transformers import AutoModelForCausalLM

    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
