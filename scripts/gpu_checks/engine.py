"""The engine in one thread: scheduler, input builder and runner, as frontend and worker have them, without sockets.

Owns: the loop. Never does: measure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from procengine.config import ModelConfig
from procengine.executor import Model
from procengine.kv_tensors import KVTensors
from procengine.messages import StepInput
from procengine.pipeline import Pipeline
from procengine.request import Request, RowSampling
from procengine.runner import GenerateRunner
from procengine.scheduler.limits import SchedulerLimits
from procengine.step_output import StepOutput, WorkerIdentity
from procengine.step_payload import RESULT_SECTIONS, cut_sections, iter_rounds, join_int64
from procengine.workflows.generate import GeneratePlanner

__all__ = ["Engine"]


class Engine:
    """Requests in, tokens out. At depth 2 the host plans and issues a step while the device runs the one before."""

    def __init__(
        self, config: ModelConfig, model: Model[Any], limits: SchedulerLimits, *, depth: int, kv_dtype: Any
    ) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.num_passes = 0  # whose tokens are back
        self._planner = GeneratePlanner(limits)
        self._pipeline = Pipeline(0, lambda: {"generate": self._planner}, depth)
        self._outputs: deque[StepOutput] = deque()
        self._identity = WorkerIdentity(0, 0)
        cache = KVTensors(config, limits.num_blocks, limits.block_size, kv_dtype, model.arrays)
        self._runner: GenerateRunner[Any] = GenerateRunner(
            model.open(cache),
            model.arrays,
            block_size=limits.block_size,
            vocab_size=config.vocab_size,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=limits.max_model_len,
            depth=depth,
        )

    def add(self, prompt: Sequence[int], max_tokens: int) -> int:
        """Queue a greedy request; its key in `tokens`."""
        key = len(self.tokens)
        self.tokens[key] = []
        array = np.array(prompt, np.int32)
        self._planner.add(Request(key, b"", str(key), array, len(prompt) + max_tokens, RowSampling(0)))
        return key

    @property
    def num_decoding(self) -> int:
        """Requests that have their first token and run on."""
        return self._planner.gauges.num_running if all(self.tokens.values()) else 0

    def advance(self, *, may_wait: bool = True) -> bool:
        """Send what may be sent, and take in the oldest result. False when there is nothing left to do.

        Raises RuntimeError with `may_wait` off, where running a step waits for the GPU.
        """
        while (step := self._pipeline.next_step()) is not None:
            assert isinstance(step.header, StepInput)
            if not may_wait:
                torch.cuda.set_sync_debug_mode("error")
            try:
                self._outputs.extend(self._runner.run(step.header, step.payload))
            finally:
                if not may_wait:
                    torch.cuda.set_sync_debug_mode("default")
        if not self._outputs:
            return False
        output = self._outputs.popleft()
        header, payload = output.to_message(self._identity, output.wait())
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"])
        for rows, _ in iter_rounds(keys):
            for key, token in zip(keys[rows].tolist(), sections["token_ids"][rows].tolist(), strict=True):
                self.tokens[key].append(token)
        self._pipeline.apply(header, payload)
        self.num_passes += 1
        return True

    def run(self) -> dict[int, list[int]]:
        """To the end of all requests."""
        while self.advance():
            pass
        assert self._planner.num_unfinished == 0
        return self.tokens
