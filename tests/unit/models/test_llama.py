"""Each supported kind against transformers in float32, without a cache and over a paged one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine.kernels.attention import AttentionSpec
from procengine.models.decoder import Decoder
from procengine.models.loader import load_model
from tests.model_configs import model_config_from_hf
from tests.unit.models.paged_forward import PagedForward, forward_whole
from tests.unit.models.tiny_models import KINDS, save_tiny_model

SEQUENCES = [[(7 * i * i + 3 * i + row) % 97 for i in range(length)] for row, length in enumerate((23, 40, 9))]


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Decoder]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    oracle = save_tiny_model(request.param, folder)
    config = model_config_from_hf(oracle.config, folder)
    return oracle, load_model(config, torch.float32, "cpu", progress=False)


def oracle_logits(oracle: Any, token_ids: list[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = oracle(torch.tensor([token_ids])).logits[0]
    return logits


def test_a_whole_prompt_gives_the_logits_of_transformers(pair: tuple[Any, Decoder]) -> None:
    oracle, model = pair
    for sequence in SEQUENCES:
        expected = oracle_logits(oracle, sequence)
        torch.testing.assert_close(forward_whole(model, sequence), expected, atol=1e-4, rtol=1e-4)


def test_chunks_and_decodes_over_a_paged_cache_give_the_same(pair: tuple[Any, Decoder]) -> None:
    oracle, model = pair
    run = PagedForward(model, SEQUENCES)
    plan: list[dict[int, int]] = [{0: 5}, {0: 1, 1: 16}, {0: 3, 1: 1, 2: 8}, {0: 1, 1: 11, 2: 1}, {0: 12}, {1: 4}]
    plan += [{0: 1, 1: 1} if step == 0 else {1: 1} for step in range(8)]
    found: list[list[Tensor]] = [[] for _ in SEQUENCES]
    for query_lens in plan:
        for row, logits in run.step(query_lens).items():
            found[row].append(logits)
    assert run.computed == [len(sequence) for sequence in SEQUENCES]
    for row, sequence in enumerate(SEQUENCES):
        torch.testing.assert_close(torch.cat(found[row]), oracle_logits(oracle, sequence), atol=1e-4, rtol=1e-4)


def test_facts_that_a_runner_needs(pair: tuple[Any, Decoder]) -> None:
    oracle, model = pair
    assert model.num_layers == 3
    assert model.num_kv_heads == 2
    window = getattr(oracle.config, "sliding_window", None)
    assert model.attention == (AttentionSpec(model.head_dim**-0.5, window),) * 3
    assert model.dtype == torch.float32


def test_bfloat16_logits_are_float32_and_close(tmp_path: Path) -> None:
    oracle = save_tiny_model("llama", tmp_path)
    model = load_model(model_config_from_hf(oracle.config, tmp_path), torch.bfloat16, "cpu", progress=False)
    logits = forward_whole(model, SEQUENCES[0])
    assert logits.dtype == torch.float32
    expected = oracle_logits(oracle, SEQUENCES[0])
    assert float(torch.cosine_similarity(logits, expected).min()) > 0.98
