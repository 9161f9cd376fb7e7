"""A GGUF file as a Hugging Face folder in bfloat16, for the peers that read those: `make_model.py FILE.gguf FOLDER`.

Needs torch, transformers and gguf: procengine's own environment will do.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main() -> None:
    source, target = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    plain = GgufConfig(gguf_file=source.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=plain
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)


if __name__ == "__main__":
    main()
