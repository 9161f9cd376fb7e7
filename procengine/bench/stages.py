"""One step's life without a model and without sockets: each stage of the product's own code, timed on its own.

Owns: the order of the stages and their clock. Never does: move bytes between processes (`hop`).

A pipeline of decode rows runs step by step: schedule, build, encode, decode, [the mock device], encode, decode, apply,
text, encode, decode. Each step gives one sample of each stage, so block borders and whatever else comes now and then
are in the percentiles, and the caches are as cold for a stage as the other stages make them.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from procengine.input_builder import InputBuilder
from procengine.messages import (
    Outputs,
    Register,
    StepInput,
    StepResult,
    decode_from_worker,
    decode_step,
    decode_to_client,
    encode,
)
from procengine.mock_runner import MockRunner
from procengine.request import Request, RowSampling
from procengine.scheduler.limits import SchedulerLimits
from procengine.scheduler.plan import StepPlan
from procengine.scheduler.scheduler import Scheduler
from procengine.step_output import StepOutput, WorkerIdentity
from procengine.step_payload import RESULT_SECTIONS, cut_sections, join_int64
from procengine.text_outputs import TextOutputs
from procengine.tokenizer import Tokenizer

__all__ = ["STAGES", "StageTimes", "time_stages", "tiny_tokenizer"]

# Name -> process and what it does there.
STAGES: Final = {
    "schedule": "frontend: decide what the step computes",
    "build": "frontend: lay it into one int32 frame",
    "encode_step": "frontend: its header as MessagePack",
    "decode_step": "worker: read header and frame",
    "encode_result": "worker: tokens as header and frame",
    "decode_result": "frontend, output: read header and frame",
    "apply": "frontend: append tokens, find who ends",
    "output_apply": "output: match tokens with requests",
    "detokenize": "output: text and deltas",
    "encode_outputs": "output: one message to the client",
    "decode_outputs": "client: read it",
}
_BLOCK_SIZE: Final = 16
_NUM_WARMUP_STEPS: Final = 8
_CLIENT: Final = b"client"


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Of one batch size.

    Attributes:
        samples_ns: int64 [steps] by stage.
        step_frames: header and payload of a step of decode rows, as bytes.
        result_frames: those of its result.
    """

    samples_ns: dict[str, NDArray[np.int64]]
    step_frames: tuple[bytes, bytes]
    result_frames: tuple[bytes, bytes]


def tiny_tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 256 tokens, one a byte: for those who have no model at hand."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: at for at, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def time_stages(batch_size: int, num_steps: int, input_len: int, tokenizer: Tokenizer) -> StageTimes:
    """Run `num_steps` decode steps of `batch_size` rows, whose prompts have `input_len` tokens."""
    loop = _StepLoop(batch_size, input_len, input_len + num_steps + _NUM_WARMUP_STEPS + 2, tokenizer)
    loop.prefill()
    for _ in range(_NUM_WARMUP_STEPS):
        loop.step()
    loop.forget_samples()
    gc.collect()
    gc.freeze()  # as the processes of a group do when they are ready
    try:
        for _ in range(num_steps):
            loop.step()
    finally:
        gc.unfreeze()
    return loop.times()


class _Laps:
    """A stop watch for stages that follow each other."""

    def __init__(self) -> None:
        self.samples_ns: dict[str, list[int]] = {stage: [] for stage in STAGES}
        self._last_ns = 0

    def start(self) -> None:
        self._last_ns = time.perf_counter_ns()

    def lap(self, stage: str) -> None:
        now_ns = time.perf_counter_ns()
        self.samples_ns[stage].append(now_ns - self._last_ns)
        self._last_ns = time.perf_counter_ns()


