"""The part `group`: the processes as users run them, with a model of random weights.

Owns: the model's folder, and the rows. Never does: figures of its own (`procengine.bench.steady_decode`).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from gpu_checks.machine import Machine
from gpu_checks.models import make_config, make_weights
from gpu_checks.report import Budget, Report, Row
from gpu_checks.steps import free

from procengine.config import ModelConfig

__all__ = ["check_group"]

_MODES: dict[str, dict[str, Any]] = {
    "depth 1": {"async_depth": 1},
    "depth 2": {},
    "8 steps a message": {"decode_steps": 8},
}


def check_group(machine: Machine, report: Report, budget: Budget) -> None:
    """A row for each way to run, and batch size."""
    config = make_config("135M" if machine.is_cuda else "tiny")
    dtype = torch.bfloat16 if machine.is_cuda else torch.float32
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        _save(config, dtype, machine.device, Path(folder) / "model")
        free(machine)
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # its processes find what this one does
        os.environ["PROCENGINE_RUN_DIR"] = os.environ["PROCENGINE_HOME"] = folder
        for mode, options in _MODES.items() if machine.is_cuda else {"depth 2": {}}.items():
            if not budget.has(15 if machine.is_cuda else 5):
                report.add(Row("group", mode, "skip", "no time left"))
                continue
            own = {"device": machine.device.type, "kernels": "torch", "dtype": str(dtype).removeprefix("torch.")}
            _run(mode, str(Path(folder) / "model"), {**own, **options}, machine, report)


def _run(mode: str, model: str, options: dict[str, Any], machine: Machine, report: Report) -> None:
    from procengine.bench.decode_bench import DecodeBench
    from procengine.engine_args import EngineArgs
    from procengine.resolve import resolve

    batches, input_len, output_len = ((1, 32, 256), 64, 160) if machine.is_cuda else ((2,), 5, 24)
    args = EngineArgs(model=model, name="gpu-check", max_model_len=512, crash_seconds=0, **options)
    with DecodeBench(resolve(args)) as bench:
        bench.run(max(batches), input_len, output_len, seed=99)  # warm
        for batch in batches:
            found = bench.run(batch, input_len, output_len, seed=1)
            text = f"{found.tokens_per_s:.0f} tok/s, {1e3 * found.pass_ms:.0f} us in a pass of the device loop"
            values = {"tokens_per_s": found.tokens_per_s, "pass_ms": found.pass_ms, "idle_share": found.idle_share}
            report.add(Row("group", f"batch {batch}, {mode}", "info", text, values))


def _save(config: ModelConfig, dtype: torch.dtype, device: torch.device, folder: Path) -> None:
    """A Hugging Face folder, with a tokenizer whose words are its numbers."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    with torch.inference_mode():
        weights = make_weights(config, dtype, device)
        tensors = {name: one.cpu().clone() for name, one in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(config.vocab_size)}, unk_token="0"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
