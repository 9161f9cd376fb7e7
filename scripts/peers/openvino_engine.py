"""OpenVINO GenAI, continuous batching: `openvino_engine.py MODEL_FOLDER int8|bf16`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as og
from engine_loop import at_once, by_steps, serve


class Engine:
    """Scheduler settings that did best on two cores with small models: few tokens a step, at most 32 requests."""

    def __init__(self, folder: str, precision: str) -> None:
        scheduler = og.SchedulerConfig()
        scheduler.cache_size = 4  # GB, taken as it is needed
        scheduler.enable_prefix_caching = True
        scheduler.max_num_seqs = 32
        scheduler.max_num_batched_tokens = 256
        scheduler.dynamic_split_fuse = True
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": len(os.sched_getaffinity(0))}
        if precision == "bf16":
            properties["INFERENCE_PRECISION_HINT"] = "bf16"
        self._pipeline = og.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)
        self._handles: dict[int, Any] = {}
        self._next_id = 0

    def generate(self, prompts: list[list[int]], output_len: int) -> None:
        """All of them, as fast as it can."""
        results = self._pipeline.generate([_tensor(p) for p in prompts], [_exactly(output_len)] * len(prompts))
        assert len(results) == len(prompts)

    def add(self, number: int, prompt: list[int], output_len: int) -> None:
        """Queue a request."""
        self._handles[number] = self._pipeline.add_request(self._next_id, _tensor(prompt), _exactly(output_len))
        self._next_id += 1  # ids must not come again while the pipeline lives

    def step(self) -> Iterator[tuple[int, int]]:
        """One step of the batch."""
        self._pipeline.step()
        for number, handle in list(self._handles.items()):
            if handle.can_read():
                yield number, sum(len(output.generated_ids) for output in handle.read().values())
            elif handle.get_status() == og.GenerationStatus.FINISHED:
                del self._handles[number]


def _tensor(prompt: list[int]) -> ov.Tensor:
    return ov.Tensor(np.array([prompt], np.int64))


def _exactly(output_len: int) -> og.GenerationConfig:
    config = og.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = output_len
    config.ignore_eos = True
    config.do_sample = False
    return config


def load() -> tuple[str, str, Any]:
    """For `serve`."""
    folder, precision = sys.argv[1:]
    engine = Engine(folder, precision)

    def run(load: dict[str, Any]) -> list[dict[str, Any]]:
        return by_steps(load, engine) if load["is_streaming"] else at_once(load, engine.generate)

    return og.__version__, precision, run


if __name__ == "__main__":
    serve(load)
