"""`EmbedRunner`: sequences to vectors on the device: forward over packed sequences, pool, normalise.

Owns: pooling. Never does: keep anything from step to step: there is no KV cache here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray
from torch import Tensor

from procengine.executor import Model
from procengine.messages import EmbedInput
from procengine.step_output import EmbedOutput, PassTimes
from procengine.step_payload import EMBED_SECTIONS, cut_sections, join_int64

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["EmbedRunner", "open_runner"]


class EmbedRunner:
    """Vectors have the model's hidden size and length 1."""

    def __init__(self, model: Model, pooling: Literal["last", "mean"], device: torch.device) -> None:
        self._model = model
        self._pooling = pooling
        self._device = device

    @torch.inference_mode()
    def run(self, header: EmbedInput, payload: NDArray[np.int32]) -> Iterator[EmbedOutput]:
        """The one output of a step. `payload` is int32 [n] and not kept."""
        started_ns = time.monotonic_ns()
        sections = cut_sections(EMBED_SECTIONS, header.sizes, payload.copy())
        tensors = {name: torch.from_numpy(section).to(self._device) for name, section in sections.items()}
        staged_ns = time.monotonic_ns()
        bounds = tensors["query_start_loc"]
        hidden = self._model.encode(tensors["input_ids"], tensors["positions"].long(), bounds, header.max_query_len)
        forwarded_ns = time.monotonic_ns()
        vectors = functional.normalize(self._pool(hidden.float(), bounds.long()), dim=-1)
        keys = join_int64(sections["key_words"])
        times = PassTimes(started_ns, staged_ns, forwarded_ns, time.monotonic_ns())
        yield EmbedOutput(header.step_id, keys, lambda: vectors.cpu().numpy(), times)

    def _pool(self, hidden: Tensor, bounds: Tensor) -> Tensor:
        """float32 [rows, hidden] from [tokens, hidden]."""
        if self._pooling == "last":
            return hidden[bounds[1:] - 1]
        lengths = bounds.diff()
        rows = torch.repeat_interleave(torch.arange(lengths.numel(), device=hidden.device), lengths)
        sums = hidden.new_zeros((lengths.numel(), hidden.shape[1])).index_add_(0, rows, hidden)
        return sums / lengths.unsqueeze(1)


def open_runner(device: Device) -> EmbedRunner:
    """The runner of `embed` steps on `device`."""
    return EmbedRunner(device.model, device.config.model.pooling, device.torch_device)
