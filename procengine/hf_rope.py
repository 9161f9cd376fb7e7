"""The rope parameters of a Hugging Face config.json, in all the forms they have had: `HuggingFaceRope`.

Owns: the keys, old and new, and transformers' defaults for them. Never does: accept a kind that the engine cannot
run exactly, or compute a frequency.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from procengine.config import RopeScaling
from procengine.hf_files import HuggingFaceFolder
from procengine.rope_scaling import yarn_mscale

__all__ = ["HuggingFaceRope"]

_KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0


class HuggingFaceRope:
    """One reading of `config`, the parsed config.json of `folder`."""

    def __init__(self, folder: HuggingFaceFolder, config: Mapping[str, Any], max_position_embeddings: int) -> None:
        self.folder = folder
        self.config = config
        self.max_position_embeddings = max_position_embeddings  # where config has none

    def theta(self) -> float:
        own = self.config.get("rope_theta")
        theta = self._parameters().get("rope_theta", _DEFAULT_THETA if own is None else own)
        return float(theta)

    def scaling(self) -> RopeScaling:
        parameters = self._parameters()
        rotated = parameters.get("partial_rotary_factor", self.config.get("partial_rotary_factor", 1.0))
        if rotated not in (None, 1.0):
            raise self.folder.error(f"partial_rotary_factor {rotated} is not supported; supported: 1.0")
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in _KINDS:
            raise self.folder.error(f"rope type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
        if kind == "default":
            return RopeScaling()
        return self._scaled(kind, parameters)

    def _scaled(self, kind: Literal["linear", "llama3", "yarn"], parameters: dict[str, Any]) -> RopeScaling:
        trained = int(self.config.get("max_position_embeddings", self.max_position_embeddings))
        if kind != "linear":
            trained = self.config.get("original_max_position_embeddings") or int(
                parameters.get("original_max_position_embeddings") or trained
            )
        factor = parameters.get("factor")
        if factor is None and kind == "yarn":
            factor = int(self.config.get("max_position_embeddings", trained)) / trained
        if factor is None:
            raise self.folder.error(f"rope type {kind!r} has no factor")
        return RopeScaling(
            kind=kind,
            factor=float(factor),
            original_max_position_embeddings=int(trained),
            low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
            high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
            beta_fast=float(parameters.get("beta_fast") or 32.0),
            beta_slow=float(parameters.get("beta_slow") or 1.0),
            attention_factor=_yarn_attention_factor(parameters, float(factor)) if kind == "yarn" else None,
            truncate=bool(parameters.get("truncate", True)),
        )

    def _parameters(self) -> dict[str, Any]:
        # transformers 5 writes rope_parameters; before that, rope_scaling (null for none) with rope_theta beside it.
        parameters = self.config.get("rope_scaling") or self.config.get("rope_parameters") or {}
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise self.folder.error(f"config.json: rope parameters by layer type are not supported: {parameters!r}")
        return parameters


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float | None:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (mscale and mscale_all_dim):
        return None
    return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(mscale_all_dim))
