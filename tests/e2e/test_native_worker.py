"""A worker with native kernels serves every kind of request, and never loads torch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine import SamplingParams
from procengine.kernels.native import library
from procengine.structured.spec import StructuredOutputs
from tests.e2e.oracle import hidden_states
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_prompts import TinyCase, random_prompts

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")

_OPTIONS: dict[str, Any] = {"device": "cpu", "kernels": "native", "threads": 1, "max_num_seqs": 8, "num_blocks": 128}
_CHOICES = ("the cat", "the dog")


def loaded_libraries(group: RunningGroup) -> set[str]:
    """Names of the shared objects that the worker has mapped."""
    lines = Path(f"/proc/{group.pids['worker-0']}/maps").read_text(encoding="utf-8").splitlines()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if ".so" in line}


def has_torch(group: RunningGroup) -> bool:
    names = loaded_libraries(group)
    assert any(name.startswith("libprocengine_native") for name in names), names
    return any("torch" in name for name in names)


@pytest.fixture(scope="module")
def group(tiny_llama: TinyCase) -> Iterator[RunningGroup]:
    with RunningGroup(tiny_llama.folder, **_OPTIONS) as running:
        yield running


def test_every_kind_of_request_is_served_without_torch(group: RunningGroup, tiny_llama: TinyCase) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        "penalised": {"temperature": 0.8, "seed": 2, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
        "biased": {"temperature": 0.0, "logit_bias": {7: 5.0}, "min_tokens": 4},
        "allowed": {"temperature": 0.0, "allowed_token_ids": [5, 6, 9]},
        "bad words": {"temperature": 0.0, "bad_words": ["the"]},
        "grammar": {"temperature": 0.7, "seed": 3, "structured_outputs": StructuredOutputs(choice=_CHOICES)},
        "logprobs": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    }
    prompts = random_prompts([9 + index for index in range(len(kinds))], seed=5)
    params = [SamplingParams(max_tokens=12, **fields) for fields in kinds.values()]
    answers = dict(zip(kinds, group.generate(prompts, params), strict=True))
    assert all(answer.outputs[0].finish_reason in ("stop", "length") for answer in answers.values())
    assert answers["grammar"].outputs[0].text in _CHOICES
    assert set(answers["allowed"].outputs[0].token_ids) <= {5, 6, 9}
    assert answers["logprobs"].outputs[0].logprobs is not None
    embedded = torch.tensor([output.embedding for output in group.client.embed(prompts)])
    expected = torch.stack([hidden_states(tiny_llama.model, prompt)[-1] for prompt in prompts])
    assert float(torch.cosine_similarity(embedded, expected).min()) > 0.995  # bf16 against float32
    for layer in (0, 1, 3):
        found = group.client.hidden_states(prompts[:1], layer=layer)[0]
        states = torch.frombuffer(bytearray(found.data), dtype=torch.float32).view(-1, 64)
        with torch.inference_mode():
            all_states = tiny_llama.model.model(torch.tensor(prompts[:1]), output_hidden_states=True).hidden_states
        assert float(torch.cosine_similarity(states, all_states[layer][0]).min()) > 0.995
    scored = [torch.tensor(output.logprobs) for output in group.client.score_text(prompts)]
    exact = [_logprobs(tiny_llama.model, prompt) for prompt in prompts]
    in_bfloat16 = copy.deepcopy(tiny_llama.model).to(torch.bfloat16)
    rounded = [_logprobs(in_bfloat16, prompt) for prompt in prompts]
    assert _furthest(scored, exact) < 1.5 * _furthest(rounded, exact)  # as far as transformers' own in bf16
    assert not has_torch(group)


def _logprobs(model: torch.nn.Module, prompt: list[int]) -> Tensor:
    """[n - 1], of each token behind the first."""
    with torch.inference_mode():
        logprobs: Tensor = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def _furthest(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True))


def test_a_logits_processor_brings_torch_and_the_log_says_why(
    tiny_llama: TinyCase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # where the worker finds it
    options = {**_OPTIONS, "logits_processors": ["tests.e2e.only_token_nine:make"]}
    with RunningGroup(tiny_llama.folder, **options) as running:
        answer = running.client.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        assert answer.outputs[0].token_ids == [9] * 5
        assert has_torch(running)
        assert running.log.count("loading torch") == 1
        assert "logits_processors are given tensors" in running.log
