"""`LoraAdapterConfig`: what the `adapter_config.json` of a PEFT folder says, as far as it is supported here.

Owns: the reading, and the refusal of what would silently be something else than was trained. Never does: read weights.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from procengine.errors import ModelError

__all__ = ["CONFIG_FILE", "LoraAdapterConfig", "read_lora_config"]

CONFIG_FILE: Final = "adapter_config.json"

# Fields that change what an adapter computes and are not supported, with the values that do not.
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (False, {}),
    "kasa_config": ({},),
    "monteclora_config": ({},),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "alpha_pattern": ({},),
    "modules_to_save": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "target_parameters": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
}
# Ways to begin that change the base model's weights: an adapter that was not converted afterwards is of no use without.
_CHANGED_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")


class LoraAdapterConfig(NamedTuple):
    """`rank` is what the file says; a module's own is that of its matrices (`rank_pattern`)."""

    rank: int
    alpha: float
    is_rank_stabilized: bool

    def scaling(self, rank: int) -> float:
        """Of a module of this rank. Rank-stabilised (rsLoRA): Kalajdzievski 2023, arXiv:2312.03732."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_lora_config(folder: Path) -> LoraAdapterConfig:
    """What the folder's file says. Raises ModelError, naming the file and the field."""
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ModelError(f"{folder}: there is no such folder")
    if not path.is_file():
        raise ModelError(f"{folder}: there is no {CONFIG_FILE}: not the folder of a PEFT adapter")
    try:
        fields = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as a JSON object: {error}") from error
    _check(path, fields)
    return LoraAdapterConfig(
        int(_number(path, fields, "r")), _number(path, fields, "lora_alpha"), bool(fields.get("use_rslora"))
    )


def _check(path: Path, fields: dict[str, Any]) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{path}: peft_type: must be LORA, got {kind!r:.40}")
    for name, harmless in _REFUSED.items():
        value = fields.get(name)
        if value is not None and value not in harmless:
            raise ModelError(f"{path}: {name}: is not supported, got {value!r:.80}")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise ModelError(
            f"{path}: init_lora_weights: {start!r:.40} changes the weights of the base model; convert the adapter to a "
            "plain one when it is saved (path_initial_model_for_weight_conversion)"
        )


def _number(path: Path, fields: dict[str, Any], name: str) -> float:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 20:
        raise ModelError(f"{path}: {name}: must be a number more than 0, got {value!r:.40}")
    return float(value)
