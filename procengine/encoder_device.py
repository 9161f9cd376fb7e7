"""`EncoderDevice`: what runs the steps of a bidirectional encoder: the model, and a runner for each workflow in use.

Owns: which of the two ways the model is loaded. Never does: run a step itself, keep a KV pool, or load what only
generation needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.config import EngineConfig
from procengine.encoder_model import EncoderModel, NativeEncoderModel, TorchEncoderModel
from procengine.errors import ConfigError
from procengine.messages import EmbedInput, StepInput
from procengine.models.encoder_weights import EncoderCheckpoint, EncoderHead
from procengine.models.linear_file import LinearFile, read_linear
from procengine.models.weights import open_weights
from procengine.step_output import EmbedOutput
from procengine.workflows import find_workflow, load_part

__all__ = ["EncoderDevice", "open_device"]


class EncoderDevice:
    """Has the model, and loads the parts of a workflow when its first step comes."""

    num_blocks = 0  # there is no KV cache

    def __init__(self, config: EngineConfig, model: EncoderModel, head: EncoderHead | None) -> None:
        self.config = config
        self.model = model
        self.head = head
        hidden_size = config.model.hidden_size
        self.sparse_linear = _read_linear(config.model.sparse_linear, hidden_size, 1)
        self.colbert_linear = _read_linear(config.model.colbert_linear, hidden_size, None)
        self._runners: dict[str, Any] = {}

    @property
    def facts(self) -> dict[str, int | float | str]:
        """For the log."""
        worker = self.config.worker
        return {"device": worker.device, "dtype": worker.dtype, **self.model.facts, "threads": worker.threads}

    def run(self, header: StepInput | EmbedInput, payload: NDArray[np.int32]) -> Iterator[EmbedOutput]:
        """The outputs of a step."""
        runner = self._runners.get(header.workflow) or self._open_runner(header.workflow)
        outputs: Iterator[EmbedOutput] = runner.run(header, payload)
        return outputs

    def forget_slots(self) -> None:
        """There are none."""

    def _open_runner(self, workflow: str) -> Any:
        runner = load_part(find_workflow(workflow).encode)(self)
        self._runners[workflow] = runner
        return runner


def open_device(config: EngineConfig, *, shows_progress: bool) -> EncoderDevice:
    """A device with the model loaded."""
    checkpoint = EncoderCheckpoint(config.model, open_weights(config.model))
    load = _load_native if config.worker.kernels == "native" else _load_torch
    head = None if config.model.head is None else checkpoint.head()
    return EncoderDevice(config, load(config, checkpoint, shows_progress), head)


def _read_linear(path: str, num_inputs: int, num_outputs: int | None) -> LinearFile | None:
    return read_linear(path, num_inputs, num_outputs) if path else None


def _load_native(config: EngineConfig, checkpoint: EncoderCheckpoint, progress: bool) -> EncoderModel:
    from procengine.kernels.native import library
    from procengine.models.packed_encoder import load_packed_encoder

    library.set_num_threads(min(config.worker.threads, 256))
    return NativeEncoderModel(load_packed_encoder(checkpoint, progress=progress), library.best_isa().name.lower())


def _load_torch(config: EngineConfig, checkpoint: EncoderCheckpoint, _progress: bool) -> EncoderModel:
    import torch

    from procengine.models.torch_encoder import TorchEncoder

    worker = config.worker
    if worker.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: cuda was asked for, but torch sees no CUDA device here")
    torch.set_num_threads(worker.threads)
    return TorchEncoderModel(TorchEncoder(checkpoint, getattr(torch, worker.dtype), worker.device))
