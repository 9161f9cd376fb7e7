"""llama.cpp through llama-cpp-python: `llama_cpp_engine.py FILE.gguf PRECISION`.

One sequence at a time: the binding does not batch, so this is for the single stream and for prompts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import llama_cpp
from engine_loop import by_steps, serve


class Engine:
    """A queue of requests, of which the first runs."""

    def __init__(self, path: str) -> None:
        threads = len(os.sched_getaffinity(0))
        self._llama = llama_cpp.Llama(
            model_path=path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False
        )
        self._waiting: list[tuple[int, list[int], int]] = []
        self._stream: Iterator[int] | None = None
        self._num_left = 0

    def add(self, number: int, prompt: list[int], output_len: int) -> None:
        """Queue a request."""
        self._waiting.append((number, prompt, output_len))

    def step(self) -> list[tuple[int, int]]:
        """The next token of the first request; the stream does not end by itself at an end-of-text token."""
        number, prompt, output_len = self._waiting[0]
        if self._stream is None:
            self._llama.reset()
            self._stream, self._num_left = self._llama.generate(prompt, temp=0.0), output_len
        next(self._stream)
        self._num_left -= 1
        if not self._num_left:
            self._stream = None
            self._waiting.pop(0)
        return [(number, 1)]


def load() -> tuple[str, str, Any]:
    """For `serve`."""
    path, precision = sys.argv[1:]
    engine = Engine(path)
    return llama_cpp.__version__, precision, lambda load: by_steps(load, engine)


if __name__ == "__main__":
    serve(load)
