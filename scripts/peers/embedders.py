"""Other embedding engines, driven by JSON lines: `embedders.py NAME MODEL_FOLDER THREADS`. Runs in the peers' own
environment: sentence-transformers, onnxruntime or openvino, and torch and transformers to export from.

Says {"version": ...} when the model is loaded; then, for each {"texts": [...]}, {"seconds": ..., "vectors": base64 of
float32 [texts, size]}. All get whole texts: tokenizing is part of the work. All compute in float32, in batches of 32
texts of neighbouring lengths, as sentence-transformers does.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_BATCH = 32
Encode = Callable[[list[str]], Any]


def main() -> None:
    name, folder, threads = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no answer
    version, encode = _OPEN[name](folder, threads)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        texts = json.loads(line)["texts"]
        began = time.perf_counter()
        vectors = encode(texts)
        seconds = time.perf_counter() - began
        packed = base64.b64encode(np.ascontiguousarray(vectors, "<f4").tobytes()).decode()
        print(json.dumps({"seconds": seconds, "vectors": packed}), file=answers, flush=True)


def _open_sentence_transformers(folder: Path, threads: int) -> tuple[str, Encode]:
    import sentence_transformers
    import torch

    torch.set_num_threads(threads)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    return sentence_transformers.__version__, lambda texts: model.encode(texts, batch_size=_BATCH)


def _open_onnxruntime(folder: Path, threads: int) -> tuple[str, Encode]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    with tempfile.TemporaryDirectory() as scratch:
        session = onnxruntime.InferenceSession(_export_onnx(folder, Path(scratch)), options)
    return onnxruntime.__version__, _batched(folder, threads, lambda inputs: session.run(None, inputs)[0])


def _open_openvino(folder: Path, threads: int) -> tuple[str, Encode]:
    import openvino

    with tempfile.TemporaryDirectory() as scratch:
        model = openvino.Core().read_model(_export_onnx(folder, Path(scratch)))
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        compiled = openvino.Core().compile_model(model, "CPU", settings)
    return openvino.__version__, _batched(folder, threads, lambda inputs: compiled(inputs)[0])


def _export_onnx(folder: Path, scratch: Path) -> str:
    """Hidden states of the encoder, for any batch and length."""
    import torch
    import transformers

    names = ["input_ids", "attention_mask", "token_type_ids"]

    class HiddenStates(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = transformers.AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

        def forward(self, *inputs: Any) -> Any:
            return self.model(**dict(zip(names, inputs, strict=True))).last_hidden_state

    path = str(scratch / "model.onnx")
    inputs = tuple(torch.ones(2, 16, dtype=torch.int64) for _ in names)
    axes = {name: {0: "batch", 1: "length"} for name in [*names, "hidden"]}
    with torch.no_grad():
        torch.onnx.export(
            HiddenStates(), inputs, path, input_names=names, output_names=["hidden"], dynamic_axes=axes, dynamo=False
        )
    return path


def _batched(folder: Path, threads: int, run: Callable[[dict[str, Any]], Any]) -> Encode:
    """Longest first, tokenized and padded a batch at a time; mean pooling, length 1."""
    import tokenizers

    os.environ["RAYON_NUM_THREADS"] = str(threads)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"])
    tokenizer.enable_padding()

    def encode(texts: list[str]) -> Any:
        order = sorted(range(len(texts)), key=lambda at: -len(texts[at]))
        vectors: list[Any] = [None] * len(texts)
        for start in range(0, len(order), _BATCH):
            places = order[start : start + _BATCH]
            encoded = tokenizer.encode_batch([texts[at] for at in places])
            mask = np.array([one.attention_mask for one in encoded])
            ids, types = (np.array([getattr(one, name) for one in encoded]) for name in ("ids", "type_ids"))
            hidden = run({"input_ids": ids, "attention_mask": mask, "token_type_ids": types})
            sums = np.matmul(mask[:, None, :].astype(np.float32), hidden)[:, 0]
            means = sums / mask.sum(axis=1, keepdims=True)
            for at, vector in zip(places, means / np.linalg.norm(means, axis=1, keepdims=True), strict=True):
                vectors[at] = vector
        return np.stack(vectors)

    return encode


_OPEN = {
    "sentence-transformers": _open_sentence_transformers,
    "onnxruntime": _open_onnxruntime,
    "openvino": _open_openvino,
}

if __name__ == "__main__":
    main()
