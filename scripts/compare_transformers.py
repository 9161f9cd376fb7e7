"""Output tokens per second of procengine and of transformers' batched `generate`, run by run in turn.

The machine may be noisy: only the ratio of neighbouring runs counts. Prompts are random token ids of 32..256 tokens,
new ones for every run, so that no cache is warm by accident; all outputs have the same length.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from procengine import LLM, SamplingParams
from procengine.config import ModelConfig
from procengine.model_source import resolve_model
from procengine.models.loader import read_into
from procengine.models.weights import open_weights
from procengine.paths import procengine_home


def transformers_model(config: ModelConfig, dtype: torch.dtype) -> LlamaForCausalLM:
    """transformers' own Llama with the weights of our reader."""
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=config.rms_norm_eps,
            rope_theta=config.rope_theta,
            tie_word_embeddings=config.tie_word_embeddings,
            pad_token_id=0,
        )
    ).to(dtype)
    source = open_weights(config)
    with torch.inference_mode():
        for name, parameter in model.named_parameters():
            read_into(source, name, parameter)
    return model.eval()


@torch.inference_mode()
def run_transformers(model: LlamaForCausalLM, prompts: list[list[int]], num_tokens: int, batch_size: int) -> float:
    """Seconds for all prompts, in left-padded batches."""
    start = time.perf_counter()
    for at in range(0, len(prompts), batch_size):
        part = prompts[at : at + batch_size]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in part])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
        model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False)
    return time.perf_counter() - start


def run_procengine(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Seconds for all prompts."""
    start = time.perf_counter()
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True), use_tqdm=False
    )
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return time.perf_counter() - start


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--model", default="smollm2-135m")
    cli.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    cli.add_argument("--num-prompts", type=int, default=64)
    cli.add_argument("--output-len", type=int, default=128)
    cli.add_argument("--batch-size", type=int, default=64, help="of transformers")
    cli.add_argument("--runs", type=int, default=3)
    args = cli.parse_args()

    config = resolve_model(args.model, procengine_home())
    lengths = [random.Random(7).randint(32, 256) for _ in range(args.num_prompts)]
    rng = random.Random(1234)
    model = transformers_model(config, getattr(torch, args.dtype))
    rows = []
    with LLM(args.model, dtype=args.dtype) as llm:
        run_procengine(llm, [[1, 2, 3]], 4)
        run_transformers(model, [[1, 2, 3]], 4, 1)
        for run in range(args.runs):
            prompts = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
            theirs = run_transformers(model, prompts, args.output_len, args.batch_size)
            ours = run_procengine(llm, prompts, args.output_len)
            total = args.num_prompts * args.output_len
            rows.append(theirs / ours)
            line = {
                "run": run,
                "procengine_tok_s": total / ours,
                "transformers_tok_s": total / theirs,
                "ratio": rows[-1],
            }
            print(json.dumps({k: round(v, 2) for k, v in line.items()}), flush=True)
    print(json.dumps({"median_ratio": round(statistics.median(rows), 2)}))


if __name__ == "__main__":
    sys.exit(main())
