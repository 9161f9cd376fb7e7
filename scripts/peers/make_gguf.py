"""The model's GGUF file in other formats of llama.cpp: `make_gguf.py FILE.gguf FOLDER`, with llama-cpp-python.

What Q4_1 lost stays lost: the files are for speed, not for quality.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp

FORMATS = {  # enum llama_ftype
    "q4_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "bf16": llama_cpp.LLAMA_FTYPE_MOSTLY_BF16,
}


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, ftype in FORMATS.items():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize = ftype, True
        target = folder / f"{name}.gguf"
        status = llama_cpp.llama_model_quantize(bytes(source), bytes(target), ctypes.byref(params))
        if status:
            sys.exit(f"{target}: llama.cpp refused with status {status}")
        print(target)


if __name__ == "__main__":
    main()
