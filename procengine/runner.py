"""`GenerateRunner`: one generation step on the device: gather inputs, forward, sample, give the tokens out.

Owns: what the device remembers of each slot (last token, block table, sampling values). Never does: know a request, a
socket or a queue, or how a forward pass is computed (an `Executor` does). Nothing in here waits for a GPU: the token of
the step before is taken from the device's own table, and results leave through `StepOutput.wait`, which others call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from procengine.arrays import A, Arrays
from procengine.executor import Executor, ForwardBatch
from procengine.kernels.lora import AdapterBlocks, adapter_blocks
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kv_tensors import KVTensors
from procengine.logits_processors import LogitsContext, LogitsProcessor, load_logits_processors
from procengine.logits_state import LogitsState
from procengine.messages import StepInput
from procengine.row_features import ADAPTER, NEEDS_HISTORY, NEEDS_LOGITS_STATE, SAMPLING
from procengine.slot_state import SlotState
from procengine.step_output import Logprobs, PassTimes, PromptLogprobs, SampledTokens, StepOutput, accepted_samples
from procengine.step_payload import SLOT_ROW, STEP_SECTIONS, cut_sections

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["GenerateRunner", "open_runner"]

Int32s = NDArray[np.int32]
_Copied = Callable[[], list[NDArray[Any]]]  # token ids, log probabilities and ranks, once they are on the host
_LOGITS_CHUNK = 64  # prompt positions whose logits exist at once


@dataclass(frozen=True, slots=True)
class _Pass(Generic[A]):
    """Rows of one forward pass, on the device unless named host."""

    batch: ForwardBatch[A]
    host_wanted: Int32s  # batch.wanted; empty where that is None
    samples: A | None  # int64 [samples], which of the wanted hidden states are sampled; None: all
    sample_slots: A  # int64 [samples]
    sample_positions: A  # int64 [samples], where the drawn tokens stand
    host_sample_slots: Int32s
    host_sample_positions: Int32s


class GenerateRunner(Generic[A]):
    """Runs steps in the order given. One per device."""

    def __init__(
        self,
        executor: Executor[A],
        arrays: Arrays[A],
        *,
        block_size: int,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        depth: int,
        num_groups: int = 1,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._executor = executor
        self._arrays = arrays
        self._max_num_seqs, self._vocab_size = max_num_seqs, vocab_size
        self._slots = SlotState(max_num_seqs, -(-max_model_len // block_size), arrays, num_groups)
        arrays.without_gradients(executor.prepare)(self._slots.block_tables)
        self._staging = arrays.open_staging(depth + 1)
        self._processors = [arrays.on_tensors(one, "logits_processors are given tensors") for one in processors]
        self._run: Callable[[StepInput, Int32s], Iterator[StepOutput]] = arrays.without_gradients(self._run_passes)
        self.forget_slots()

    def forget_slots(self) -> None:
        """No slot has a request."""
        self._slots.forget()
        self._logits = LogitsState(self._max_num_seqs, self._vocab_size, self._arrays)

    def run(self, header: StepInput, payload: Int32s) -> Iterator[StepOutput]:
        """The outputs of a step, one for each forward pass, in order. `payload` is int32 [n] and not kept."""
        return self._run(header, payload)

    def keys_of(self, header: StepInput, payload: Int32s) -> list[int]:
        """The requests of a step that may not have got far."""
        host = cut_sections(STEP_SECTIONS, header.sizes, payload.copy())
        self._slots.take_keys(host["slot_rows"])
        keys: list[int] = self._slots.keys[host["slots"]].tolist()
        return keys

    def _run_passes(self, header: StepInput, payload: Int32s) -> Iterator[StepOutput]:
        started_ns = time.monotonic_ns()
        host_payload, device_payload = self._staging.stage(header.step_id, payload)
        host = cut_sections(STEP_SECTIONS, header.sizes, host_payload)
        on_device = _cut(header.sizes, device_payload)
        self._update_slots(header, host, on_device)
        rows = self._first_pass(header, host, on_device)
        for micro_step in range(header.decode_steps):
            if micro_step:
                rows = self._next_pass(header, rows, host["row_steps"], micro_step)
                host = {**host, "masked_rows": host["masked_rows"][:0]}  # rows with a grammar take part in one pass
            staged_ns = time.monotonic_ns()
            hidden = self._executor.forward(rows.batch)
            forwarded_ns = time.monotonic_ns()
            wait = self._sample(hidden, rows, header, host, on_device)
            done_ns = time.monotonic_ns()
            yield StepOutput(
                header.step_id,
                micro_step,
                micro_step == header.decode_steps - 1,
                self._slots.keys[rows.host_sample_slots],
                rows.host_sample_positions,
                wait,
                PassTimes(started_ns, staged_ns, forwarded_ns, done_ns),
            )
            started_ns = time.monotonic_ns()

    def _update_slots(self, header: StepInput, host: dict[str, Int32s], on_device: dict[str, A]) -> None:
        self._slots.update(host, on_device)
        if host["slot_rows"].size:
            placed = host["slot_rows"].reshape(-1, len(SLOT_ROW))
            slots, features = placed[:, SLOT_ROW.index("slot")], placed[:, SLOT_ROW.index("features")]
            self._logits.place(slots, features, placed[:, -3:].copy().view(np.float32))
            self._logits.take_lists(host["slot_lists"])
            if header.features & ADAPTER:
                self._slots.take_adapters(host["slot_lists"])

    def _first_pass(self, header: StepInput, host: dict[str, Int32s], on_device: dict[str, A]) -> _Pass[A]:
        slots = self._arrays.widen(on_device["slots"])
        sample_rows, sample_tokens, positions = _samples(host)
        samples_all = header.num_tokens == header.num_rows == header.num_samples
        asks_for_prompt = host["prompt_rows"].size > 0
        wanted = _with_prompt_tokens(sample_tokens, host) if asks_for_prompt else sample_tokens
        wants_all = samples_all or wanted.size == header.num_tokens
        return _Pass(
            batch=ForwardBatch(
                input_ids=self._slots.resolve_tokens(on_device["input_ids"]),
                positions=self._arrays.widen(on_device["positions"]),
                query_start_loc=on_device["query_start_loc"],
                seq_lens=on_device["seq_lens"],
                slots=slots,
                block_tables=self._slots.block_tables,
                num_decode_rows=header.num_decode_rows,
                max_query_len=header.max_query_len,
                max_seq_len=header.max_seq_len,
                wanted=None if wants_all else self._send(wanted),
                adapters=self._adapters(header, np.repeat(host["slots"], np.diff(host["query_start_loc"]))),
            ),
            host_wanted=wanted[:0] if wants_all else wanted,
            samples=self._send(_places(sample_tokens, wanted)) if asks_for_prompt else None,
            sample_slots=slots if samples_all else slots[self._send(sample_rows)],
            sample_positions=self._arrays.widen(on_device["seq_lens"]) if samples_all else self._send(positions),
            host_sample_slots=host["slots"][sample_rows],
            host_sample_positions=positions,
        )

    def _next_pass(self, header: StepInput, rows: _Pass[A], row_steps: Int32s, micro_step: int) -> _Pass[A]:
        """The decode rows that go on, one position further. Their tokens are in the device's own table."""
        was_here = row_steps[row_steps >= micro_step]
        stays = np.flatnonzero(was_here > micro_step)
        keep = self._send(stays) if stays.size < was_here.size else slice(None)
        batch = rows.batch
        slots = batch.slots[keep]
        return replace(
            rows,
            batch=replace(
                batch,
                slots=slots,
                input_ids=self._slots.last_tokens[slots],
                positions=batch.positions[keep] + 1,
                query_start_loc=batch.query_start_loc[: stays.size + 1],
                seq_lens=batch.seq_lens[keep] + 1,
                num_decode_rows=stays.size,
                max_seq_len=batch.max_seq_len + 1,
                adapters=self._adapters(header, rows.host_sample_slots[stays]),
            ),
            sample_slots=slots,
            sample_positions=rows.sample_positions[keep] + 1,
            host_sample_slots=rows.host_sample_slots[stays],
            host_sample_positions=rows.host_sample_positions[stays] + np.int32(1),
        )

    def _adapters(self, header: StepInput, token_slots: Int32s) -> AdapterBlocks[A] | None:
        """The adapters of tokens of these slots, int32 [T] on the host."""
        if not header.features & ADAPTER:
            return None
        blocks = adapter_blocks(self._slots.adapters[token_slots])
        if blocks is None:
            return None
        tokens, places, adapters = map(self._send, (blocks.tokens, blocks.places, blocks.adapters))
        return AdapterBlocks(tokens, places, adapters, blocks.width)

    def _sample(
        self, hidden: A, rows: _Pass[A], header: StepInput, host: dict[str, Int32s], on_device: dict[str, A]
    ) -> Callable[[], SampledTokens]:
        prompt = self._prompt_logprobs(hidden, rows, host, on_device) if host["prompt_rows"].size else None
        if not rows.host_sample_slots.size:
            return self._to_host(None, None, None, prompt)
        hidden = hidden if rows.samples is None else hidden[rows.samples]
        asked = self._asked_logprobs(rows, header)
        raw = None
        if asked is None and self._is_plainly_greedy(header, host):
            tokens = self._executor.greedy_tokens(hidden)
        else:
            logits = self._executor.compute_logits(hidden)
            raw = logits[asked[1]] if asked is not None else None  # log probabilities are the model's own
            logits = self._adjust(logits, rows, header, host, on_device)
            features = SamplingFeatures(header.features & SAMPLING)
            tokens = self._executor.sample(logits, self._sampling_columns(rows, features), features)
        self._slots.last_tokens[rows.sample_slots] = tokens
        if header.features & NEEDS_HISTORY:
            self._logits.record(rows.host_sample_slots, tokens)
        logprobs = None
        if asked is not None and raw is not None:
            tops = self._arrays.kernels.gather_logprobs(raw, tokens[asked[1]], header.num_logprobs)
            logprobs = (asked[0], self._arrays.fetch(tops))
        return self._to_host(tokens, _proposals(host), logprobs, prompt)

    def _is_plainly_greedy(self, header: StepInput, host: dict[str, Int32s]) -> bool:
        """Whether all that is asked of the logits is where they are largest."""
        asks = header.features & (SAMPLING | NEEDS_LOGITS_STATE) or host["masked_rows"].size or self._processors
        return not asks

    def _adjust(
        self, logits: A, rows: _Pass[A], header: StepInput, host: dict[str, Int32s], on_device: dict[str, A]
    ) -> A:
        """Apply what rows ask for beyond temperature and filters. A batch in which nobody does pays nothing."""
        if header.features & NEEDS_LOGITS_STATE:
            logits = self._logits.adjust(logits, rows.host_sample_slots, rows.host_sample_positions)
        if host["masked_rows"].size:
            masked = self._arrays.widen(on_device["masked_rows"])
            words: Any = on_device["mask_words"]
            self._arrays.kernels.apply_token_bitmask(logits, masked, words.reshape(len(masked), -1))
        for processor in self._processors:
            keys = self._slots.keys[rows.host_sample_slots]
            logits = processor(logits, LogitsContext(keys, rows.host_sample_positions))
        return logits

    def _sampling_columns(self, rows: _Pass[A], features: SamplingFeatures) -> SamplingColumns[A]:
        state, slots = self._slots, rows.sample_slots
        if not features:  # all greedy: the values are not read
            empty = state.reals[:0, 0]
            return SamplingColumns(empty, state.top_k[:0], empty, empty, state.seeds[:0], state.seeds[:0])
        reals = state.reals[slots]
        temperature, top_p, min_p = reals[:, 0], reals[:, 1], reals[:, 2]
        return SamplingColumns(temperature, state.top_k[slots], top_p, min_p, state.seeds[slots], rows.sample_positions)

    def _asked_logprobs(self, rows: _Pass[A], header: StepInput) -> tuple[Int32s, A] | None:
        """Samples whose log probabilities are wanted, on the host and on the device."""
        if header.num_logprobs < 0:
            return None
        asked = np.flatnonzero(self._slots.num_logprobs[rows.host_sample_slots] >= 0).astype(np.int32)
        return (asked, self._send(asked)) if asked.size else None

    def _prompt_logprobs(
        self, hidden: A, rows: _Pass[A], host: dict[str, Int32s], on_device: dict[str, A]
    ) -> tuple[Int32s, _Copied]:
        """Log probabilities of the tokens that follow the first tokens of some rows, a few logits at a time."""
        wanted = host["prompt_rows"].reshape(-1, 3)
        starts, seq_lens = host["query_start_loc"], host["seq_lens"]
        width = int(wanted[:, 2].max())
        spans, parts, done = [], [], 0
        for row, count, _ in wanted.tolist():
            first_position = int(seq_lens[row] - (starts[row + 1] - starts[row])) + 1
            key = self._slots.keys[host["slots"][row] : host["slots"][row] + 1].view(np.int32)
            spans.append([*key.tolist(), first_position, count])
            first = int(np.searchsorted(rows.host_wanted, starts[row])) if rows.host_wanted.size else starts[row]
            for at in range(0, count, _LOGITS_CHUNK):
                size = min(_LOGITS_CHUNK, count - at)
                some = hidden[first + at : first + at + size]
                targets = on_device["prompt_targets"][done + at : done + at + size]
                # Logits have no name here: those of one chunk are gone before the next's are made.
                parts.append(self._arrays.kernels.gather_logprobs(self._executor.compute_logits(some), targets, width))
            done += count
        columns = [self._arrays.concatenate(column, axis=0) for column in zip(*parts, strict=True)]
        return np.array(spans, np.int32), self._arrays.fetch(columns)

    def _to_host(
        self,
        tokens: A | None,
        proposals: tuple[Int32s, Int32s] | None,
        logprobs: tuple[Int32s, _Copied] | None,
        prompt: tuple[Int32s, _Copied] | None,
    ) -> Callable[[], SampledTokens]:
        """Start the copy of the tokens to the host; the returned function waits for it, and for the others."""
        copied = None if tokens is None else self._arrays.fetch([tokens])

        def wait() -> SampledTokens:
            token_ids = np.zeros(0, np.int32) if copied is None else copied()[0]
            return SampledTokens(
                token_ids,
                None if proposals is None else accepted_samples(token_ids, *proposals),
                None if logprobs is None else Logprobs(logprobs[0], *_ranked(logprobs[1]())),
                None if prompt is None else PromptLogprobs(prompt[0], *_ranked(prompt[1]())),
            )

        return wait

    def _send(self, rows: NDArray[np.integer]) -> A:
        return self._arrays.send(rows.astype(np.int64))


