"""Log probabilities of texts, and hidden states, through whole groups: as transformers has them, whatever the batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

from procengine import LLM, AsyncClient, InvalidRequestError, SamplingParams
from tests.e2e.oracle import one_thread
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_folders import base_config, build_tiny_model, save_folder
from tests.e2e.tiny_prompts import TinyCase, random_prompts

_BUDGET = 64
_OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_num_seqs": 8,
    "num_blocks": 64,
    "max_num_batched_tokens": _BUDGET,
}
_LENGTHS = [2, 300, 1, 9, 64, 65, 128, 3, 17]  # some of more than a step, some of exactly one or two


def logprobs_of(model: Any, prompt: list[int]) -> NDArray[np.float32]:
    with one_thread(), torch.inference_mode():
        logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        chosen: NDArray[np.float32] = logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
    return chosen


def states_of(model: Any, prompt: list[int], layer: int) -> NDArray[np.float32]:
    with one_thread(), torch.inference_mode():
        states: NDArray[np.float32] = (
            model.model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[layer][0].numpy()
        )
    return states


@pytest.fixture(scope="module")
def group(tiny_llama: TinyCase) -> Iterator[RunningGroup]:
    with RunningGroup(tiny_llama.folder, **_OPTIONS) as running:
        yield running


def test_logprobs_are_those_of_transformers_in_one_step_and_in_many(group: RunningGroup, tiny_llama: TinyCase) -> None:
    prompts = random_prompts(_LENGTHS, seed=8)
    found = group.client.score_text(prompts)
    for prompt, output in zip(prompts, found, strict=True):
        expected = logprobs_of(tiny_llama.model, prompt)
        np.testing.assert_allclose(output.logprobs, expected, atol=1e-4)
        assert output.prompt_token_ids == prompt
        assert output.num_tokens == len(prompt) - 1
        assert output.logprob == pytest.approx(float(expected.sum(dtype=np.float64)), abs=1e-2)
        if output.num_tokens:
            assert output.perplexity == pytest.approx(math.exp(-output.logprob / output.num_tokens))
        else:
            assert output.perplexity is None


def test_they_are_the_same_alone_and_beside_requests_that_generate(group: RunningGroup) -> None:
    prompts = random_prompts([200, 5, 90], seed=9)
    together = [output.logprobs for output in group.client.score_text(prompts)]

    async def crowd() -> list[list[float]]:
        async with AsyncClient(group.endpoint) as client:
            params = SamplingParams(max_tokens=30, ignore_eos=True)
            others = [client.generate(prompt, params) for prompt in random_prompts([30, 60, 90], seed=10)]
            generating = asyncio.gather(*others)
            outputs = await asyncio.gather(*(client.score_text(prompt) for prompt in prompts))
            await generating
            return [output.logprobs for output in outputs]

    alone = [group.client.perplexity([prompt])[0].logprobs for prompt in prompts]
    for one, other, beside in zip(alone, together, asyncio.run(crowd()), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
        np.testing.assert_allclose(one, beside, atol=1e-4)


def test_a_text_is_scored_as_it_stands_or_as_far_as_asked(group: RunningGroup) -> None:
    whole = group.client.score_text("the cat 日本 the")[0]
    assert whole.num_tokens == len(whole.prompt_token_ids) - 1
    cut = group.client.score_text("the cat 日本 the", truncate_prompt_tokens=3)[0]
    assert cut.prompt_token_ids == whole.prompt_token_ids[:3]
    np.testing.assert_allclose(cut.logprobs, whole.logprobs[:2], atol=1e-4)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"prompt": "a", "text_pair": "b"}, "text_pair: has no meaning for score_text"),
        ({"prompt": "a", "prompt_name": "b"}, "prompt_name: has no meaning for score_text"),
        ({"prompt_token_ids": [500]}, "500 is not a token of this model"),
        ({"prompt_token_ids": [1] * 1025}, r"context limit \(max_model_len\) is 1024"),
        ({"prompt": "a", "logprobs": 2}, "unknown field `logprobs`"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(group: RunningGroup, body: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        group.client.ask("score_text", [body])


def test_aborted_halfway_leaves_the_others_right(group: RunningGroup, tiny_llama: TinyCase) -> None:
    long, short = random_prompts([1000, 100], seed=11)

    async def run() -> list[float]:
        async with AsyncClient(group.endpoint) as client:
            given_up = asyncio.create_task(client.score_text(long))
            kept = asyncio.create_task(client.score_text(short))
            await asyncio.sleep(0)
            given_up.cancel()
            return (await kept).logprobs

    np.testing.assert_allclose(asyncio.run(run()), logprobs_of(tiny_llama.model, short), atol=1e-4)


@pytest.mark.parametrize("layer", [0, 1, 3, -1])
def test_hidden_states_of_any_layer(group: RunningGroup, tiny_llama: TinyCase, layer: int) -> None:
    prompts = random_prompts([2, 40, 1, 64], seed=12)
    for tokens, of in [("all", slice(None)), ("last", slice(-1, None)), ("first", slice(1))]:
        found = group.client.hidden_states(prompts, layer=layer, tokens=tokens)  # type: ignore[arg-type]
        for prompt, output in zip(prompts, found, strict=True):
            states = np.frombuffer(output.data, "<f4").reshape(-1, 64)
            np.testing.assert_allclose(states, states_of(tiny_llama.model, prompt, layer)[of], atol=1e-4)


def test_long_sequences_give_vectors_and_last_states_piece_by_piece(group: RunningGroup, tiny_llama: TinyCase) -> None:
    (prompt,) = random_prompts([150], seed=13)
    expected = states_of(tiny_llama.model, prompt, -1)
    for tokens, of in [("all", slice(None)), ("last", slice(-1, None))]:
        (output,) = group.client.hidden_states([prompt], tokens=tokens)  # type: ignore[arg-type]
        np.testing.assert_allclose(np.frombuffer(output.data, "<f4").reshape(-1, 64), expected[of], atol=1e-4)
    vector = group.client.embed(prompt).embedding
    np.testing.assert_allclose(vector, expected[-1] / np.linalg.norm(expected[-1]), atol=1e-5)
    with pytest.raises(InvalidRequestError, match=f"150 tokens, one step takes at most {_BUDGET}"):
        group.client.hidden_states([prompt], layer=1)
    with pytest.raises(InvalidRequestError, match="layer: must be -4 to 3, got 4"):
        group.client.hidden_states([prompt], layer=4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Mistral's window is shorter than some of these prompts."""
    model = build_tiny_model(family)
    prompts = random_prompts([3, 120, 60, 200], seed=14)
    with LLM(str(save_folder(model, tmp_path)), **_OPTIONS) as llm:
        for prompt, output in zip(prompts, llm.perplexity(prompts), strict=True):
            np.testing.assert_allclose(output.logprobs, logprobs_of(model, prompt), atol=1e-4)
        (states,) = llm.hidden_states([prompts[2]], layer=2)
        found = np.frombuffer(states.data, "<f4").reshape(-1, 64)
        np.testing.assert_allclose(found, states_of(model, prompts[2], 2), atol=1e-4)


