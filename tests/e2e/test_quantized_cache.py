"""A KV cache of 8 bits with the torch kernels, through a whole group: nearly the log probabilities of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from procengine import LLM, SamplingParams
from tests.e2e.oracle import next_logprobs
from tests.e2e.tiny_folders import build_tiny_model, save_folder
from tests.e2e.tiny_prompts import random_prompts

_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_num_batched_tokens": 32,  # the longest prompt comes in chunks
    "max_num_seqs": 8,
    "num_blocks": 40,
    "enforce_eager": False,  # decode steps are padded, as for a GPU's graphs
}
_PARAMS = SamplingParams(temperature=0, max_tokens=9, logprobs=0)


# Logits have a deviation of about 6.
@pytest.mark.parametrize(("kind", "most"), [("int8", 0.3), pytest.param("fp8", 1.2, marks=pytest.mark.slow)])
def test_logprobs_are_close_also_of_prompts_in_the_cache(kind: str, most: float, tmp_path: Path) -> None:
    model, prompts = build_tiny_model("llama"), random_prompts([70, 5, 33], seed=6)
    with LLM(str(save_folder(model, tmp_path)), kv_cache_dtype=kind, **_OPTIONS) as llm:
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], _PARAMS, use_tqdm=False)
            errors = []
            for prompt, output in zip(prompts, outputs, strict=True):
                (choice,) = output.outputs
                assert choice.logprobs is not None
                for at, (token, entry) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
                    exact = next_logprobs(model, [*prompt, *choice.token_ids[:at]])[token]
                    errors.append(entry[token].logprob - float(exact))
            assert len(errors) == 27
            assert 0 < float(torch.tensor(errors).square().mean().sqrt()) < most