def _samples(host: dict[str, Int32s]) -> tuple[Int32s, Int32s, Int32s]:
    """(row, index of the token whose hidden state is sampled, position of the drawn token) of each sample, int32."""
    rows = host["sample_rows"]
    ends, seq_lens = host["query_start_loc"][rows + 1], host["seq_lens"][rows]
    counts = host["sample_counts"]
    if not counts.size:
        return rows, ends - 1, seq_lens
    # Samples to the row's last one, itself included.
    behind = (np.repeat(np.cumsum(counts), counts) - np.arange(counts.sum())).astype(np.int32)
    return np.repeat(rows, counts), np.repeat(ends, counts) - behind, np.repeat(seq_lens, counts) - behind + 1


def _with_prompt_tokens(sample_tokens: Int32s, host: dict[str, Int32s]) -> Int32s:
    """Ascending: the tokens that are sampled, and those before prompt tokens whose log probabilities are asked for."""
    spans = [
        np.arange(start, start + count, dtype=np.int32)
        for start, count in zip(
            host["query_start_loc"][host["prompt_rows"][0::3]], host["prompt_rows"][1::3], strict=True
        )
    ]
    return np.unique(np.concatenate([sample_tokens, *spans]))


def _places(tokens: Int32s, wanted: Int32s) -> Int32s:
    """Where `tokens` are among `wanted`."""
    return np.searchsorted(wanted, tokens).astype(np.int32)


