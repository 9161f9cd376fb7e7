"""What transformers makes of a prompt: its continuation and how sure it was, log probabilities, hidden states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["GreedyRun", "best_tokens", "greedy_run", "hidden_states", "next_logprobs"]


@dataclass(frozen=True)
class GreedyRun:
    """One greedy continuation. `gaps[i]`: by how much the logit of `token_ids[i]` beats the second best."""

    token_ids: list[int]
    gaps: list[float]

    def until(self, stop_token_id: int | None) -> list[int]:
        """The tokens up to the first `stop_token_id`, that one included."""
        if stop_token_id not in self.token_ids:
            return self.token_ids
        return self.token_ids[: self.token_ids.index(stop_token_id) + 1]


@contextmanager
def one_thread() -> Iterator[None]:
    """Two threads are little faster here, and a multiple slower where they have to share the cores with others."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def greedy_run(model: Any, prompt: Sequence[int], max_tokens: int) -> GreedyRun:
    """`model.generate` on one prompt alone, past any end token."""
    with one_thread(), torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    best_two = torch.cat(output.logits).topk(2).values
    return GreedyRun(output.sequences[0, len(prompt) :].tolist(), (best_two[:, 0] - best_two[:, 1]).tolist())


def best_tokens(model: Any, prompt: Sequence[int], token_ids: Sequence[int]) -> GreedyRun:
    """The best token at each place of a given continuation; the same as `greedy_run` if it is the greedy one.

    All in one forward pass, where `generate` takes one a token.
    """
    with one_thread(), torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *token_ids[:-1]]])).logits[0, len(prompt) - 1 :]
    best_two = logits.topk(2)
    return GreedyRun(best_two.indices[:, 0].tolist(), (best_two.values[:, 0] - best_two.values[:, 1]).tolist())


def next_logprobs(model: Any, prompt: Sequence[int]) -> Tensor:
    """Log probabilities of the token after the prompt, float32 [vocabulary]."""
    with one_thread(), torch.inference_mode():
        logprobs: Tensor = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    return logprobs


def hidden_states(model: Any, prompt: Sequence[int]) -> Tensor:
    """What comes out behind the last norm, float32 [tokens, hidden]."""
    with one_thread(), torch.inference_mode():
        hidden: Tensor = model.model(torch.tensor([prompt])).last_hidden_state[0]
    return hidden
