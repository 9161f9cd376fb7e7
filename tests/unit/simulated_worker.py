"""A worker made of numpy that knows what each row's context must be, and a driver that runs a pipeline against it.

The worker keeps, for each place of its KV pool, the (token, position) last written there. Before it samples, it looks
at all that a row sees through its block table and compares it with the request's true sequence: a block shared wrongly,
reused too early or off by one is an AssertionError in the step that reads it, not a strange token later.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.messages import StepInput, StepResult, decode_from_worker, decode_step, encode
from procengine.pipeline import Pipeline
from procengine.request import Request, RowSampling
from procengine.scheduler.scheduler import Scheduler, SchedulerLimits
from procengine.step_output import StepOutput, WorkerIdentity
from procengine.step_payload import (
    BLOCK_UPDATE_WIDTH,
    RESULT_SECTIONS,
    SLOT_ROW,
    STEP_SECTIONS,
    cut_sections,
    join_int64,
)
from procengine.workflows.generate import GeneratePlanner

Int32s = NDArray[np.int32]
TokenRule = Callable[[int, Int32s], int]  # (seed, all tokens before it) -> token

VOCAB = 1000
_NOTHING = -1


def token_by_prefix(seed: int, prefix: Int32s) -> int:
    """A token that changes with any token before it."""
    return zlib.crc32(prefix.tobytes(), seed & 0xFFFFFFFF) % VOCAB


def token_by_position(seed: int, prefix: Int32s) -> int:
    """A token that depends on the place alone, so that a shifted one is seen."""
    return (seed * 7919 + prefix.size * 104_729) % VOCAB


class TrueSequences:
    """What each request's sequence is, whatever the engine does: the prompt, then the rule applied over and over."""

    def __init__(self, rule: TokenRule) -> None:
        self._rule = rule
        self._known: dict[int, Int32s] = {}
        self._seeds: dict[int, int] = {}

    def add(self, key: int, prompt: Int32s, seed: int) -> None:
        self._known[key] = prompt.copy()
        self._seeds[key] = seed

    def first(self, key: int, count: int) -> Int32s:
        """The first `count` tokens."""
        known = self._known[key]
        while known.size < count:
            known = np.append(known, np.int32(self._rule(self._seeds[key], known)))
        self._known[key] = known
        return known[:count]

    def output(self, request: Request) -> tuple[list[int], str]:
        """Tokens that follow the prompt, and why they end."""
        num_prompt = request.prompt_token_ids.size
        position = num_prompt
        while True:
            token = int(self.first(request.key, position + 1)[position])
            position += 1
            if token in request.stop_token_ids:
                return self.first(request.key, position)[num_prompt:].tolist(), "stop"
            if position >= request.end_position:
                return self.first(request.key, position)[num_prompt:].tolist(), "length"


