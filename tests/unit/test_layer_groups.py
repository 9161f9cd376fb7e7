"""Which layers share a block table: groups of equal size where that is possible, and no more memory than it takes."""

from __future__ import annotations

import pytest

from procengine.config import DecoderConfig, ModelConfig
from procengine.layer_groups import layer_groups, one_group
from tests.model_configs import SMOLLM2, replace


def model(num_layers: int, global_layers: tuple[int, ...] = (), window: int | None = 512) -> ModelConfig:
    decoder = DecoderConfig(global_layers=global_layers)
    return replace(SMOLLM2, num_layers=num_layers, sliding_window=window, decoder=decoder)


def every(num_layers: int, period: int) -> tuple[int, ...]:
    """The layers that see all tokens, of a Gemma 3 of that size."""
    return tuple(range(period - 1, num_layers, period))


@pytest.mark.parametrize(
    ("config", "windows", "layers_per_block"),
    [
        (model(32, window=None), (None,), 32),
        (model(32), (512,), 32),
        (model(18, every(18, 6)), (None, *[512] * 5), 3),  # Gemma 3 270M
        (model(26, every(26, 6)), (None, *[512] * 6), 4),  # 1B: 4 and 22
        (model(34, every(34, 6)), (None, *[512] * 6), 5),  # 4B: 5 and 29
        (model(48, every(48, 6)), (None, *[512] * 5), 8),  # 12B
        (model(62, every(62, 6)), (None, *[512] * 6), 10),  # 27B: 10 and 52
        (model(26, every(26, 2)), (None, 512), 13),  # Gemma 2 2B
        (model(36, (*range(28),)), (None, None, 512), 14),
        (model(32, (31,)), (None, *[512] * 7), 5),  # a group for each layer would be too many
        (model(2, (0, 1)), (None,), 2),
    ],
)
def test_groups_of_known_models(config: ModelConfig, windows: tuple[int | None, ...], layers_per_block: int) -> None:
    groups = layer_groups(config, 8192)
    assert (groups.windows, groups.layers_per_block) == (windows, layers_per_block)
    for layer, group in enumerate(groups.group_of_layer):
        sees_all = config.sliding_window is None or layer in config.decoder.global_layers
        assert (windows[group] is None) == sees_all
    places = list(zip(groups.group_of_layer, groups.place_of_layer, strict=True))
    assert len(set(places)) == config.num_layers, "two layers of a group share a place"
    assert max(groups.place_of_layer) < layers_per_block


def test_a_window_that_no_sequence_leaves_is_none() -> None:
    assert layer_groups(model(32), 513).windows == (512,)
    assert layer_groups(model(32), 512) == one_group(32)
    assert layer_groups(model(18, every(18, 6)), 512) == one_group(18)
