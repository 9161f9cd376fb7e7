"""Which layers of a Hugging Face model look at all tokens and which at a window: `HuggingFaceLayers`.

Owns: the keys, and each family's rule where there are none. Never does: attend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from procengine.hf_families import Architecture
from procengine.hf_files import HuggingFaceFolder

__all__ = ["HuggingFaceLayers"]

_DEFAULT_WINDOW: dict[Architecture, int | None] = {"mixtral": None, "phi3": None, "smollm3": None}
_WINDOW = 4096  # of the other families
_SLIDING, _FULL = "sliding_attention", "full_attention"
_NEVER: tuple[Architecture, ...] = ("llama", "olmo2", "granite", "gpt2", "transformers")
_ALWAYS: tuple[Architecture, ...] = ("mistral", "mixtral", "phi3")  # in all layers, if there is a window
_IF_USED: tuple[Architecture, ...] = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "smollm3")  # use_sliding_window


class HuggingFaceLayers:
    """One reading of `config`, the parsed config.json of `folder`."""

    def __init__(
        self, folder: HuggingFaceFolder, config: Mapping[str, Any], architecture: Architecture, num_layers: int
    ) -> None:
        self.folder = folder
        self.config = config
        self.architecture = architecture
        self.num_layers = num_layers

    def plain_layers(self) -> tuple[int, ...]:
        """Those without rotary positions."""
        if self.architecture != "smollm3":
            return ()
        flags = self.config.get("no_rope_layers")  # 1 where there are some, whatever the name says
        if flags is None:
            interval = int(self.config.get("no_rope_layer_interval", 4))
            flags = [(layer + 1) % interval != 0 for layer in range(self.num_layers)]
        return tuple(layer for layer in range(self.num_layers) if not flags[layer])

    def window(self) -> int | None:
        """Tokens that layers with a window see; None if there is no such layer."""
        window: int | None = self.config.get("sliding_window", _DEFAULT_WINDOW.get(self.architecture, _WINDOW))
        return window if len(self.global_layers()) < self.num_layers else None

    def global_layers(self) -> tuple[int, ...]:
        """Those that see all tokens, of a model that has others too; all, if none has a window."""
        if not self._has_window():
            return tuple(range(self.num_layers))
        kinds = self.config.get("layer_types")
        if self.architecture in _ALWAYS or (self.architecture == "qwen3_moe"):
            kinds = [_SLIDING] * self.num_layers
        elif kinds is None:
            kinds = [_SLIDING if self._slides(layer) else _FULL for layer in range(self.num_layers)]
        unknown = set(kinds) - {_SLIDING, _FULL}
        if unknown or len(kinds) < self.num_layers:
            raise self.folder.error(f"config.json: layer_types {kinds!r} are not supported")
        return tuple(layer for layer in range(self.num_layers) if kinds[layer] == _FULL)

    def _has_window(self) -> bool:
        if self.architecture in _NEVER:
            return False
        if self.architecture in _IF_USED and not self.config.get("use_sliding_window", False):
            return False
        return self.config.get("sliding_window", _DEFAULT_WINDOW.get(self.architecture, _WINDOW)) is not None

    def _slides(self, layer: int) -> bool:
        match self.architecture:
            case "gemma2":
                return layer % 2 == 0
            case "gemma3":
                return (layer + 1) % int(self.config.get("sliding_window_pattern", 6)) != 0
            case "smollm3":
                return layer in self.plain_layers()
            case "qwen2_moe":
                return layer % 2 == 0 and layer < int(self.config.get("max_window_layers", 28))
            case _:
                return layer >= int(self.config.get("max_window_layers", 28))
