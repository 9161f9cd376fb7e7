"""The real model: the prompts of cases.md with what they must give, and how a group of it is set up here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from procengine import SamplingParams

__all__ = ["P1", "P2", "P3", "P4", "P5", "SMOLLM2_OPTIONS", "Prompt", "greedy", "save_plain_copy"]

SMOLLM2_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "max_model_len": 768,
    "max_num_seqs": 40,
    "num_blocks": 640,
}


@dataclass(frozen=True)
class Prompt:
    """A prompt and its greedy continuation."""

    text: str
    num_tokens: int
    token_ids: list[int]
    completion: str


# fmt: off
P1 = Prompt("The capital of France is", 5, [7042, 30, 198, 198], " Paris.\n\n")
P2 = Prompt(
    "Here is the English alphabet: ABC", 7,
    [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71], "DEFGHIJKLMNOPQRSTUVW",
)
P3 = Prompt("日本語" * 4, 24, [23274, 115, 40993, 179, 120, 248] * 2, "日本語" * 2)
P4 = Prompt("cat dog cat dog cat dog", 6, [2767] * 8, " dog" * 8)
# A user's message, by the chat template; 2 is <|im_end|>.
P5 = Prompt(
    "What is the capital of France?", 37, [504, 3575, 282, 4649, 314, 7042, 30, 2], "The capital of France is Paris."
)
# fmt: on


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    """Greedy sampling of so many tokens."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **fields)


def save_plain_copy(oracle: Any, folder: Path) -> None:
    """`oracle` as an unquantised Hugging Face folder, which `save_pretrained` refuses for a model read from GGUF."""
    import transformers

    facts = {key: value for key, value in oracle.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**facts))
    plain.load_state_dict(oracle.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(folder)
