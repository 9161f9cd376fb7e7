"""`LayerGroups`: layers that need the same keys and values share a block table; groups share one pool of blocks.

Owns: which layers form a group. Never does: know a block, or a request.

A block holds the keys and values of one group's layers, for some consecutive tokens. All groups have (nearly) equally
many layers, so that any of them can take any block: what a sliding window lets go of is memory for whoever needs it.
(The idea is Jenga's, arXiv:2503.18292; vLLM has it as its hybrid KV cache manager.)
"""

from __future__ import annotations

from dataclasses import dataclass

from procengine.config import ModelConfig

__all__ = ["LayerGroups", "layer_groups", "one_group"]

_MAX_GROUPS = 8  # a new block is one entry in each group's table


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Attributes:
    windows: tokens that the layers of each group see, a query's own included; None is all.
    group_of_layer, place_of_layer: of each layer, its group, and where it is among the layers of that.
    """

    windows: tuple[int | None, ...]
    group_of_layer: tuple[int, ...]
    place_of_layer: tuple[int, ...]

    @property
    def num_groups(self) -> int:
        """Block tables that a request has."""
        return len(self.windows)

    @property
    def layers_per_block(self) -> int:
        """Layers whose keys and values a block has room for."""
        return max(self.place_of_layer) + 1


def one_group(num_layers: int, window: int | None = None) -> LayerGroups:
    """All layers need the same."""
    return LayerGroups((window,), (0,) * num_layers, tuple(range(num_layers)))


def layer_groups(config: ModelConfig, max_model_len: int) -> LayerGroups:
    """The groups of a model that serves sequences of up to `max_model_len` tokens, those that see all tokens first. A
    window that no such sequence leaves is none.
    """
    window, num_layers = config.sliding_window, config.num_layers
    if window is None or window >= max_model_len:
        return one_group(num_layers)
    whole = [layer for layer in range(num_layers) if layer in config.decoder.global_layers]
    sliding = [layer for layer in range(num_layers) if layer not in config.decoder.global_layers]
    if not whole or not sliding:
        return one_group(num_layers, None if whole else window)
    size = _group_size(len(whole), len(sliding))
    num_whole = -(-len(whole) // size)
    group_of, place_of = [0] * num_layers, [0] * num_layers
    for first_group, layers in ((0, whole), (num_whole, sliding)):
        for at, layer in enumerate(layers):
            group_of[layer], place_of[layer] = first_group + at // size, at % size
    num_sliding = -(-len(sliding) // size)
    return LayerGroups((None,) * num_whole + (window,) * num_sliding, tuple(group_of), tuple(place_of))


def _group_size(num_whole: int, num_sliding: int) -> int:
    """Layers of a group: as many as waste the least memory of long sequences, then of all.

    The last group of a kind may have fewer layers than there is room for in its blocks.
    """

    def cost(size: int) -> tuple[int, int, int]:
        whole_groups, sliding_groups = -(-num_whole // size), -(-num_sliding // size)
        num_groups = whole_groups + sliding_groups
        return whole_groups * size, num_groups * size, num_groups

    sizes = range(1, max(num_whole, num_sliding) + 1)
    return min((size for size in sizes if cost(size)[2] <= _MAX_GROUPS), key=cost)
