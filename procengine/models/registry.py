"""Which class implements which architecture.

Owns: the table. Never does: import an implementation before it is asked for, or read files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from procengine.errors import ModelError

if TYPE_CHECKING:
    from procengine.models.decoder import DecoderClass

__all__ = ["IMPLEMENTATIONS", "find_implementation"]

_LLAMA = "procengine.models.llama:LlamaModel"

# One implementation serves most: they differ in facts that ModelConfig states.
IMPLEMENTATIONS: dict[str, str] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": _LLAMA,
    "olmo2": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2_moe": _LLAMA,
    "qwen3_moe": _LLAMA,
    "gpt2": "procengine.models.gpt2:Gpt2Model",
}


def find_implementation(architecture: str) -> DecoderClass:
    """The class for an architecture's name; ModelError names those that exist."""
    try:
        module_name, _, class_name = IMPLEMENTATIONS[architecture].partition(":")
    except KeyError:
        known = ", ".join(sorted(IMPLEMENTATIONS))
        raise ModelError(f"no implementation of architecture {architecture!r}; there are: {known}") from None
    implementation: DecoderClass = getattr(importlib.import_module(module_name), class_name)
    return implementation
