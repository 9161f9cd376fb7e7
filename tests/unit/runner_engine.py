"""A pipeline and a runner with a real scheduler, in one thread: what a worker and a frontend do together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from procengine.config import KVCacheDType, ModelConfig
from procengine.executor import Model
from procengine.kv_tensors import KVTensors
from procengine.layer_groups import layer_groups
from procengine.messages import StepInput, StepResult
from procengine.pipeline import Pipeline
from procengine.request import Request, RowSampling
from procengine.runner import GenerateRunner
from procengine.step_output import WorkerIdentity
from procengine.step_payload import RESULT_SECTIONS, cut_sections, iter_rounds, join_int64
from procengine.workflows.generate import GeneratePlanner
from tests.unit.simulated_worker import limits

__all__ = ["MAX_MODEL_LEN", "PROMPTS", "VOCAB", "Engine", "TinyModel"]

VOCAB = 97
MAX_MODEL_LEN = 128
PROMPTS = [[(7 * i * i + 3 * i + row) % VOCAB for i in range(length)] for row, length in enumerate((5, 23, 40, 9))]


class TinyModel(NamedTuple):
    config: ModelConfig
    loaded: Model[Any]


class Engine:
    """A pipeline and a runner, and what came out of it by request key."""

    def __init__(
        self,
        model: TinyModel,
        *,
        depth: int = 2,
        processors: Sequence[Any] = (),
        kv_dtype: KVCacheDType = "float32",
        **changes: Any,
    ) -> None:
        max_model_len = changes.get("max_model_len", MAX_MODEL_LEN)
        groups = layer_groups(model.config, max_model_len)
        sizes = {"block_size": 4, "max_model_len": max_model_len, "num_blocks": 128, "windows": groups.windows}
        own = limits(**{**sizes, **changes})
        self.planner = GeneratePlanner(own)
        self.pipeline = Pipeline(0, lambda: {"generate": self.planner}, depth)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[tuple[list[int], list[float], list[int]]]] = {}
        self.prompt: dict[int, dict[int, tuple[list[int], list[float], list[int]]]] = {}
        arrays = model.loaded.arrays
        cache = KVTensors(model.config, own.num_blocks, own.block_size, kv_dtype, arrays, groups)
        self.runner: GenerateRunner[Any] = GenerateRunner(
            model.loaded.open(cache),
            arrays,
            block_size=own.block_size,
            vocab_size=VOCAB,
            max_num_seqs=own.max_num_seqs,
            max_model_len=own.max_model_len,
            depth=depth,
            num_groups=groups.num_groups,
            processors=processors,
        )

    def add(self, prompt: list[int], max_tokens: int, sampling: RowSampling | None = None, **fields: Any) -> Request:
        sampling = sampling or RowSampling(0)
        key = len(self.tokens)
        array = np.array(prompt, np.int32)
        request = Request(key, b"", str(key), array, len(prompt) + max_tokens, sampling, **fields)
        self.tokens[key], self.logprobs[key], self.prompt[key] = [], [], {}
        self.planner.add(request)
        return request

    def run(self) -> Engine:
        results: deque[tuple[StepResult, Any]] = deque()
        while True:
            while (step := self.pipeline.next_step()) is not None:
                assert isinstance(step.header, StepInput)
                for output in self.runner.run(step.header, step.payload.copy()):
                    results.append(output.to_message(WorkerIdentity(0, 0), output.wait()))
            if not results:
                break
            header, payload = results.popleft()
            self._take(header, payload)
            self.pipeline.apply(header, payload)
        assert self.planner.num_unfinished == 0
        return self

    def _take(self, header: StepResult, payload: Any) -> None:
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"])
        for rows, _ in iter_rounds(keys):
            for row in rows.tolist():
                self.tokens[int(keys[row])].append(int(sections["token_ids"][row]))
        for at, row in enumerate(sections["logprob_rows"].tolist()):
            self.logprobs[int(keys[row])].append(_entry(sections, "logprob_token_ids", "logprobs", "logprob_ranks", at))
        at = 0
        for low, high, first, count in sections["prompt_spans"].reshape(-1, 4).tolist():
            key = int(join_int64(np.array([low, high], np.int32))[0])
            for position in range(first, first + count):
                names = ("prompt_logprob_token_ids", "prompt_logprobs", "prompt_logprob_ranks")
                self.prompt[key][position] = _entry(sections, *names, at, int(sections["prompt_spans"][3::4].sum()))
                at += 1


def _entry(
    sections: dict[str, Any], ids: str, values: str, ranks: str, at: int, count: int | None = None
) -> tuple[list[int], list[float], list[int]]:
    count = sections["logprob_rows"].size if count is None else count
    return (
        sections[ids].reshape(count, -1)[at].tolist(),
        sections[values].view(np.float32).reshape(count, -1)[at].tolist(),
        sections[ranks].reshape(count, -1)[at].tolist(),
    )
