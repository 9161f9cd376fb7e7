"""`DecodeRun`: a batch that decodes, timed and traced.

Owns: the requests, and which passes count. Never does: choose batches or judge figures.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from gpu_checks.engine import Engine
from gpu_checks.machine import Machine
from gpu_checks.models import BLOCK_SIZE
from gpu_checks.timeline import Interval, Timeline, timeline

from procengine.config import KVCacheDType, ModelConfig
from procengine.models.decoder import Decoder
from procengine.scheduler.limits import SchedulerLimits
from procengine.torch_executor import TorchModel

__all__ = ["DecodeFigures", "DecodeRun"]


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Of passes in which each request decodes one token.

    Attributes:
        pass_us: wall time, without a trace.
        context: mean tokens of a request meanwhile.
        trace: None on a machine that cannot be traced.
    """

    pass_us: float
    batch: int
    context: float
    trace: Timeline | None

    @property
    def tokens_per_s(self) -> float:
        """Of all requests together."""
        return self.batch / self.pass_us * 1e6


class DecodeRun:
    """Batches of one model."""

    def __init__(self, machine: Machine, config: ModelConfig, model: Decoder) -> None:
        self._machine, self._config, self._model = machine, config, model
        self._kv_dtype = str(model.dtype).removeprefix("torch.")
        self._prompt_len = 64 if machine.is_cuda else 5
        self._warm, self._timed = (16, 48) if machine.is_cuda else (3, 4)

    def measure(
        self,
        batch: int,
        depth: int,
        decode_steps: int,
        *,
        with_graphs: bool = True,
        kv_dtype: KVCacheDType | None = None,
    ) -> DecodeFigures:
        """Prompts first, then some passes for the window in flight, then those that count: once by the clock, once
        traced. `kv_dtype`: by default the model's."""
        # Whole messages of several passes: a window must not begin within one.
        warm, timed = (-(-count // decode_steps) * decode_steps for count in (self._warm, self._timed))
        graph_sizes = (batch,) if with_graphs else ()
        engine = self._open(batch, depth, decode_steps, 3 * (warm + timed), graph_sizes, kv_dtype)
        while engine.num_decoding < batch:
            engine.advance()
        self._pass(engine, warm)
        begin = time.perf_counter()
        self._pass(engine, timed)
        pass_us = (time.perf_counter() - begin) / timed * 1e6
        context = self._prompt_len + warm + timed / 2
        try:
            trace = self._traced(engine, timed) if self._machine.is_cuda else None
        except RuntimeError as error:  # there may be no tracing here; the clock's figures stand
            print(f"no trace: {error}")
            trace = None
        engine.run()
        return DecodeFigures(pass_us, batch, context, trace)

    def _pass(self, engine: Engine, count: int) -> None:
        for _ in range(count):
            engine.advance()

    def _traced(self, engine: Engine, count: int) -> Timeline | None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self._pass(engine, count)
        found = [
            Interval(event.time_range.start, event.time_range.end, event.name)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA"
        ]
        copied = sum("DtoH" in one.name for one in found)  # one a pass: those at the ends may be in or out
        return timeline(found, copied or count) if found else None

    def waits_for_device(self, batch: int) -> str | None:
        """What in the steady loop waits for the device; None: nothing does. Of a GPU."""
        engine = self._open(batch, 2, 1, 3 * self._warm, (batch,))
        while engine.num_decoding < batch:
            engine.advance()
        self._pass(engine, self._warm)
        try:
            engine.advance(may_wait=False)
        except RuntimeError as error:
            return str(error)
        engine.run()
        return None

    def _open(
        self,
        batch: int,
        depth: int,
        decode_steps: int,
        max_tokens: int,
        graph_sizes: tuple[int, ...],
        kv_dtype: KVCacheDType | None = None,
    ) -> Engine:
        length = self._prompt_len + max_tokens
        limits = SchedulerLimits(
            max_num_seqs=batch,
            max_num_batched_tokens=max(2048, batch),
            max_model_len=length,
            block_size=BLOCK_SIZE,
            num_blocks=batch * -(-length // BLOCK_SIZE),
            enable_prefix_caching=False,
            decode_steps=decode_steps,
        )
        model = TorchModel(self._model, graph_sizes)
        engine = Engine(self._config, model, limits, depth=depth, kv_dtype=kv_dtype or self._kv_dtype)
        prompts = np.random.default_rng(3).integers(0, self._config.vocab_size, (batch, self._prompt_len))
        for prompt in prompts.tolist():
            engine.add(prompt, max_tokens)
        return engine
