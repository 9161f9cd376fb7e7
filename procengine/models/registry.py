"""Which class implements which architecture.

Owns: the table. Never does: import an implementation before it is asked for, or read files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from procengine.errors import ModelError

if TYPE_CHECKING:
    from procengine.models.llama import LlamaModel

__all__ = ["IMPLEMENTATIONS", "find_implementation"]

# One implementation serves the four: they differ in facts that ModelConfig states.
IMPLEMENTATIONS: dict[str, str] = {
    "llama": "procengine.models.llama:LlamaModel",
    "mistral": "procengine.models.llama:LlamaModel",
    "qwen2": "procengine.models.llama:LlamaModel",
    "qwen3": "procengine.models.llama:LlamaModel",
}


def find_implementation(architecture: str) -> type[LlamaModel]:
    """The class for an architecture's name; ModelError names those that exist."""
    try:
        module_name, _, class_name = IMPLEMENTATIONS[architecture].partition(":")
    except KeyError:
        known = ", ".join(sorted(IMPLEMENTATIONS))
        raise ModelError(f"no implementation of architecture {architecture!r}; there are: {known}") from None
    implementation: type[LlamaModel] = getattr(importlib.import_module(module_name), class_name)
    return implementation
