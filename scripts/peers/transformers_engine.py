"""transformers' `generate` in bfloat16: `transformers_engine.py MODEL_FOLDER`. Static batches, padded at the left."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from engine_loop import at_once, serve

BATCH_SIZE = 32


class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Is asked after each token whether to stop; says no, and notes the time."""

    def __init__(self) -> None:
        self.begin_s = time.perf_counter()
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        """bool [batch]: nobody stops."""
        self.times_s.append(time.perf_counter() - self.begin_s)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Engine:
    """A model, without a scheduler."""

    def __init__(self, folder: str) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self._pad = self._model.config.eos_token_id or 0

    def run(self, load: dict[str, Any]) -> list[dict[str, Any]]:
        """A load; streaming for one batch only: a static batch has no arrivals."""
        if load["is_streaming"] and len(load["prompts"]) <= BATCH_SIZE and not load["arrivals_s"]:
            return self._stream(load["prompts"], load["output_len"])
        return at_once(load, self.generate)

    def generate(self, prompts: list[list[int]], output_len: int) -> None:
        """All of them, batch by batch."""
        for at in range(0, len(prompts), BATCH_SIZE):
            self._generate(prompts[at : at + BATCH_SIZE], output_len)

    def _stream(self, prompts: list[list[int]], output_len: int) -> list[dict[str, Any]]:
        clock = Clock()
        self._generate(prompts, output_len, clock)
        counts = [1] * len(clock.times_s)
        times = {"intended_s": 0.0, "submitted_s": 0.0, "token_times_s": clock.times_s, "token_counts": counts}
        return [times] * len(prompts)

    @torch.inference_mode()
    def _generate(self, prompts: list[list[int]], output_len: int, *criteria: Clock) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        found = self._model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=output_len,
            min_new_tokens=output_len,
            do_sample=False,
            pad_token_id=self._pad,
            stopping_criteria=transformers.StoppingCriteriaList(criteria),
        )
        assert found.shape[1] == width + output_len


def load() -> tuple[str, str, Any]:
    """For `serve`."""
    (folder,) = sys.argv[1:]
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return transformers.__version__, "bf16", Engine(folder).run


if __name__ == "__main__":
    serve(load)
