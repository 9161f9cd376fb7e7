"""Embeddings of a decoder model: transformers' hidden states, pooled by hand; independent of whatever else runs."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine import LLM, InvalidRequestError, SamplingParams
from procengine.outputs import EmbeddingOutput
from tests.e2e.conftest import TinyGroups
from tests.e2e.modes import BLOCK_SIZE, NUM_BLOCKS, Mode
from tests.e2e.oracle import hidden_states
from tests.e2e.running_group import RunningGroup
from tests.e2e.smollm2 import P1
from tests.e2e.tiny_prompts import TinyCase, random_prompts

_MODES = [Mode(2, 1, False, 1), Mode(1, 4, False, 2)]  # unchunked: one step embeds the longest prompt
_MATES = [5, 8, 16, 17, 31, 32, 33, 64, 65, 90, 128, 129, 200, 255, 256]
_ATOL = 1e-5  # of numbers of the size 0.1, in float32


@pytest.fixture(scope="module", params=_MODES, ids=str)
def group(request: pytest.FixtureRequest, tiny_groups: TinyGroups) -> RunningGroup:
    return tiny_groups[request.param]


@pytest.fixture(scope="module")
def mean_llm(tiny_llama: TinyCase) -> Iterator[LLM]:
    with LLM(str(tiny_llama.folder), **_MODES[0].options, pooling="mean") as llm:
        yield llm


def normalized(vector: Tensor) -> Tensor:
    return vector / vector.square().sum().sqrt()


def vectors(outputs: list[EmbeddingOutput]) -> Tensor:
    return torch.tensor([output.embedding for output in outputs])


def cosines(found: Tensor, expected: Tensor) -> Tensor:
    return torch.cosine_similarity(found.double(), expected.double(), dim=-1)


def test_last_token_pooling(group: RunningGroup, tiny_llama: TinyCase) -> None:
    found = vectors(group.client.embed(tiny_llama.prompts))
    expected = [normalized(hidden_states(tiny_llama.model, prompt)[-1]) for prompt in tiny_llama.prompts]
    torch.testing.assert_close(found, torch.stack(expected), atol=_ATOL, rtol=0)
    torch.testing.assert_close(found.square().sum(dim=1), torch.ones(len(found)))


def test_mean_pooling(mean_llm: LLM, tiny_llama: TinyCase) -> None:
    outputs = mean_llm.embed(tiny_llama.prompts, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == tiny_llama.prompts
    found = vectors(outputs)
    expected = [normalized(hidden_states(tiny_llama.model, prompt).mean(dim=0)) for prompt in tiny_llama.prompts]
    torch.testing.assert_close(found, torch.stack(expected), atol=_ATOL, rtol=0)
    torch.testing.assert_close(found.square().sum(dim=1), torch.ones(len(found)))


def test_a_text_is_embedded_as_its_tokens(group: RunningGroup) -> None:
    text = group.client.embed("the cat 日本")
    assert len(text.prompt_token_ids) > 1
    assert text.embedding == group.client.embed(text.prompt_token_ids).embedding


def check_mates(group: RunningGroup, text: list[int]) -> None:
    """EMB-01: one sequence alone, and in every place of batches of 2, 8 and 32."""
    alone = vectors([group.client.embed(text)])[0]
    source = random.Random(31)
    for num_mates in (1, 7, 31):
        mates = random_prompts([source.choice(_MATES) for _ in range(num_mates)], seed=num_mates)
        own = vectors(group.client.embed(mates))
        for place in {0, num_mates // 2, num_mates}:
            batch = [*mates[:place], text, *mates[place:]]
            outputs = group.client.embed(batch)
            assert [output.prompt_token_ids for output in outputs] == batch
            found = vectors(outputs)
            assert float(cosines(found[place], alone)) >= 0.99999
            assert float(cosines(torch.cat((found[:place], found[place + 1 :])), own).min()) >= 0.99999


@pytest.mark.parametrize("length", [1, 6, 130])
def test_emb_01_a_vector_does_not_depend_on_its_batch(length: int, group: RunningGroup) -> None:
    check_mates(group, random_prompts([length], seed=length)[0])


def test_emb_01_under_concurrency(group: RunningGroup) -> None:
    """Sixteen threads, each with its own sequence, over and over among the others'."""
    prompts = random_prompts([_MATES[at % len(_MATES)] for at in range(16)], seed=32)
    alone = [vectors([group.client.embed(prompt)])[0] for prompt in prompts]
    lowest = [0.0] * len(prompts)

    def run(at: int) -> None:
        found = [vectors([group.client.embed(prompts[at])])[0] for _ in range(7)]
        lowest[at] = min(float(cosines(vector, alone[at])) for vector in found)

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert min(lowest) >= 0.99999


