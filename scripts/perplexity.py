"""Perplexity of a text by precision: what quantised weights cost, against the same model in float32.

    scripts/perplexity MODEL --text FILE [--tokens 20480] [--window 512] [--precisions float32,stored,int8,bf16]

float32 is torch with the checkpoint's weights as they are (a GGUF file's: dequantised); stored, int8, int4 and bf16 are
the native kernels with `--quantization` auto, int8, int4 and none. All see the same windows of the text, each without
what came before, and every position but a window's first counts. For a text that is in the public domain and easy to
have: `pip download --no-deps --no-binary :all: brotli` brings Alice's Adventures in Wonderland
(tests/testdata/alice29.txt).
"""

from __future__ import annotations

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from procengine.config import KVCacheDType, ModelConfig, Quantization
from procengine.executor import Model
from procengine.kernels.native.library import set_num_threads
from procengine.kv_tensors import KVTensors
from procengine.model_source import resolve_model
from procengine.models.loader import load_model
from procengine.models.packed_llama import load_packed
from procengine.models.weights import open_weights
from procengine.native_executor import NativeModel
from procengine.paths import procengine_home
from procengine.tokenizer import Tokenizer
from procengine.torch_executor import TorchModel

QUANTIZATIONS = {"stored": "stored", "int8": "int8", "int4": "int4", "bf16": "none"}


def load(config: ModelConfig, precision: str, kv_dtype: KVCacheDType, threads: int) -> Model[Any]:
    if precision == "float32":
        torch.set_num_threads(threads)
        return TorchModel(load_model(config, torch.float32, "cpu", progress=False))
    quantization = cast(Quantization, QUANTIZATIONS[precision])
    decoder = load_packed(config, open_weights(config), quantization, num_threads=threads, progress=False)
    return NativeModel(decoder, config.num_layers, kv_dtype)


@torch.inference_mode()
def perplexity(model: Model[Any], config: ModelConfig, windows: Tensor) -> float:
    """windows: int32 [windows, tokens]."""
    length = windows.shape[1]
    arrays = model.arrays
    executor = model.open(KVTensors(config, 1, 2, "float32", arrays))  # for its head
    bounds, positions = arrays.send(np.array([0, length], np.int32)), arrays.send(np.arange(length))
    total = 0.0
    for window in windows:
        hidden = model.encode(arrays.send(window.contiguous().numpy()), positions, bounds, length)
        logits = torch.as_tensor(executor.compute_logits(hidden))
        total += float(functional.cross_entropy(logits[:-1].double(), window[1:].long(), reduction="sum"))
    return math.exp(total / (windows.shape[0] * (length - 1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--precisions", default="float32,stored,int8,bf16")
    parser.add_argument("--kv-cache-dtype", choices=("bfloat16", "float32", "int8"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    set_num_threads(args.threads)
    config = resolve_model(args.model, procengine_home())
    token_ids = Tokenizer.load(config.tokenizer_path).encode(args.text.read_text(encoding="utf-8", errors="replace"))
    count = min(len(token_ids), args.tokens) // args.window
    windows = torch.tensor(list(token_ids)[: count * args.window], dtype=torch.int32).view(count, args.window)
    print(f"{windows.numel()} tokens in {count} windows")
    first = 0.0
    for precision in args.precisions.split(","):
        began = time.monotonic()
        value = perplexity(load(config, precision, args.kv_cache_dtype, args.threads), config, windows)
        first = first or value
        seconds = time.monotonic() - began
        print(f"{precision:8}  {value:9.4f}  {100 * (value / first - 1):+.3f} %  {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
