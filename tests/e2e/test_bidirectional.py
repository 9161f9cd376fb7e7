"""Decoders whose tokens see all others: transformers' with an attention mask that hides nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import convert

from procengine import LLM, ConfigError, InvalidRequestError
from procengine.engine_args import EngineArgs
from procengine.resolve import resolve
from tests.e2e.oracle import one_thread
from tests.e2e.tiny_folders import build_tiny_model, save_folder
from tests.e2e.tiny_prompts import random_prompts

_OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def seeing_all(model: Any, prompt: list[int]) -> torch.Tensor:
    with one_thread(), torch.inference_mode():
        mask = torch.zeros(1, 1, len(prompt), len(prompt))
        states: torch.Tensor = model.model(torch.tensor([prompt]), attention_mask=mask).last_hidden_state[0]
    return states


def test_vectors_and_states_of_a_decoder_that_sees_all_tokens(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    prompts = random_prompts([2, 64, 1, 30], seed=41)
    with LLM(str(save_folder(model, tmp_path)), **_OPTIONS, bidirectional=True, pooling="mean") as llm:
        states = [seeing_all(model, prompt) for prompt in prompts]
        for found, expected in zip(llm.embed(prompts, use_tqdm=False), states, strict=True):
            mean = expected.mean(dim=0)
            np.testing.assert_allclose(found.embedding, mean / mean.norm(), atol=1e-5)
        for one, expected in zip(llm.hidden_states(prompts), states, strict=True):
            np.testing.assert_allclose(np.frombuffer(one.data, "<f4").reshape(-1, 64), expected, atol=1e-4)
        with pytest.raises(InvalidRequestError, match="'generate' is not supported by this model"):
            llm.generate("a", use_tqdm=False)
        with pytest.raises(InvalidRequestError, match="has 65 tokens, one step takes at most 64"):
            llm.embed([[1] * 65], use_tqdm=False)


def resolved(folder: Path, **options: Any) -> Any:
    return resolve(convert({"model": str(folder), "num_blocks": 8, **options}, EngineArgs)).model


def test_the_files_may_say_it_and_the_option_is_nearer(tmp_path: Path) -> None:
    folder = save_folder(build_tiny_model("qwen2"), tmp_path)
    assert resolved(folder).decoder.is_causal
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "is_causal": False}))
    model = resolved(folder)
    assert (model.decoder.is_causal, model.workflows) == (False, ("embed", "hidden_states"))
    assert "generate" in resolved(folder, bidirectional=False).workflows


def test_a_window_looks_back_only(tmp_path: Path) -> None:
    folder = save_folder(build_tiny_model("mistral"), tmp_path)
    with pytest.raises(ConfigError, match=r"bidirectional: .* has a sliding window"):
        resolved(folder, bidirectional=True)
