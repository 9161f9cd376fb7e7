"""Weights of 8 or 4 bits as tensors, for models in torch.

Owns: their layout, the rounding into it and the way back. Never does: multiply; `reference` and `triton` do.

Integers stand for w = scale * q (+ min), with fp16 scales (and mins) for each output and 32 consecutive inputs, rounded
as `kernels/native/pack.cpp` does: a model's weights are the same numbers on a CPU and on a GPU. fp8 (e4m3) has one
float32 scale an output. Groups come first in memory, [K/32, N, ...]: what neighbouring programs of a kernel read at one
time lies together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from procengine.errors import ConfigError

__all__ = ["GROUP", "QuantizedMatrix", "WeightKind", "quantize"]

WeightKind = Literal["int8", "int4", "fp8"]
GROUP = 32  # inputs
_FP8 = torch.float8_e4m3fn
_FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """W [N, K].

    Attributes:
        values: int8 [K/32, N, 32]; fp8: float8_e4m3fn of that shape; int4: uint8 [K/32, N, 16], of a group's inputs
            the first 16 in the low four bits, the others in the high ones.
        scales: float16 [K/32, N]; fp8: float32 [N].
        mins: float16 [K/32, N] with int4, else None.
    """

    kind: WeightKind
    values: Tensor
    scales: Tensor
    mins: Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K), as a matrix of floats has it."""
        return self.values.shape[1], self.values.shape[0] * GROUP

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.values.device

    @property
    def num_bytes(self) -> int:
        """What a product reads."""
        return sum(part.nbytes for part in (self.values, self.scales, self.mins) if part is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[N, K], rounded to `dtype`."""
        if self.kind == "int4":
            low, high = self.values & 15, self.values >> 4
            wide = torch.cat((low, high), dim=2).float()
        else:
            wide = self.values.float()
        wide *= self.scales.float().unsqueeze(-1)
        if self.mins is not None:
            wide += self.mins.float().unsqueeze(-1)
        return wide.permute(1, 0, 2).reshape(self.shape).to(dtype)


def quantize(weight: Tensor, kind: WeightKind) -> QuantizedMatrix:
    """Round `weight`, floats [N, K], K a multiple of 32.

    Raises ConfigError for another K.
    """
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ConfigError(f"a matrix of {kind} weights must be [N, multiple of {GROUP}], not {list(weight.shape)}")
    groups = weight.float().view(weight.shape[0], -1, GROUP).transpose(0, 1)  # [K/32, N, 32]
    match kind:
        case "int8":
            return _quantize_int8(groups)
        case "int4":
            return _quantize_int4(groups)
        case "fp8":
            return _quantize_fp8(groups)


def _quantize_int8(groups: Tensor) -> QuantizedMatrix:
    scales = _rounded_up(groups.abs().amax(2) / 127)
    values = (groups * _inverse(scales)).clamp_(-127, 127).round_()
    return QuantizedMatrix("int8", values.to(torch.int8).contiguous(), scales, None)


def _quantize_int4(groups: Tensor) -> QuantizedMatrix:
    mins = groups.amin(2).half()
    scales = _rounded_up((groups.amax(2) - mins.float()) / 15)
    values = ((groups - mins.float().unsqueeze(2)) * _inverse(scales)).clamp_(0, 15).round_().to(torch.uint8)
    packed = values[:, :, : GROUP // 2] | values[:, :, GROUP // 2 :] << 4
    return QuantizedMatrix("int4", packed.contiguous(), scales, mins)


def _quantize_fp8(groups: Tensor) -> QuantizedMatrix:
    scales = (groups.abs().amax((0, 2)) / _FP8_MAX).clamp_min_(torch.finfo(torch.float32).tiny)
    values = (groups / scales[:, None]).clamp_(-_FP8_MAX, _FP8_MAX).to(_FP8)
    return QuantizedMatrix("fp8", values.contiguous(), scales, None)


def _rounded_up(scales: Tensor) -> Tensor:
    """float16, the next larger one where a value is between two: the largest weight still fits."""
    rounded = scales.half()
    return (rounded.view(torch.int16) + (rounded.float() < scales)).view(torch.float16)


def _inverse(scales: Tensor) -> Tensor:
    """float32 [..., 1]; 0 of 0."""
    wide = scales.float().unsqueeze(-1)
    return torch.where(wide > 0, 1 / wide, 0)
