"""The part `peer`: transformers' continuous batching and this engine on the same work.

Owns: the work and the two runs. Never does: compare tokens (`greedy` does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from gpu_checks.engine import Engine
from gpu_checks.machine import Machine
from gpu_checks.models import BLOCK_SIZE, build, make_config, make_weights, oracle_of
from gpu_checks.report import Budget, Report, Row
from gpu_checks.steps import free

from procengine.config import ModelConfig
from procengine.decode_graphs import graph_sizes
from procengine.scheduler.limits import SchedulerLimits
from procengine.torch_executor import TorchModel

__all__ = ["check_peer"]


def check_peer(machine: Machine, report: Report, budget: Budget) -> None:
    """A row for each of the two, and one for their ratio. The first run of each is to warm up."""
    is_cuda = machine.is_cuda
    config = make_config("1B" if is_cuda else "tiny")
    dtype = torch.bfloat16 if is_cuda else torch.float32
    num_requests, prompt_len, num_tokens = (256, 128, 128) if is_cuda else (2, 6, 4)
    generator = np.random.default_rng(9)
    prompts = generator.integers(3, config.vocab_size, (num_requests, prompt_len)).tolist()
    with torch.inference_mode():
        weights = make_weights(config, dtype, machine.device)
        model = TorchModel(build(config, weights), graph_sizes(num_requests))
    name = str(dtype).removeprefix("torch.")
    ours = _timed(partial(_run_ours, config, model, prompts, num_tokens, name), machine)
    values = {"requests": num_requests, "prompt": prompt_len, "tokens": num_tokens}
    _report("procengine, in one process", ours, num_requests * num_tokens, values, report)
    del model
    free(machine)
    if not budget.has(20 if is_cuda else 0):
        report.add(Row("peer", "transformers", "skip", "no time left"))
        return
    oracle = oracle_of(config, weights, dtype, machine.device)
    theirs = _timed(partial(_run_theirs, oracle, prompts, num_tokens, is_cuda), machine)
    _report("transformers, continuous batching", theirs, num_requests * num_tokens, values, report)
    report.add(Row("peer", "ratio", "info", f"{theirs / ours:.2f} times as fast", {"ratio": theirs / ours}))
    del oracle
    free(machine)


def _timed(run: Callable[[], int], machine: Machine) -> float:
    """Seconds of the second run, or of the only one on a CPU."""
    seconds = 0.0
    for _ in range(2 if machine.is_cuda else 1):
        begin = time.perf_counter()
        run()
        machine.wait()
        seconds = time.perf_counter() - begin
    return seconds


def _report(what: str, seconds: float, num_tokens: int, values: dict[str, Any], report: Report) -> None:
    rate = num_tokens / seconds
    text = f"{rate:.0f} tok/s ({values['requests']} requests of {values['prompt']} + {values['tokens']} tokens)"
    report.add(Row("peer", what, "info", text, {**values, "seconds": seconds, "tokens_per_s": rate}))


def _run_ours(config: ModelConfig, model: Any, prompts: list[list[int]], num_tokens: int, kv_dtype: str) -> int:
    length = len(prompts[0]) + num_tokens
    limits = SchedulerLimits(
        max_num_seqs=len(prompts),
        max_num_batched_tokens=max(2048, len(prompts) + 64),
        max_model_len=length,
        block_size=BLOCK_SIZE,
        num_blocks=len(prompts) * -(-length // BLOCK_SIZE),
    )
    engine = Engine(config, model, limits, depth=2, kv_dtype=kv_dtype)
    for prompt in prompts:
        engine.add(prompt, num_tokens)
    return sum(map(len, engine.run().values()))


def _run_theirs(oracle: Any, prompts: list[list[int]], num_tokens: int, is_cuda: bool) -> int:
    import transformers

    options: dict[str, Any] = {}
    if not is_cuda:  # its sizes and its warm-up are for GPUs
        small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
        options = {"warmup": False, "continuous_batching_config": small}
    config = transformers.GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0, use_cache=True
    )
    out = oracle.generate_batch(prompts, generation_config=config, progress_bar=False, **options)
    found = sum(len(one.generated_tokens) for one in out.values())
    if found != len(prompts) * num_tokens:
        raise RuntimeError(f"transformers generated {found} of {len(prompts) * num_tokens} tokens")
    return found