def test_embeddings_use_no_kv_blocks(group: RunningGroup) -> None:
    """They fit where the pool is too small, leave no prefix behind, and drive none out."""
    kept, embedded = random_prompts([300, 400], seed=33)
    params, salt = SamplingParams(temperature=0.0, max_tokens=1), group.new_salt()

    def num_cached(prompt: list[int]) -> int | None:
        return group.client.generate(prompt, params, cache_salt=salt).num_cached_tokens

    num_cached(kept)
    longer_than_the_pool = random_prompts([NUM_BLOCKS * BLOCK_SIZE + 100], seed=34)
    for _ in range(2):
        group.client.embed([embedded] * 4 + longer_than_the_pool)
    assert num_cached(kept) == 288
    assert num_cached(embedded) == 0


def check_generation(group: RunningGroup, case: TinyCase) -> None:
    outputs = group.generate(case.prompts, case.params, cache_salt="beside embed")
    answers = [(output.outputs[0].token_ids, output.outputs[0].finish_reason) for output in outputs]
    assert answers == case.expected


def test_embedding_and_generation_at_the_same_time(group: RunningGroup, tiny_llama: TinyCase) -> None:
    case = tiny_llama
    expected = vectors(group.client.embed(case.prompts))
    found: list[Tensor] = []
    is_over = threading.Event()

    def embed_all_the_time() -> None:
        while group.client.stats()["num_unfinished"] < len(case.prompts):
            time.sleep(0.002)  # first all of the others must be there, or they might not crowd each other
        while not is_over.is_set():
            found.append(vectors(group.client.embed(case.prompts)))

    thread = threading.Thread(target=embed_all_the_time)
    group.num_preemptions()
    try:
        with group.held_until_queued(len(case.prompts)):
            thread.start()
            check_generation(group, case)
        check_generation(group, case)
        assert group.num_preemptions() > 0
    finally:
        is_over.set()
        thread.join()
    assert found
    assert min(float(cosines(each, expected).min()) for each in found) >= 0.99999


def test_a_prompt_longer_than_a_step_comes_in_pieces(tiny_groups: TinyGroups, tiny_llama: TinyCase) -> None:
    """The last one has a vector; what takes all tokens at once (`first` here, a mean) is refused."""
    group = tiny_groups[Mode(1, 1, True, 1)]
    limit = group.config.scheduler.max_num_batched_tokens
    prompts = random_prompts([limit, limit + 1, 3 * limit + 5], seed=33)
    found = vectors(group.client.embed(prompts))
    expected = [normalized(hidden_states(tiny_llama.model, prompt)[-1]) for prompt in prompts]
    torch.testing.assert_close(found, torch.stack(expected), atol=_ATOL, rtol=0)
    with pytest.raises(InvalidRequestError, match=rf"^prompt: has {limit + 1} tokens.*at most {limit}"):
        group.client.hidden_states([prompts[1]], tokens="first")


@pytest.mark.model
def test_smollm2(smollm2: RunningGroup, smollm2_oracle: Any) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text(encoding="utf-8")
    outputs = smollm2.client.embed([P1.text, text[:300], text[1000:1100]])
    expected = [normalized(hidden_states(smollm2_oracle, output.prompt_token_ids)[-1]) for output in outputs]
    torch.testing.assert_close(vectors(outputs), torch.stack(expected), atol=1e-4, rtol=0)
