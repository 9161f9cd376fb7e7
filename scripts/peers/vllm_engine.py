"""vLLM on the CPU, in process: `vllm_engine.py MODEL_FOLDER`. bfloat16; its start takes a minute and a half."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from engine_loop import at_once, by_steps, serve
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind


class Engine:
    """Its offline class, and the engine below it for streaming."""

    def __init__(self, folder: str) -> None:
        self._llm = vllm.LLM(
            model=folder, dtype="bfloat16", max_model_len=2048, max_num_seqs=32, enable_prefix_caching=True, seed=0
        )
        self._number_by_id: dict[str, int] = {}
        self._next_id = 0

    def generate(self, prompts: list[list[int]], output_len: int) -> None:
        """All of them, as fast as it can."""
        self._llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], _exactly(output_len), use_tqdm=False)

    def add(self, number: int, prompt: list[int], output_len: int) -> None:
        """Queue a request."""
        request_id = str(self._next_id)
        self._next_id += 1
        self._number_by_id[request_id] = number
        params = _exactly(output_len)
        params.output_kind = RequestOutputKind.DELTA
        self._llm.llm_engine.add_request(request_id, TokensPrompt(prompt_token_ids=prompt), params)

    def step(self) -> Iterator[tuple[int, int]]:
        """One step of the batch."""
        for output in self._llm.llm_engine.step():
            count = sum(len(choice.token_ids) for choice in output.outputs)
            if count:
                yield self._number_by_id[output.request_id], count


def _exactly(output_len: int) -> vllm.SamplingParams:
    return vllm.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)


def load() -> tuple[str, str, Any]:
    """For `serve`."""
    (folder,) = sys.argv[1:]
    engine = Engine(folder)

    def run(load: dict[str, Any]) -> list[dict[str, Any]]:
        return by_steps(load, engine) if load["is_streaming"] else at_once(load, engine.generate)

    return vllm.__version__, "bf16", run


if __name__ == "__main__":
    serve(load)
