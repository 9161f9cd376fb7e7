"""llama.cpp: `llama_cpp_engine.py FILE.gguf PRECISION`, through the C interface that llama-cpp-python wraps.

The binding's own `Llama.generate` spends a millisecond more a token, in Python and in samplers nobody asked for; it
is llama.cpp that we compare with. Several requests are batched as llama-server does: each has a sequence of its own,
one token of each that decodes goes into a step, and prompts fill the rest.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
from engine_loop import by_steps, serve

MAX_SEQS = 32
SEQ_LEN = 512  # tokens of each of several; the requests of a load that has longer ones run one after the other
CONTEXT_LEN = 2048  # tokens of one alone
STEP_TOKENS = 512


@dataclass(slots=True)
class Request:
    """`pending`: tokens that llama.cpp has not seen: the prompt, or the token that came last."""

    number: int
    pending: list[int]
    num_left: int
    seq: int = 0
    num_done: int = 0


class Engine:
    """A queue of requests, of which as many run as there are sequences."""

    def __init__(self, model: Any, num_seqs: int, seq_len: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_seqs * seq_len, num_seqs
        params.n_batch = max(STEP_TOKENS, seq_len)
        params.kv_unified = False  # a request looks at its own tokens only
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        self._context = llama_cpp.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot run the model")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._step_tokens = params.n_batch
        self._batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)
        self._free_seqs = list(range(num_seqs))
        self._waiting: list[Request] = []
        self._running: list[Request] = []

    def add(self, number: int, prompt: list[int], output_len: int) -> None:
        """Queue a request."""
        self._waiting.append(Request(number, prompt, output_len))

    def step(self) -> list[tuple[int, int]]:
        """One step of the batch: a token for each request whose prompt is complete. None ends by itself."""
        self._admit()
        self._batch.n_tokens, sampled = 0, []
        for request in sorted(self._running, key=lambda one: len(one.pending) > 1):  # those that decode go first
            taken = request.pending[: self._step_tokens - self._batch.n_tokens]
            for token in taken:
                self._append(token, request)
            request.pending = request.pending[len(taken) :]
            if taken and not request.pending:
                self._batch.logits[self._batch.n_tokens - 1] = True
                sampled.append((request, self._batch.n_tokens - 1))
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode: status {status}")
        for request, row in sampled:
            self._take(request, row)
        return [(request.number, 1) for request, _ in sampled]

    def _admit(self) -> None:
        while self._waiting and self._free_seqs:
            request = self._waiting.pop(0)
            request.seq = self._free_seqs.pop()
            llama_cpp.llama_memory_seq_rm(self._memory, request.seq, -1, -1)
            self._running.append(request)

    def _append(self, token: int, request: Request) -> None:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, request.num_done, False
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, request.seq
        batch.n_tokens = at + 1
        request.num_done += 1

    def _take(self, request: Request, row: int) -> None:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        request.pending = [int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())]
        request.num_left -= 1
        if not request.num_left:
            self._running.remove(request)
            self._free_seqs.append(request.seq)


def load() -> tuple[str, str, Any]:
    """For `serve`."""
    path, precision = sys.argv[1:]
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise RuntimeError(f"{path}: llama.cpp cannot read it")
    alone, together = Engine(model, 1, CONTEXT_LEN), Engine(model, MAX_SEQS, SEQ_LEN)

    def run(load: dict[str, Any]) -> list[dict[str, Any]]:
        longest = max(map(len, load["prompts"])) + load["output_len"]
        return by_steps(load, together if len(load["prompts"]) > 1 and longest <= SEQ_LEN else alone)

    return llama_cpp.__version__, precision, run


if __name__ == "__main__":
    serve(load)