class _StepLoop:
    """The pure parts of frontend, worker and output process around a mock device, at depth 1."""

    def __init__(self, batch_size: int, input_len: int, max_model_len: int, tokenizer: Tokenizer) -> None:
        self._batch_size = batch_size
        limits = SchedulerLimits(
            max_num_seqs=batch_size,
            max_num_batched_tokens=batch_size * input_len,
            max_model_len=max_model_len,
            block_size=_BLOCK_SIZE,
            num_blocks=batch_size * -(-max_model_len // _BLOCK_SIZE),
        )
        self._scheduler = Scheduler(limits)
        self._builder = InputBuilder(limits.max_num_seqs, limits.max_num_batched_tokens)
        vocab_size = max(tokenizer.vocab_size, 128)  # the mock's tokens begin at 64
        self._device = MockRunner(vocab_size, batch_size, max_model_len, _BLOCK_SIZE, 0.0)
        self._outputs = TextOutputs(tokenizer)
        self._laps = _Laps()
        self._step_id = 0
        self._step_frames = self._result_frames = (b"", b"")
        self._add_requests(input_len, max_model_len, vocab_size)

    def prefill(self) -> None:
        """Until all rows decode."""
        while self.step().decode_slots.size < self._batch_size:
            pass

    def forget_samples(self) -> None:
        self._laps = _Laps()

    def times(self) -> StageTimes:
        samples = {stage: np.array(values, np.int64) for stage, values in self._laps.samples_ns.items()}
        return StageTimes(samples, self._step_frames, self._result_frames)

    def step(self) -> StepPlan:
        """One step through all stages."""
        laps = self._laps
        laps.start()
        plan = self._scheduler.schedule()
        laps.lap("schedule")
        assert plan is not None
        header, payload = self._builder.build(plan, self._scheduler.table, step_id=self._step_id, epoch=0)
        laps.lap("build")
        header_bytes = encode(header)
        laps.lap("encode_step")
        self._step_id += 1
        self._step_frames = (header_bytes, payload.tobytes())
        self._run_worker()
        self._take_result(plan)
        return plan

    def _run_worker(self) -> None:
        laps, (header_bytes, payload_bytes) = self._laps, self._step_frames
        laps.start()
        header, payload = decode_step(header_bytes), np.frombuffer(payload_bytes, np.int32)
        laps.lap("decode_step")
        assert isinstance(header, StepInput)
        (output,) = self._device.run(header, payload)
        assert isinstance(output, StepOutput)
        laps.start()
        result, result_payload = output.to_message(WorkerIdentity(0, 0), output.wait())
        result_bytes = encode(result)
        laps.lap("encode_result")
        self._result_frames = (result_bytes, result_payload.tobytes())

    def _take_result(self, plan: StepPlan) -> None:
        laps, (header_bytes, payload_bytes) = self._laps, self._result_frames
        laps.start()
        header, payload = decode_from_worker(header_bytes), np.frombuffer(payload_bytes, np.int32)
        laps.lap("decode_result")
        assert isinstance(header, StepResult)
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"])
        self._scheduler.apply(plan.sample_slots(), keys, sections["positions"], sections["token_ids"])
        laps.lap("apply")
        self._outputs.take_result(header, payload)
        laps.lap("output_apply")
        items = self._outputs.take_items().items_by_client[_CLIENT]
        laps.lap("detokenize")
        message = encode(Outputs(items))
        laps.lap("encode_outputs")
        decode_to_client(message)
        laps.lap("decode_outputs")

    def _add_requests(self, input_len: int, max_model_len: int, vocab_size: int) -> None:
        generator = np.random.default_rng(0)
        for key in range(self._batch_size):
            prompt = generator.integers(0, vocab_size, input_len).astype(np.int32)
            self._scheduler.add(
                Request(
                    key=key,
                    client=_CLIENT,
                    request_id=f"r{key}",
                    prompt_token_ids=prompt,
                    end_position=max_model_len,
                    sampling=RowSampling(seed=key),
                )
            )
            self._outputs.register(
                Register(
                    key=key,
                    client=_CLIENT,
                    request_id=f"r{key}",
                    index=0,
                    workflow="generate",
                    prompt_token_ids=prompt.tolist(),
                    end_position=max_model_len,
                )
            )
