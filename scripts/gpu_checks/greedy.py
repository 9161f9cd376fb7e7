"""The part `greedy`: the whole engine against transformers, on the same weights.

Owns: the prompts and the comparison. Never does: time anything.
"""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_checks.engine import Engine
from gpu_checks.logits import logits_of, relative_error
from gpu_checks.machine import Machine
from gpu_checks.models import Checkpoint, build, make_config, make_weights, oracle_of, read_weights
from gpu_checks.report import Budget, Report, Row
from gpu_checks.steps import free
from torch import Tensor

from procengine.config import ModelConfig
from procengine.scheduler.limits import SchedulerLimits
from procengine.torch_executor import TorchModel

__all__ = ["check_greedy"]

# Depth, decode steps, backend of the operations, graphs. On a GPU auto is triton.
_Mode = tuple[int, int, str, tuple[int, ...]]
_MODES: dict[str, _Mode] = {
    "torch": (1, 1, "torch", ()),
    "triton": (1, 1, "triton", ()),
    "depth 2, graphs": (2, 1, "auto", (1, 2, 4, 8)),
    "4 steps a message": (2, 4, "auto", (8,)),
}
_NEAR_TIE = 1e-3  # of the spread of a row's logits: two candidates that float32 sums in another order may swap
_MAX_ERROR_RATIO = 1.5  # of our bfloat16 error to transformers'


def check_greedy(machine: Machine, report: Report, budget: Budget, smollm2: Path | None = None) -> None:
    """Rows for random weights of a 1B model, and for SmolLM2 where it is."""
    config = make_config("1B" if machine.is_cuda else "tiny")
    with torch.inference_mode():
        _check_model("random", config, make_weights(config, torch.float32, machine.device), machine, report, budget)
    free(machine)
    path = smollm2 or _pulled_smollm2()
    if path is None or not (machine.is_cuda or smollm2):
        report.add(Row("greedy", "SmolLM2", "skip", "not here (procengine pull smollm2-135m, or --smollm2)"))
        return
    from procengine.model_source import resolve_model
    from procengine.paths import procengine_home

    config = resolve_model(str(path), procengine_home())
    with torch.inference_mode():
        _check_model("SmolLM2", config, read_weights(config, machine.device), machine, report, budget)
    free(machine)


def _check_model(
    name: str, config: ModelConfig, weights: Checkpoint, machine: Machine, report: Report, budget: Budget
) -> None:
    prompts = _prompts(config.vocab_size, [5, 63, 64, 65, 1, 130] if machine.is_cuda else [5, 17, 1])
    num_tokens = 32 if machine.is_cuda else 6
    oracle = oracle_of(config, weights, torch.float32, machine.device)
    expected = [_oracle_tokens(oracle, prompt, num_tokens, machine) for prompt in prompts]
    for mode, (depth, decode_steps, backend, graph_sizes) in _MODES.items():
        is_too_slow = backend == "triton" and not machine.is_cuda and config.name != "tiny"  # the interpreter
        if budget.has() and not is_too_slow:
            model = TorchModel(build(config, weights, backend), graph_sizes)
            tokens = _our_tokens(config, model, prompts, num_tokens, depth, decode_steps, "float32")
            row = _compare(f"{name}, float32, {mode}", prompts, tokens, expected, oracle, machine)
            report.add(row)
    if budget.has(10 if machine.is_cuda else 0):
        sequences = [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
        exact = torch.cat([_oracle_logits(oracle, one, machine) for one in sequences])
        _compare_bfloat16(name, config, weights, sequences, exact, machine, report)


def _prompts(vocab_size: int, lengths: list[int]) -> list[list[int]]:
    generator = np.random.default_rng(7)
    return [generator.integers(3, vocab_size, length).tolist() for length in lengths]


def _our_tokens(
    config: ModelConfig,
    model: Any,
    prompts: list[list[int]],
    num_tokens: int,
    depth: int,
    decode_steps: int,
    kv_dtype: str,
) -> list[list[int]]:
    """Prompts in chunks, in steps in which others decode."""
    longest = max(map(len, prompts)) + num_tokens
    limits = SchedulerLimits(
        max_num_seqs=len(prompts),
        max_num_batched_tokens=40,
        max_model_len=longest,
        block_size=16,
        num_blocks=len(prompts) * -(-longest // 16),
        decode_steps=decode_steps,
    )
    engine = Engine(config, model, limits, depth=depth, kv_dtype=kv_dtype)
    for prompt in prompts:
        engine.add(prompt, num_tokens)
    return list(engine.run().values())


def _oracle_tokens(oracle: Any, prompt: list[int], num_tokens: int, machine: Machine) -> list[int]:
    ids = torch.tensor([prompt], device=machine.device)
    out = oracle.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens
    )
    return [int(token) for token in out[0, len(prompt) :]]


def _oracle_logits(oracle: Any, sequence: list[int], machine: Machine) -> Tensor:
    logits: Tensor = oracle(torch.tensor([sequence], device=machine.device)).logits[0].float()
    return logits


def _compare(
    what: str,
    prompts: list[list[int]],
    tokens: list[list[int]],
    expected: list[list[int]],
    oracle: Any,
    machine: Machine,
) -> Row:
    """Equal, or different from where the oracle itself has two candidates that are as good as equal."""
    num_equal, ties, wrong = 0, 0, []
    for prompt, ours, theirs in zip(prompts, tokens, expected, strict=True):
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=True)))
        num_equal += same
        if same == len(theirs):
            continue
        logits = _oracle_logits(oracle, prompt + theirs[:same], machine)[-1]
        gap = float((logits[theirs[same]] - logits[ours[same]]) / logits.std())
        if gap <= _NEAR_TIE:
            ties += 1
        else:
            wrong.append(f"prompt of {len(prompt)}, token {same}: {ours[same]} for {theirs[same]} (gap {gap:.2g})")
    total = sum(map(len, expected))
    result = f"{num_equal} of {total} tokens equal, {ties} near ties" + "".join(f"; {one}" for one in wrong)
    return Row("greedy", what, "FAIL" if wrong else "ok", result, {"equal": num_equal, "of": total, "ties": ties})


def _compare_bfloat16(
    name: str,
    config: ModelConfig,
    weights: Checkpoint,
    sequences: list[list[int]],
    exact: Tensor,
    machine: Machine,
    report: Report,
) -> None:
    """Logits of the same tokens: ours may be off from float32's by little more than transformers' own."""
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    theirs = oracle_of(config, rounded, torch.bfloat16, machine.device)
    their_error = relative_error(torch.cat([_oracle_logits(theirs, one, machine) for one in sequences]), exact)
    del theirs
    our_error = relative_error(logits_of(config, TorchModel(build(config, rounded)), sequences, "bfloat16"), exact)
    is_good = our_error <= _MAX_ERROR_RATIO * their_error
    values = {"error": our_error, "transformers_error": their_error}
    result = f"logits off by {our_error:.2%} of their spread, transformers' by {their_error:.2%}"
    report.add(Row("greedy", f"{name}, bfloat16", "ok" if is_good else "FAIL", result, values))


def _pulled_smollm2() -> Path | None:
    try:
        from procengine.paths import procengine_home
    except ImportError:
        return None
    found = sorted((procengine_home() / "models").glob("*/*mol*LM2-135M*.gguf"))
    return found[0] if found else None
