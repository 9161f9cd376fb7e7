"""What a configuration of ours computes in, so that it is compared with peers of the same class.

Owns: the names of classes. Never does: decide a precision (`resolve` does).
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, Final

import msgspec

from procengine.config import EngineConfig
from procengine.gguf_file import GGUFFile

__all__ = ["CLASSES", "precision_of", "weights_class"]

CLASSES: Final = ("4-bit", "8-bit", "bf16", "fp16", "fp32")
_SHORT: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_BITS: Final = re.compile(r"(?:int|I?Q)(\d)")  # int8, Q4_1, IQ4_NL


def precision_of(config: EngineConfig) -> str:
    """The weights as the worker keeps them: "bf16", "int8", or the type that most of a GGUF file has, "Q4_1"."""
    worker: dict[str, Any] = msgspec.to_builtins(config.worker)
    quantization: str = worker.get("quantization", "none")
    if quantization == "stored":
        return _main_type(GGUFFile(config.model.path))
    return _SHORT[worker["dtype"]] if quantization == "none" else quantization


def weights_class(precision: str) -> str:
    """One of CLASSES: weights of fewer than 6 bits are compared as 4-bit, others with blocks as 8-bit."""
    found = _BITS.match(precision)
    if found is None:
        assert precision in CLASSES, precision
        return precision
    return "4-bit" if int(found[1]) < 6 else "8-bit"


def _main_type(file: GGUFFile) -> str:
    """By bytes."""
    sizes: Counter[str] = Counter()
    for info in file.tensors.values():
        sizes[info.ggml_type.name] += info.nbytes
    name = sizes.most_common(1)[0][0]
    return {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}.get(name, name)
