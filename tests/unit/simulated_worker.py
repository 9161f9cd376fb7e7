"""A worker made of numpy that knows what each row's context must be, and a driver that runs a pipeline against it.

The worker keeps, for each place of its KV pool, the (token, position) last written there. Before it samples, it looks
at all that a row sees through its block table and compares it with the request's true sequence: a block shared wrongly,
reused too early or off by one is an AssertionError in the step that reads it, not a strange token later. The entries of
proposed tokens that were not accepted become nothing at once, so that whoever reads them before they are written again
is found too.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from procengine.messages import StepInput, StepResult, decode_from_worker, decode_step, encode
from procengine.pipeline import Pipeline
from procengine.request import Request, RowRules, RowSampling
from procengine.row_features import EARLY_STOPS, GRAMMAR, NEEDS_HISTORY, PENALTIES
from procengine.scheduler.limits import SchedulerLimits
from procengine.scheduler.scheduler import Scheduler
from procengine.step_output import (
    Logprobs,
    PassTimes,
    PromptLogprobs,
    SampledTokens,
    StepOutput,
    WorkerIdentity,
    accepted_samples,
)
from procengine.step_payload import (
    RESULT_SECTIONS,
    SLOT_ROW,
    STEP_SECTIONS,
    SlotList,
    block_update_width,
    cut_sections,
    iter_slot_lists,
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


def token_of_few(seed: int, prefix: Int32s) -> int:
    """One of five tokens, mostly by the two before it: n-grams come again, and what follows is often the same."""
    seen = prefix if zlib.crc32(prefix.tobytes(), seed) % 5 == 0 else prefix[-2:]
    return 10 + zlib.crc32(seen.tobytes(), seed & 0xFFFFFFFF) % 5


class ToyMasks:
    """A grammar in which the tokens so far say which third of the vocabulary may come next. It records its calls."""

    num_mask_words = -(-VOCAB // 32)

    def __init__(self) -> None:
        self.fed: list[int] = []
        self.masked_at: list[int] = []  # how many tokens it had when a mask was taken

    def allows(self, token: int) -> bool:
        return token % 3 == zlib.crc32(bytes(str(self.fed), "ascii")) % 3

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        assert row.shape == (self.num_mask_words,)
        self.masked_at.append(len(self.fed))
        bits = np.array([self.allows(token) for token in range(32 * self.num_mask_words)])
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token_id: int) -> None:
        assert self.allows(token_id), f"token {token_id} is not what comes after {self.fed}"
        self.fed.append(token_id)


class TrueSequences:
    """What each request's sequence is, whatever the engine does: the prompt, then the rule applied over and over.

    A token that the request's rules forbid gives way to the next one that they allow.
    """

    def __init__(self, rule: TokenRule) -> None:
        self.rule = rule
        self.seeds: dict[int, int] = {}
        self._known: dict[int, Int32s] = {}
        self._grammars: dict[int, ToyMasks] = {}
        self._early: dict[int, tuple[int, tuple[int, ...]]] = {}

    def add(
        self,
        key: int,
        prompt: Int32s,
        seed: int,
        *,
        has_grammar: bool = False,
        early_stops: tuple[int, tuple[int, ...]] = (0, ()),
    ) -> None:
        self._known[key] = prompt.copy()
        self.seeds[key] = seed
        self._early[key] = early_stops
        if has_grammar:
            self._grammars[key] = ToyMasks()

    def first(self, key: int, count: int) -> Int32s:
        """The first `count` tokens."""
        known, grammar = self._known[key], self._grammars.get(key)
        end, stops = self._early[key]
        while known.size < count:
            banned = stops if known.size < end else ()
            token = self.rule(self.seeds[key], known)
            while token in banned or (grammar is not None and not grammar.allows(token)):
                token = (token + 1) % VOCAB
            if grammar is not None:
                grammar.consume(token)
            known = np.append(known, np.int32(token))
        self._known[key] = known
        return known[:count]

    def output(self, request: Request) -> tuple[list[int], str]:
        """Tokens that follow the prompt, and why they end."""
        num_prompt = request.prompt_token_ids.size
        position = num_prompt
        while True:
            token = int(self.first(request.key, position + 1)[position])
            position += 1
            if token in request.stop_token_ids and position > request.min_position:
                return self.first(request.key, position)[num_prompt:].tolist(), "stop"
            if position >= request.end_position:
                return self.first(request.key, position)[num_prompt:].tolist(), "length"


class SimulatedWorker:
    """Runs steps in order, from the bytes that would cross the socket."""

    def __init__(self, limits: SchedulerLimits, truth: TrueSequences, *, rank: int = 0, epoch: int = 0) -> None:
        self.num_computed_tokens = 0
        self.num_computed_by_key: dict[int, int] = {}
        self.num_accepted = self.num_rejected = 0  # proposals
        self.headers: list[StepInput] = []
        self.slot_lists: list[tuple[SlotList, int, list[int]]] = []  # with the key in place of the slot
        self._features = np.zeros(limits.max_num_seqs, np.int32)
        self._num_logprobs = np.full(limits.max_num_seqs, -1, np.int32)
        self._identity = WorkerIdentity(rank, epoch)
        self._limits = limits
        self._truth = truth
        self._tokens = np.full((limits.num_blocks, limits.block_size), _NOTHING, np.int32)
        self._positions = np.full((limits.num_blocks, limits.block_size), _NOTHING, np.int32)
        self._writers = np.full((limits.num_blocks, limits.block_size), _NOTHING, np.int32)  # groups of layers
        self._last_tokens = np.full(limits.max_num_seqs, _NOTHING, np.int32)
        self._keys = np.full(limits.max_num_seqs, _NOTHING, np.int64)
        width = -(-limits.max_model_len // limits.block_size)
        self._block_tables = np.full((len(limits.windows), limits.max_num_seqs, width), _NOTHING, np.int32)

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
        self._check_prompt_targets(sections)
        if sections["sample_counts"].size:
            yield self._run_drafts(header, sections, input_ids)
            return
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
            for slot, seq_len, num_queries in zip(slots.tolist(), seq_lens.tolist(), lengths.tolist(), strict=True):
                self._check_context(slot, seq_len, num_queries)
            tokens = np.array(
                [self._sample(slot, seq_len) for slot, seq_len in zip(slots[sampled], seq_lens[sampled], strict=True)],
                np.int32,
            )
            self._last_tokens[slots[sampled]] = tokens
            masks = sections if micro_step == 0 else None
            self._check_masks(slots[sampled], tokens, masks)
            logprobs = self._logprobs(slots[sampled], seq_lens[sampled], tokens)
            yield self._result(
                header, micro_step, slots[sampled], seq_lens[sampled], self._sampled_tokens(tokens, sections, logprobs)
            )

    def _run_drafts(self, header: StepInput, sections: dict[str, Int32s], input_ids: Int32s) -> tuple[bytes, bytes]:
        """A step in which some rows try proposed tokens: what they give is computed from what they see."""
        slots, ends, seq_lens = sections["slots"], sections["query_start_loc"][1:], sections["seq_lens"]
        self._write(np.repeat(slots, np.diff(sections["query_start_loc"])), sections["positions"], input_ids)
        counts = dict(zip(sections["sample_rows"].tolist(), sections["sample_counts"].tolist(), strict=True))
        sampled: list[tuple[int, int, int, int]] = []  # slot, position, token, what was proposed there
        lengths = np.diff(sections["query_start_loc"])
        rows = zip(slots.tolist(), ends.tolist(), seq_lens.tolist(), lengths.tolist(), strict=True)
        for row, (slot, end, seq_len, num_queries) in enumerate(rows):
            count = counts.get(row, 0)
            known = seq_len - max(count - 1, 0)
            self._check_context(slot, known, num_queries - max(count - 1, 0))
            if count == 1:
                sampled.append((slot, seq_len, self._sample(slot, seq_len), _NOTHING))
            elif count > 1:
                assert not self._features[slot], "a row whose logits depend on its tokens must not try proposals"
                sampled += self._try_proposals(slot, known, input_ids[end - count + 1 : end])
        columns = np.array(sampled, np.int32)
        proposed, tokens = columns[:, 3].copy(), columns[:, 2].copy()
        is_accepted = accepted_samples(tokens, proposed, sections["sample_counts"])
        self._forget_rejected(columns[:, 0], columns[:, 1], is_accepted)
        self._last_tokens[columns[:, 0]] = _NOTHING  # never to be asked for: such a step says its tokens itself
        self._check_masks(columns[:, 0], tokens, sections)
        return self._result(
            header,
            0,
            columns[:, 0].copy(),
            columns[:, 1].copy(),
            self._sampled_tokens(tokens, sections, None, is_accepted),
        )

    def _try_proposals(self, slot: int, known: int, proposals: Int32s) -> list[tuple[int, int, int, int]]:
        key = int(self._keys[slot])
        context = np.append(self._truth.first(key, known), proposals)
        for group in range(len(self._limits.windows)):
            seen = self._seen(group, slot, known + proposals.size, proposals.size + 1)[1]
            assert seen[-proposals.size :].tolist() == proposals.tolist()
        tokens = [self._truth.rule(self._truth.seeds[key], context[: known + at]) for at in range(proposals.size + 1)]
        return [
            (slot, known + at, token, proposed)
            for at, (token, proposed) in enumerate(zip(tokens, [*proposals.tolist(), _NOTHING], strict=True))
        ]

    def _forget_rejected(self, slots: Int32s, positions: Int32s, is_accepted: NDArray[np.bool_]) -> None:
        """What was computed of proposals that do not count is nothing that anybody may read."""
        for slot, position, accepted in zip(slots.tolist(), positions.tolist(), is_accepted.tolist(), strict=True):
            if not accepted:  # its input, one position before, is a proposal that was not accepted
                self.num_rejected += 1
                blocks = self._block_tables[:, slot, (position - 1) // self._limits.block_size]
                self._tokens[blocks, (position - 1) % self._limits.block_size] = _NOTHING
        changes = np.append(slots[1:] != slots[:-1], True)
        self.num_accepted += int(is_accepted.sum() - changes.sum())

    def _check_masks(self, slots: Int32s, tokens: Int32s, sections: dict[str, Int32s] | None) -> None:
        """Every sample of a row with a grammar comes with a mask, which allows the request's true token and no other
        than the grammar does."""
        needs = np.flatnonzero(self._features[slots] & GRAMMAR)
        if sections is None:
            assert not needs.size, "a row with a grammar takes part in a pass without its mask"
            return
        masked = sections["masked_rows"]
        assert masked.tolist() == needs.tolist()
        if not masked.size:
            return
        words = sections["mask_words"].reshape(masked.size, -1)
        for slot, token, row in zip(slots[masked].tolist(), tokens[masked].tolist(), words, strict=True):
            allowed = np.flatnonzero(np.unpackbits(row.copy().view(np.uint8), bitorder="little")[:VOCAB])
            assert token in allowed, f"the mask of request {self._keys[slot]} is not that of its newest token"

    def _check_prompt_targets(self, sections: dict[str, Int32s]) -> None:
        at = 0
        for row, count, width in sections["prompt_rows"].reshape(-1, 3).tolist():
            targets = sections["prompt_targets"][at : at + count]
            first = int(sections["positions"][sections["query_start_loc"][row]]) + 1
            truth = self._truth.first(int(self._keys[sections["slots"][row]]), first + count)
            assert targets.tolist() == truth[first:].tolist()
            assert width >= 0
            assert count > 0
            at += count
        assert at == sections["prompt_targets"].size

    def _logprobs(self, slots: Int32s, positions: Int32s, tokens: Int32s) -> Logprobs | None:
        """Of each token its position, so that a shifted one is seen."""
        rows = np.flatnonzero(self._num_logprobs[slots] >= 0).astype(np.int32)
        if not rows.size:
            return None
        shown = tokens[rows][:, None]
        return Logprobs(rows, shown, -positions[rows][:, None].astype(np.float32), np.ones_like(shown))

    def _sampled_tokens(
        self,
        tokens: Int32s,
        sections: dict[str, Int32s],
        logprobs: Logprobs | None,
        is_accepted: NDArray[np.bool_] | None = None,
    ) -> SampledTokens:
        wanted = sections["prompt_rows"].reshape(-1, 3)
        if not wanted.size:
            return SampledTokens(tokens, is_accepted, logprobs)
        keys = self._keys[sections["slots"][wanted[:, 0]]].view(np.int32).reshape(-1, 2)
        firsts = sections["positions"][sections["query_start_loc"][wanted[:, 0]]] + 1
        spans = np.column_stack((keys, firsts, wanted[:, 1])).astype(np.int32)
        shown = np.repeat(sections["prompt_targets"][:, None], int(wanted[:, 2].max()) + 1, axis=1)
        prompt = PromptLogprobs(spans, shown, -shown.astype(np.float32), np.ones(shown.shape, np.int32))
        return SampledTokens(tokens, is_accepted, logprobs, prompt)

    def _check_header(self, header: StepInput, sections: dict[str, Int32s]) -> None:
        lengths = np.diff(sections["query_start_loc"])
        assert header.num_rows == sections["slots"].size == lengths.size
        assert header.num_tokens == sections["input_ids"].size == sections["positions"].size == lengths.sum()
        assert header.num_tokens <= self._limits.max_num_batched_tokens, "over the token budget"
        assert header.num_samples == sections["sample_rows"].size
        assert header.max_query_len == lengths.max()
        assert header.max_seq_len == sections["seq_lens"].max()
        assert (lengths[: header.num_decode_rows] == 1).all()
        references = sections["input_ids"][: header.num_decode_rows] < 0
        if self._limits.num_speculative_tokens:
            assert not references.any(), "the worker's own record of a row may be a rejected token"
        else:
            assert references.all(), "a decode row brings its token along"
        if sections["sample_counts"].size:
            assert sections["sample_counts"].size == sections["sample_rows"].size
            assert (sections["sample_counts"] >= 1).all()
            assert (sections["sample_counts"] <= lengths[sections["sample_rows"]]).all()
            assert (sections["sample_counts"] <= 1 + self._limits.num_speculative_tokens).all()
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
            self._block_tables[:, row[0]] = _NOTHING  # stricter than a real worker: nothing of the last holder is left
            self._features[row[0]] = row[SLOT_ROW.index("features")]
            self._num_logprobs[row[0]] = row[SLOT_ROW.index("num_logprobs")]
        self._take_lists(sections["slot_lists"], rows[:, 0].tolist())
        width = block_update_width(len(self._limits.windows))
        for slot, index, *blocks in sections["block_updates"].reshape(-1, width).tolist():
            assert all(0 <= block < self._limits.num_blocks for block in blocks)
            self._block_tables[:, slot, index] = blocks

    def _take_lists(self, section: Int32s, placed: list[int]) -> None:
        histories: set[int] = set()
        for kind, slot, data in iter_slot_lists(section):
            assert slot in placed
            key = int(self._keys[slot])
            self.slot_lists.append((kind, key, data.tolist()))
            if kind is SlotList.HISTORY:
                histories.add(slot)
                assert data[1:].tolist() == self._truth.first(key, data.size - 1).tolist()
        needs = {slot for slot in placed if self._features[slot] & NEEDS_HISTORY}
        assert histories == needs, "a row that counts its tokens must know those it has"

    def _resolve(self, input_ids: Int32s) -> Int32s:
        is_reference = input_ids < 0
        resolved = input_ids.copy()
        resolved[is_reference] = self._last_tokens[-1 - input_ids[is_reference]]
        return resolved

    def _write(self, slots: Int32s, positions: Int32s, token_ids: Int32s) -> None:
        blocks = self._block_tables[:, slots, positions // self._limits.block_size]
        assert (blocks >= 0).all(), "a position has no block"
        offsets = positions % self._limits.block_size
        places = blocks.astype(np.int64) * self._limits.block_size + offsets
        assert np.unique(places).size == places.size, "two rows, or groups of layers, write to one place"
        self._tokens[blocks, offsets] = token_ids
        self._positions[blocks, offsets] = positions
        self._writers[blocks, offsets] = np.arange(len(blocks))[:, None]
        self.num_computed_tokens += slots.size
        for slot, count in zip(*np.unique(slots, return_counts=True), strict=True):
            key = int(self._keys[slot])
            self.num_computed_by_key[key] = self.num_computed_by_key.get(key, 0) + int(count)

    def _check_context(self, slot: int, seq_len: int, num_queries: int) -> None:
        key = int(self._keys[slot])
        for group in range(len(self._limits.windows)):
            start, seen, positions, writers = self._seen(group, slot, seq_len, num_queries)
            truth = self._truth.first(key, seq_len)[start:]
            wrong = (positions != np.arange(start, seq_len)) | (seen != truth) | (writers != group)
            at = f"position {start + int(np.argmax(wrong))} of {seq_len}"
            assert not wrong.any(), f"group {group} of request {key} sees another context at {at}"

    def _seen(self, group: int, slot: int, seq_len: int, num_queries: int) -> tuple[int, Int32s, Int32s, Int32s]:
        """The first position that any of a row's queries sees, and (token, position, group) written last in each place
        that it reads from there on."""
        window, block_size = self._limits.windows[group], self._limits.block_size
        start = 0 if window is None else max(0, seq_len - num_queries - window + 1)
        first = start // block_size
        blocks = self._block_tables[group, slot, first : -(-seq_len // block_size)]
        assert (blocks >= 0).all(), f"request {self._keys[slot]} has no block for a position it reads"
        places = slice(start - first * block_size, seq_len - first * block_size)
        tokens, positions, writers = (
            table[blocks].ravel()[places] for table in (self._tokens, self._positions, self._writers)
        )
        return start, tokens, positions, writers

    def _sample(self, slot: int, seq_len: int) -> int:
        return int(self._truth.first(int(self._keys[slot]), seq_len + 1)[seq_len])

    def _result(
        self, header: StepInput, micro_step: int, slots: Int32s, positions: Int32s, tokens: SampledTokens
    ) -> tuple[bytes, bytes]:
        is_last = micro_step == header.decode_steps - 1
        times = PassTimes(0, 0, 0, 1000)
        output = StepOutput(header.step_id, micro_step, is_last, self._keys[slots], positions, lambda: tokens, times)
        result, payload = output.to_message(self._identity, tokens)
        return encode(result), payload.tobytes()


@dataclass(slots=True)
class Received:
    """What one request got, as the output process would see it."""

    request: Request
    token_ids: list[int]
    finish_reason: str | None = None
    scored: list[int] = field(default_factory=list)  # positions whose prompt logprobs came, in order of arrival


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
        self.pipeline = Pipeline(0, lambda: {"generate": self.planner}, depth)
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
        min_tokens: int = 0,
        has_grammar: bool = False,
        has_penalties: bool = False,
        num_prompt_logprobs: int = -1,
    ) -> Request:
        """Submit a request, bounded as `workflows.generate.accept` does it."""
        prompt = np.asarray(prompt, np.int32)
        own_limits = self.scheduler.limits
        end = min(prompt.size + max_tokens, own_limits.max_model_len, own_limits.pool_tokens)
        features = (EARLY_STOPS if min_tokens else 0) | (GRAMMAR if has_grammar else 0)
        features |= PENALTIES if has_penalties else 0
        min_position = prompt.size + min_tokens
        request = Request(
            key=self._num_keys,
            client=b"client",
            request_id=str(self._num_keys),
            prompt_token_ids=prompt,
            end_position=end,
            sampling=RowSampling(seed, features=features),
            min_position=min_position,
            rules=RowRules(early_stop_ids=stop_token_ids if min_tokens else ()),
            grammar=ToyMasks() if has_grammar else None,
            num_prompt_logprobs=num_prompt_logprobs,
            stop_token_ids=stop_token_ids,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._num_keys += 1
        early = (min_position, stop_token_ids) if min_tokens else (0, ())
        self.truth.add(request.key, prompt, seed, has_grammar=has_grammar, early_stops=early)
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
        ended = {(request.key, reason) for request, reason in self.pipeline.apply(header, payload).ended}
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
            request = received.request
            token_ids, reason = self.truth.output(request)
            if isinstance(request.grammar, ToyMasks):
                assert request.grammar.fed == received.token_ids, "fed with all of its tokens, in order"
            if request.num_prompt_logprobs >= 0 and received.token_ids:
                assert sorted(set(received.scored)) == list(range(1, request.prompt_token_ids.size))
                assert request.num_preemptions or len(set(received.scored)) == len(received.scored)
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
        for low, high, first, count in sections["prompt_spans"].reshape(-1, 4).tolist():
            key = int(join_int64(np.array([low, high], np.int32))[0])
            self.received[key].scored += range(first, first + count)
        for key, position, token in zip(
            keys, sections["positions"].tolist(), sections["token_ids"].tolist(), strict=True
        ):
            received = self.received[key]
            if received.finish_reason is not None:
                continue
            request = received.request
            assert position == request.prompt_token_ids.size + len(received.token_ids), "a hole or a repeat"
            received.token_ids.append(token)
            if token in request.stop_token_ids and position >= request.min_position:
                received.finish_reason = "stop"
            elif position + 1 >= request.end_position:
                received.finish_reason = "length"
            if received.finish_reason is not None:
                ended.add((key, received.finish_reason))
        return ended
