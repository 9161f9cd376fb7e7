"""The rope parameters of a Hugging Face config.json, in all the forms they have had: `HuggingFaceRope`.

Owns: the keys, old and new, and transformers' defaults for them. Never does: accept a kind that the engine cannot
run exactly, or compute a frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from procengine.config import RopeScaling
from procengine.hf_families import FAMILIES, Architecture
from procengine.hf_files import HuggingFaceFolder
from procengine.rope_scaling import yarn_mscale

__all__ = ["HuggingFaceRope"]

_KINDS = ("default", "linear", "llama3", "yarn")
_LOCAL_THETA = 10000.0  # of Gemma 3


class HuggingFaceRope:
    """One reading of `config`, the parsed config.json of `folder`."""

    def __init__(self, folder: HuggingFaceFolder, config: Mapping[str, Any], architecture: Architecture) -> None:
        self.folder = folder
        self.config = config
        self.architecture = architecture
        self.family = FAMILIES[architecture]

    def theta(self) -> float:
        own = self.config.get("rope_theta")
        theta = self._parameters().get("rope_theta", self.family.rope_theta if own is None else own)
        return float(theta)

    def local_theta(self) -> float:
        """Of Gemma 3's layers with a window, whose frequencies are never stretched."""
        nested = self._nested().get("sliding_attention") or {}
        if nested.get("rope_type", "default") != "default":
            raise self.folder.error(f"rope type {nested['rope_type']!r} of sliding layers is not supported")
        return float(nested.get("rope_theta", self.config.get("rope_local_base_freq", _LOCAL_THETA)))

    def rotary_dim(self, head_dim: int) -> int:
        """How many dimensions of a head turn."""
        parameters = self._parameters()
        rotated = parameters.get("partial_rotary_factor", self.config.get("partial_rotary_factor"))
        dim = head_dim if rotated is None else int(head_dim * float(rotated))
        if dim != head_dim and self.architecture != "phi3":
            raise self.folder.error(f"partial_rotary_factor {rotated} is not supported; supported: 1.0")
        if dim % 2 or not 0 < dim <= head_dim:
            raise self.folder.error(f"partial_rotary_factor {rotated} of {head_dim} dimensions is not supported")
        return dim

    def scaling(self) -> RopeScaling:
        parameters = self._parameters()
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if self.architecture == "phi3" and kind in ("su", "yarn", "longrope"):  # names that it has had
            return self._long(parameters)
        if kind not in _KINDS:
            raise self.folder.error(f"rope type {kind!r} is not supported; supported: {', '.join(_KINDS)}")
        if kind == "default":
            return RopeScaling()
        return self._scaled(kind, parameters)

    def _long(self, parameters: dict[str, Any]) -> RopeScaling:
        longest = int(self.config.get("max_position_embeddings", self.family.max_position_embeddings))
        trained = int(self.config.get("original_max_position_embeddings", 4096))
        factor = float(parameters.get("factor") or longest / trained)
        stated = parameters.get("attention_factor")
        implied = 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(trained))
        return RopeScaling(
            kind="longrope",
            original_max_position_embeddings=trained,
            attention_factor=implied if stated is None else float(stated),
            short_factors=tuple(map(float, parameters["short_factor"])),
            long_factors=tuple(map(float, parameters["long_factor"])),
        )

    def _scaled(self, kind: Literal["linear", "llama3", "yarn"], parameters: dict[str, Any]) -> RopeScaling:
        trained = int(self.config.get("max_position_embeddings", self.family.max_position_embeddings))
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
        nested = self._nested()
        flat = {} if nested else self.config.get("rope_parameters")
        parameters = nested.get("full_attention") or self.config.get("rope_scaling") or flat or {}
        if not isinstance(parameters, dict) or any(isinstance(value, dict) for value in parameters.values()):
            raise self.folder.error(f"config.json: rope parameters by layer type are not supported: {parameters!r}")
        return parameters

    def _nested(self) -> dict[str, dict[str, Any]]:
        """Gemma 3's parameters by the kind of layer; it had flat ones before, for the layers without a window."""
        parameters = self.config.get("rope_parameters")
        if self.architecture != "gemma3" or not isinstance(parameters, dict):
            return {}
        return {kind: own for kind, own in parameters.items() if isinstance(own, dict)}


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float | None:
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if not (mscale and mscale_all_dim):
        return None
    return yarn_mscale(factor, float(mscale)) / yarn_mscale(factor, float(mscale_all_dim))
