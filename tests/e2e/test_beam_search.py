"""Beam search over a running group against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from procengine import LLM, BeamSearchParams
from tests.e2e.oracle import one_thread
from tests.e2e.tiny_folders import build_tiny_model, save_folder

PROMPTS = [[40, 41, 42, 43, 50], [60, 7], list(range(30, 70))]
WIDTH = 4
NUM_TOKENS = 10


def test_beams_of_equal_length_are_those_of_transformers(tmp_path: Path) -> None:
    model = build_tiny_model("llama")
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(str(save_folder(model, tmp_path / "tiny")), dtype="float32", threads=1) as llm:
        found = llm.beam_search(PROMPTS, params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        with one_thread(), torch.inference_mode():
            expected = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=NUM_TOKENS,
                num_beams=WIDTH,
                num_return_sequences=WIDTH,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
        assert [sequence.tokens for sequence in output.sequences] == expected.sequences.tolist()
        scores = [sequence.cum_logprob / NUM_TOKENS for sequence in output.sequences]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