@pytest.mark.slow
def test_pieces_through_layers_whose_blocks_differ(tmp_path: Path) -> None:
    """Where generation has block tables for each group of layers, a long text's own keys and values have one."""
    windows = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**base_config() | windows)).eval().float()
    prompts = random_prompts([3, 200, 70], seed=15)
    with LLM(str(save_folder(model, tmp_path)), **_OPTIONS | {"block_size": 16}) as llm:
        generated = llm.generate(prompts[1], SamplingParams(max_tokens=4, temperature=0.0), use_tqdm=False)
        for prompt, output in zip(prompts, llm.score_text(prompts), strict=True):
            np.testing.assert_allclose(output.logprobs, logprobs_of(model, prompt), atol=1e-4)
    with one_thread(), torch.inference_mode():
        assert generated[0].outputs[0].token_ids[0] == int(model(torch.tensor([prompts[1]])).logits[0, -1].argmax())


@pytest.mark.slow
@pytest.mark.model
def test_the_real_model(smollm2: RunningGroup, smollm2_oracle: Any) -> None:
    texts = ["The capital of France is Paris.", "Water boils at one hundred degrees. " * 30]
    for text, output in zip(texts, smollm2.client.score_text(texts), strict=True):
        expected = logprobs_of(smollm2_oracle, output.prompt_token_ids)
        np.testing.assert_allclose(output.logprobs, expected, atol=2e-3, err_msg=text)