class SimulatedWorker:
    """Runs steps in order, from the bytes that would cross the socket."""

    def __init__(self, limits: SchedulerLimits, truth: TrueSequences, *, rank: int = 0) -> None:
        self.num_computed_tokens = 0
        self.num_computed_by_key: dict[int, int] = {}
        self.headers: list[StepInput] = []
        self._identity = WorkerIdentity(rank, 0)
        self._limits = limits
        self._truth = truth
        self._tokens = np.full((limits.num_blocks, limits.block_size), _NOTHING, np.int32)
        self._positions = np.full((limits.num_blocks, limits.block_size), _NOTHING, np.int32)
        self._last_tokens = np.full(limits.max_num_seqs, _NOTHING, np.int32)
        self._keys = np.full(limits.max_num_seqs, _NOTHING, np.int64)
        width = -(-limits.max_model_len // limits.block_size)
        self._block_tables = np.full((limits.max_num_seqs, width), _NOTHING, np.int32)

    def run(self, header_bytes: bytes, payload_bytes: bytes) -> Iterator[tuple[bytes, bytes]]:
        """The results of one step, as bytes."""
        header = decode_step(header_bytes)
        assert isinstance(header, StepInput)
        self.headers.append(header)
        sections = cut_sections(STEP_SECTIONS, header.sizes, np.frombuffer(payload_bytes, np.int32))
        self._check_header(header, sections)
        self._update_slots(sections)
        slots, lengths = sections["slots"], np.diff(sections["query_start_loc"])
        input_ids, positions, seq_lens = (
            self._resolve(sections["input_ids"]),
            sections["positions"],
            sections["seq_lens"],
        )
        sampled = sections["sample_rows"]
        for micro_step in range(header.decode_steps):
            if micro_step:
                stays = sections["row_steps"] > micro_step
                slots = sections["slots"][stays]
                positions = sections["positions"][stays] + np.int32(micro_step)
                seq_lens = sections["seq_lens"][stays] + np.int32(micro_step)
                lengths, sampled = np.ones(slots.size, np.int32), np.arange(slots.size, dtype=np.int32)
                input_ids = self._last_tokens[slots]
            self._write(np.repeat(slots, lengths), positions, input_ids)
            for slot, seq_len in zip(slots.tolist(), seq_lens.tolist(), strict=True):
                self._check_context(slot, seq_len)
            tokens = np.array(
                [self._sample(slot, seq_len) for slot, seq_len in zip(slots[sampled], seq_lens[sampled], strict=True)],
                np.int32,
            )
            self._last_tokens[slots[sampled]] = tokens
            yield self._result(header, micro_step, slots[sampled], seq_lens[sampled], tokens)

    def _check_header(self, header: StepInput, sections: dict[str, Int32s]) -> None:
        lengths = np.diff(sections["query_start_loc"])
        assert header.num_rows == sections["slots"].size == lengths.size
        assert header.num_tokens == sections["input_ids"].size == sections["positions"].size == lengths.sum()
        assert header.num_tokens <= self._limits.max_num_batched_tokens, "over the token budget"
        assert header.num_samples == sections["sample_rows"].size
        assert header.max_query_len == lengths.max()
        assert header.max_seq_len == sections["seq_lens"].max()
        assert (lengths[: header.num_decode_rows] == 1).all()
        assert (sections["input_ids"][: header.num_decode_rows] < 0).all(), "a decode row brings its token along"
        assert (sections["input_ids"][header.num_decode_rows :] >= 0).all()
        assert np.unique(sections["slots"]).size == header.num_rows, "a slot has two rows"
        if header.decode_steps == 1:
            assert not sections["row_steps"].size
        else:
            assert header.num_decode_rows == header.num_rows, "several forward passes with a prompt in the step"
            assert sections["row_steps"].max() == header.decode_steps
            assert sections["row_steps"].min() >= 1

    def _update_slots(self, sections: dict[str, Int32s]) -> None:
        rows = sections["slot_rows"].reshape(-1, len(SLOT_ROW))
        low = SLOT_ROW.index("key_low")
        for row in rows:
            self._keys[row[0]] = join_int64(row[low : low + 2])[0]
            self._block_tables[row[0]] = _NOTHING  # stricter than a real worker: nothing of the holder before is left
        for slot, index, block in sections["block_updates"].reshape(-1, BLOCK_UPDATE_WIDTH).tolist():
            assert 0 <= block < self._limits.num_blocks
            self._block_tables[slot, index] = block

    def _resolve(self, input_ids: Int32s) -> Int32s:
        is_reference = input_ids < 0
        resolved = input_ids.copy()
        resolved[is_reference] = self._last_tokens[-1 - input_ids[is_reference]]
        return resolved

    def _write(self, slots: Int32s, positions: Int32s, token_ids: Int32s) -> None:
        blocks = self._block_tables[slots, positions // self._limits.block_size]
        assert (blocks >= 0).all(), "a position has no block"
        offsets = positions % self._limits.block_size
        places = blocks.astype(np.int64) * self._limits.block_size + offsets
        assert np.unique(places).size == places.size, "two rows write to one place"
        self._tokens[blocks, offsets] = token_ids
        self._positions[blocks, offsets] = positions
        self.num_computed_tokens += slots.size
        for slot, count in zip(*np.unique(slots, return_counts=True), strict=True):
            key = int(self._keys[slot])
            self.num_computed_by_key[key] = self.num_computed_by_key.get(key, 0) + int(count)

    def _check_context(self, slot: int, seq_len: int) -> None:
        key = int(self._keys[slot])
        blocks = self._block_tables[slot, : -(-seq_len // self._limits.block_size)]
        assert (blocks >= 0).all(), f"request {key} has no block for a position it reads"
        seen, positions = self._tokens[blocks].ravel()[:seq_len], self._positions[blocks].ravel()[:seq_len]
        wrong = (positions != np.arange(seq_len)) | (seen != self._truth.first(key, seq_len))
        assert not wrong.any(), f"request {key} sees another context at position {int(np.argmax(wrong))} of {seq_len}"

    def _sample(self, slot: int, seq_len: int) -> int:
        return int(self._truth.first(int(self._keys[slot]), seq_len + 1)[seq_len])

    def _result(
        self, header: StepInput, micro_step: int, slots: Int32s, positions: Int32s, tokens: Int32s
    ) -> tuple[bytes, bytes]:
        is_last = micro_step == header.decode_steps - 1
        output = StepOutput(
            header.step_id, micro_step, is_last, self._keys[slots], positions, lambda: (tokens, None), 1000
        )
        result, payload = output.to_message(self._identity)
        return encode(result), payload.tobytes()


@dataclass(slots=True)
class Received:
    """What one request got, as the output process would see it."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None = None


def limits(**changes: Any) -> SchedulerLimits:
    """Limits of a small worker."""
    values: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
        "block_size": 16,
        "num_blocks": 64,
    }
    return SchedulerLimits(**(values | changes))


class _EagerPlanner(GeneratePlanner):
    """Plans a prompt's step ahead too: slots and blocks change hands while results are still under way."""

    @property
    def wants_late_plan(self) -> bool:
        return False


class Driver:
    """One pipeline with `generate` alone, a simulated worker behind it, and a record of what came out.

    Results come back in order, but only when `receive` is called: any number of steps may be in between.
    `scheduler.check_integrity()` runs after every operation. Without `plans_late` the depth never falls for a prompt.
    """

    def __init__(
        self,
        scheduler_limits: SchedulerLimits,
        *,
        depth: int = 2,
        rule: TokenRule = token_by_prefix,
        plans_late: bool = True,
    ) -> None:
        self.truth = TrueSequences(rule)
        self.worker = SimulatedWorker(scheduler_limits, self.truth)
        self.planner = (GeneratePlanner if plans_late else _EagerPlanner)(scheduler_limits)
        self.pipeline = Pipeline(0, {"generate": self.planner}, depth)
        self.received: dict[int, Received] = {}
        self.started: list[int] = []  # keys in the order of their (first) admission
        self.num_results = 0
        self._results: deque[tuple[bytes, bytes]] = deque()
        self._num_keys = 0

    @property
    def scheduler(self) -> Scheduler:
        return self.planner.scheduler

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.counters.num_preemptions

    @property
    def unfinished(self) -> list[Request]:
        return [r.request for r in self.received.values() if r.finish_reason is None]

    def add(
        self,
        prompt: Sequence[int] | Int32s,
        max_tokens: int,
        *,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        cache_salt: bytes = b"",
    ) -> Request:
        """Submit a request, bounded as `workflows.generate.accept` does it."""
        prompt = np.asarray(prompt, np.int32)
        own_limits = self.scheduler.limits
        end = min(prompt.size + max_tokens, own_limits.max_model_len, own_limits.pool_tokens)
        request = Request(
            key=self._num_keys,
            client=b"client",
            request_id=str(self._num_keys),
            prompt_token_ids=prompt,
            end_position=end,
            sampling=RowSampling(seed),
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._num_keys += 1
        self.truth.add(request.key, prompt, seed)
        self.received[request.key] = Received(request, [])
        self.planner.add(request)
        self.scheduler.check_integrity()
        return request

    def send(self) -> int:
        """Send every step that should be at the worker; returns how many."""
        num_sent = 0
        while (step := self.pipeline.next_step()) is not None:
            self.scheduler.check_integrity()
            self.started += [r.key for r in step.admitted]
            self._results.extend(self.worker.run(encode(step.header), step.payload.tobytes()))
            num_sent += 1
        return num_sent

    def receive(self) -> bool:
        """Take in the oldest result; False if there is none."""
        if not self._results:
            return False
        header_bytes, payload_bytes = self._results.popleft()
        header, payload = decode_from_worker(header_bytes), np.frombuffer(payload_bytes, np.int32)
        assert isinstance(header, StepResult)
        self.num_results += 1
        ended_by_output = self._record(header, payload)
        ended = {(request.key, reason) for request, reason in self.pipeline.apply(header, payload)}
        assert ended == ended_by_output, "frontend and output disagree on an end"
        self.scheduler.check_integrity()
        return True

    def end(self, request: Request, reason: str = "abort") -> None:
        """End a request from outside (abort, stop string)."""
        assert self.received[request.key].finish_reason is None
        self.received[request.key].finish_reason = reason
        self.planner.finish(request)
        self.scheduler.check_integrity()

    def run(self, max_results: int = 20_000) -> None:
        """Until nothing is left to do."""
        for _ in range(max_results):
            self.send()
            if not self.receive():
                break
        else:
            raise AssertionError("the run does not end")
        self.check_end()

    def check_end(self) -> None:
        """Everything ended, with the right tokens, and nothing is held."""
        assert not self.unfinished, f"stuck: {[r.key for r in self.unfinished]}"
        assert self.planner.num_unfinished == 0
        assert self.pipeline.num_in_flight == 0
        assert self.scheduler.pool.num_used == 0
        for received in self.received.values():
            token_ids, reason = self.truth.output(received.request)
            if received.finish_reason in ("stop", "length"):
                assert (received.token_ids, received.finish_reason) == (token_ids, reason)
            else:
                assert received.token_ids == token_ids[: len(received.token_ids)]

    def outputs(self) -> list[list[int]]:
        """Tokens of all requests, in the order they were added."""
        return [received.token_ids for received in self.received.values()]

    def _record(self, header: StepResult, payload: Int32s) -> set[tuple[int, str]]:
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"]).tolist()
        ended: set[tuple[int, str]] = set()
        for key, position, token in zip(
            keys, sections["positions"].tolist(), sections["token_ids"].tolist(), strict=True
        ):
            received = self.received[key]
            if received.finish_reason is not None:
                continue
            request = received.request
            assert position == request.prompt_token_ids.size + len(received.token_ids), "a hole or a repeat"
            received.token_ids.append(token)
            if token in request.stop_token_ids:
                received.finish_reason = "stop"
            elif position + 1 >= request.end_position:
                received.finish_reason = "length"
            if received.finish_reason is not None:
                ended.add((key, received.finish_reason))
        return ended
