"""llama.cpp: `llama_cpp_engine.py FILE.gguf PRECISION`, through the C interface that llama-cpp-python wraps.

The binding's own `Llama.generate` spends a millisecond more a token, in Python and in samplers nobody asked for; it
is llama.cpp that we compare with. One sequence at a time: this is for the single stream and for prompts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import llama_cpp
from engine_loop import by_steps, serve

CONTEXT_LEN = 2048


class Engine:
    """A queue of requests, of which the first runs."""

    def __init__(self, path: str) -> None:
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = CONTEXT_LEN
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError(f"{path}: llama.cpp cannot run it")
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._waiting: list[tuple[int, list[int], int]] = []
        self._num_done = 0  # tokens of the first
        self._last = 0

    def add(self, number: int, prompt: list[int], output_len: int) -> None:
        """Queue a request."""
        self._waiting.append((number, prompt, output_len))

    def step(self) -> list[tuple[int, int]]:
        """The next token of the first request; an end-of-text token does not end it."""
        number, prompt, output_len = self._waiting[0]
        if not self._num_done:
            llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        self._last = self._decode([self._last] if self._num_done else prompt)
        self._num_done += 1
        if self._num_done == output_len:
            self._num_done = 0
            self._waiting.pop(0)
        return [(number, 1)]

    def _decode(self, token_ids: list[int]) -> int:
        """Append tokens to the sequence; the likeliest next one."""
        array = (llama_cpp.llama_token * len(token_ids))(*token_ids)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(token_ids)))
        if status:
            raise RuntimeError(f"llama_decode: status {status}")
        return int(llama_cpp.llama_sampler_sample(self._sampler, self._context, -1))


def load() -> tuple[str, str, Any]:
    """For `serve`."""
    path, precision = sys.argv[1:]
    engine = Engine(path)
    return llama_cpp.__version__, precision, lambda load: by_steps(load, engine)


if __name__ == "__main__":
    serve(load)
