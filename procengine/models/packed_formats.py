"""In which packed format each matrix of a checkpoint is kept.

Owns: that choice, from how the file stores a matrix and what `--quantization` asks. Never does: pack.
"""

from __future__ import annotations

from collections.abc import Iterable

from procengine.config import Quantization
from procengine.errors import ConfigError
from procengine.kernels.linear.packed import GGML_FORMATS, PackedFormat

__all__ = ["common_format", "packed_format"]

_BF16 = PackedFormat("bf16")
_INT8 = PackedFormat("int8")
_INT4 = PackedFormat("int4", mins=True)  # with a zero point: half the error of symmetric rounding (Q4_1 against Q4_0)


def packed_format(quantization: Quantization, ggml_type: str | None, *, is_table: bool) -> PackedFormat:
    """The format of a matrix that its file stores as `ggml_type` (None: floats).

    `is_table`: of embedding and head, which 4 bits would harm most; as llama.cpp does, they are kept in 8.
    """
    match quantization:
        case "none":
            return _BF16
        case "int8":
            return _INT8
        case "int4":
            return _INT8 if is_table else _INT4
        case "fp8":
            raise ConfigError("fp8 weights are for the torch kernels")
        case "int14":
            raise ConfigError("weights of 14 bits are for encoders")
        case "stored":
            return GGML_FORMATS.get(ggml_type or "", _BF16)


def common_format(formats: Iterable[PackedFormat]) -> PackedFormat:
    """One that holds what each of the others does."""
    distinct = set(formats)
    if len(distinct) == 1:
        return distinct.pop()
    if any(one.kind == "bf16" for one in distinct):
        return _BF16
    group, mins = min(one.group for one in distinct), any(one.mins for one in distinct)
    return PackedFormat("int8" if any(one.kind == "int8" for one in distinct) else "int4", group, mins)