def _proposals(host: dict[str, Int32s]) -> tuple[Int32s, Int32s] | None:
    """(what was proposed for the position of each sample, samples of each row), if any row has several."""
    counts = host["sample_counts"]
    if not counts.size:
        return None
    _, tokens, _ = _samples(host)
    following = np.minimum(tokens + 1, host["input_ids"].size - 1)  # beyond a row's last sample nothing was proposed
    return host["input_ids"][following].copy(), counts.copy()


def _ranked(tops: list[NDArray[Any]]) -> tuple[Int32s, NDArray[np.float32], Int32s]:
    """The likeliest tokens rank 1, 2, ...; the chosen one, which comes first, says its own rank."""
    token_ids, values, ranks = tops
    ordered = np.tile(np.arange(token_ids.shape[1], dtype=np.int32), (len(token_ids), 1))
    ordered[:, 0] = ranks
    return token_ids, values, ordered


def open_runner(device: Device[A]) -> GenerateRunner[A]:
    """The runner of `generate` steps on `device`, with its KV pool."""
    config, model = device.config, device.model
    block_size = config.cache.block_size
    dtype, groups = config.worker.kv_cache_dtype, device.groups
    cache = KVTensors(config.model, device.num_blocks, block_size, dtype, model.arrays, groups)
    return GenerateRunner(
        model.open(cache),
        model.arrays,
        block_size=block_size,
        vocab_size=config.model.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.scheduler.max_model_len,
        depth=config.scheduler.async_depth,
        num_groups=groups.num_groups,
        processors=load_logits_processors(config.worker.logits_processors, config.model),
    )


def _cut(sizes: tuple[int, ...], payload: A) -> dict[str, A]:
    ends = list(accumulate(sizes))
    return {name: payload[end - size : end] for name, size, end in zip(STEP_SECTIONS, sizes, ends, strict=True)}
