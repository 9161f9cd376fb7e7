"""`GenerateRunner`: one generation step on the device: gather inputs, forward, sample, give the tokens out.

Owns: the KV cache tensors and what the device remembers of each slot (last token, block table, sampling values).
Never does: know a request, a socket or a queue. Nothing in here waits for a GPU: the token of the step before is taken
from the device's own table, and results leave through `StepOutput.wait`, which others call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.kernels.attention import AttentionMetadata, paged_attention
from procengine.kernels.kv_cache import write_kv
from procengine.kernels.logits import apply_token_bitmask
from procengine.kernels.sampling import SamplingFeatures, SamplingTensors, gather_logprobs, sample
from procengine.kv_tensors import KVTensors
from procengine.logits_processors import LogitsContext, LogitsProcessor, load_logits_processors
from procengine.logits_state import LogitsState
from procengine.messages import StepInput
from procengine.models.llama import LlamaModel
from procengine.row_features import NEEDS_HISTORY, NEEDS_LOGITS_STATE, SAMPLING
from procengine.slot_state import SlotState
from procengine.staging import StagingRing
from procengine.step_output import Logprobs, PassTimes, PromptLogprobs, SampledTokens, StepOutput, accepted_samples
from procengine.step_payload import SLOT_ROW, STEP_SECTIONS, cut_sections

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["GenerateRunner", "open_runner"]

Int32s = NDArray[np.int32]
_LOGITS_CHUNK = 64  # prompt positions whose logits exist at once


@dataclass(frozen=True, slots=True)
class _Pass:
    """Rows of one forward pass, on the device unless named host."""

    slots: Tensor  # int64 [rows]
    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    token_slots: Tensor  # int64 [tokens]
    query_start_loc: Tensor  # int32 [rows + 1]
    seq_lens: Tensor  # int32 [rows]
    sample_tokens: Tensor | None  # int64 [samples], the tokens whose hidden states are sampled; None: all
    sample_slots: Tensor  # int64 [samples]
    sample_positions: Tensor  # int64 [samples], where the drawn tokens stand
    num_decode_rows: int
    max_query_len: int
    max_seq_len: int
    host_sample_slots: Int32s
    host_sample_positions: Int32s


class GenerateRunner:
    """Runs steps in the order given. One per device."""

    def __init__(
        self,
        model: LlamaModel,
        cache: KVTensors,
        *,
        vocab_size: int,
        max_num_seqs: int,
        max_model_len: int,
        depth: int,
        device: torch.device,
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._slots = SlotState(max_num_seqs, -(-max_model_len // cache.block_size), device)
        self._logits = LogitsState(max_num_seqs, vocab_size, device)
        self._staging = StagingRing(depth + 1, device)
        self._processors = processors

    @torch.inference_mode()
    def run(self, header: StepInput, payload: Int32s) -> Iterator[StepOutput]:
        """The outputs of a step, one for each forward pass, in order. `payload` is int32 [n] and not kept."""
        started_ns = time.monotonic_ns()
        host_payload, device_payload = self._staging.stage(header.step_id, payload)
        host = cut_sections(STEP_SECTIONS, header.sizes, host_payload)
        on_device = _cut(header.sizes, device_payload)
        self._update_slots(host, on_device)
        rows = self._first_pass(header, host, on_device)
        for micro_step in range(header.decode_steps):
            if micro_step:
                rows = self._next_pass(rows, host["row_steps"], micro_step)
                host = {**host, "masked_rows": host["masked_rows"][:0]}  # rows with a grammar take part in one pass
            staged_ns = time.monotonic_ns()
            hidden = self._forward(rows)
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

    def _update_slots(self, host: dict[str, Int32s], on_device: dict[str, Tensor]) -> None:
        self._slots.update(host, on_device)
        if host["slot_rows"].size:
            placed = host["slot_rows"].reshape(-1, len(SLOT_ROW))
            slots, features = placed[:, SLOT_ROW.index("slot")], placed[:, SLOT_ROW.index("features")]
            self._logits.place(slots, features, placed[:, -3:].copy().view(np.float32))
            self._logits.take_lists(host["slot_lists"])

    def _first_pass(self, header: StepInput, host: dict[str, Int32s], on_device: dict[str, Tensor]) -> _Pass:
        slots = on_device["slots"].long()
        start_loc = on_device["query_start_loc"]
        is_decode_only = header.num_tokens == header.num_rows
        sample_rows, sample_tokens, positions = _samples(host)
        token_slots = (
            slots if is_decode_only else torch.repeat_interleave(slots, start_loc.diff(), output_size=header.num_tokens)
        )
        samples_all = is_decode_only and header.num_samples == header.num_rows
        index = None if samples_all else self._to_device(sample_rows)
        return _Pass(
            slots=slots,
            input_ids=self._slots.resolve_tokens(on_device["input_ids"]),
            positions=on_device["positions"].long(),
            token_slots=token_slots,
            query_start_loc=start_loc,
            seq_lens=on_device["seq_lens"],
            sample_tokens=None if samples_all else self._to_device(sample_tokens),
            sample_slots=slots if index is None else slots[index],
            sample_positions=on_device["seq_lens"].long() if samples_all else self._to_device(positions),
            num_decode_rows=header.num_decode_rows,
            max_query_len=header.max_query_len,
            max_seq_len=header.max_seq_len,
            host_sample_slots=host["slots"][sample_rows],
            host_sample_positions=positions,
        )

    def _next_pass(self, rows: _Pass, row_steps: Int32s, micro_step: int) -> _Pass:
        """The decode rows that go on, one position further. Their tokens are in the device's own table."""
        was_here = row_steps[row_steps >= micro_step]
        stays = np.flatnonzero(was_here > micro_step)
        keep = torch.from_numpy(stays).to(self._device)
        slots = rows.slots[keep]
        return replace(
            rows,
            slots=slots,
            input_ids=self._slots.last_tokens[slots],
            positions=rows.positions[keep] + 1,
            token_slots=slots,
            query_start_loc=rows.query_start_loc[: stays.size + 1],
            seq_lens=rows.seq_lens[keep] + 1,
            sample_slots=slots,
            sample_positions=rows.sample_positions[keep] + 1,
            num_decode_rows=stays.size,
            max_seq_len=rows.max_seq_len + 1,
            host_sample_slots=rows.host_sample_slots[stays],
            host_sample_positions=rows.host_sample_positions[stays] + np.int32(1),
        )

    def _forward(self, rows: _Pass) -> Tensor:
        meta = self._attention_metadata(rows)
        return self._model.forward(rows.input_ids, rows.positions, self._attention(meta))

    def _sample(
        self, hidden: Tensor, rows: _Pass, header: StepInput, host: dict[str, Int32s], on_device: dict[str, Tensor]
    ) -> Callable[[], SampledTokens]:
        prompt = self._prompt_logprobs(hidden, host, on_device) if host["prompt_rows"].size else None
        if not rows.host_sample_slots.size:
            return self._to_host(None, None, None, prompt)
        logits = self._model.compute_logits(hidden if rows.sample_tokens is None else hidden[rows.sample_tokens])
        asked = self._asked_logprobs(rows, header)
        raw = logits[asked[1]] if asked is not None else None  # log probabilities are the model's own
        logits = self._adjust(logits, rows, header, host, on_device)
        features = SamplingFeatures(header.features & SAMPLING)
        tokens = sample(logits, self._sampling_tensors(rows, features), features)
        self._slots.last_tokens[rows.sample_slots] = tokens
        if header.features & NEEDS_HISTORY:
            self._logits.record(rows.host_sample_slots, tokens)
        logprobs = None
        if asked is not None and raw is not None:
            logprobs = (asked[0], *gather_logprobs(raw, tokens[asked[1]], header.num_logprobs))
        return self._to_host(tokens, _proposals(host), logprobs, prompt)

    def _adjust(
        self, logits: Tensor, rows: _Pass, header: StepInput, host: dict[str, Int32s], on_device: dict[str, Tensor]
    ) -> Tensor:
        """Apply what rows ask for beyond temperature and filters. A batch in which nobody does pays nothing."""
        if header.features & NEEDS_LOGITS_STATE:
            logits = self._logits.adjust(logits, rows.host_sample_slots, rows.host_sample_positions)
        if host["masked_rows"].size:
            masked = on_device["masked_rows"].long()
            apply_token_bitmask(logits, masked, on_device["mask_words"].view(masked.numel(), -1))
        for processor in self._processors:
            keys = self._slots.keys[rows.host_sample_slots]
            logits = processor(logits, LogitsContext(keys, rows.host_sample_positions))
        return logits

    def _attention_metadata(self, rows: _Pass) -> AttentionMetadata:
        block_size = self._cache.block_size
        tables = self._slots.block_tables
        blocks = tables[rows.token_slots, rows.positions // block_size].long()
        return AttentionMetadata(
            num_decode_rows=rows.num_decode_rows,
            query_start_loc=rows.query_start_loc,
            seq_lens=rows.seq_lens,
            block_tables=tables[rows.slots, : -(-rows.max_seq_len // block_size)],
            slot_mapping=blocks * block_size + rows.positions % block_size,
            max_query_len=rows.max_query_len,
            max_seq_len=rows.max_seq_len,
        )

    def _attention(self, meta: AttentionMetadata) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
        cache, scale, window = self._cache, self._model.scale, self._model.sliding_window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            # All rows write before any row reads: a block may be shared in the very step that fills it.
            write_kv(k, v, cache.keys[layer], cache.values[layer], meta.slot_mapping)
            return paged_attention(q, cache.keys[layer], cache.values[layer], meta, scale, window)

        return attend

    def _sampling_tensors(self, rows: _Pass, features: SamplingFeatures) -> SamplingTensors:
        state, slots = self._slots, rows.sample_slots
        if not features:  # all greedy: the values are not read
            empty = state.reals[:0, 0]
            return SamplingTensors(empty, state.top_k[:0], empty, empty, state.seeds[:0], state.seeds[:0])
        temperature, top_p, min_p = state.reals[slots].unbind(1)
        return SamplingTensors(temperature, state.top_k[slots], top_p, min_p, state.seeds[slots], rows.sample_positions)

    def _asked_logprobs(self, rows: _Pass, header: StepInput) -> tuple[Int32s, Tensor] | None:
        """Samples whose log probabilities are wanted, on the host and on the device."""
        if header.num_logprobs < 0:
            return None
        asked = np.flatnonzero(self._slots.num_logprobs[rows.host_sample_slots] >= 0).astype(np.int32)
        return (asked, self._to_device(asked)) if asked.size else None

    def _prompt_logprobs(
        self, hidden: Tensor, host: dict[str, Int32s], on_device: dict[str, Tensor]
    ) -> tuple[Int32s, Tensor, Tensor, Tensor]:
        """Log probabilities of the tokens that follow the first tokens of some rows, a few logits at a time."""
        wanted = host["prompt_rows"].reshape(-1, 3)
        starts, seq_lens = host["query_start_loc"], host["seq_lens"]
        width = int(wanted[:, 2].max())
        spans, parts, done = [], [], 0
        for row, count, _ in wanted.tolist():
            first_position = int(seq_lens[row] - (starts[row + 1] - starts[row])) + 1
            key = self._slots.keys[host["slots"][row] : host["slots"][row] + 1].view(np.int32)
            spans.append([*key.tolist(), first_position, count])
            for at in range(0, count, _LOGITS_CHUNK):
                size = min(_LOGITS_CHUNK, count - at)
                logits = self._model.compute_logits(hidden[starts[row] + at : starts[row] + at + size])
                targets = on_device["prompt_targets"][done + at : done + at + size]
                parts.append(gather_logprobs(logits, targets, width))
            done += count
        token_ids, logprobs, ranks = (torch.cat(column) for column in zip(*parts, strict=True))
        return np.array(spans, np.int32), token_ids, logprobs, ranks

    def _to_host(
        self,
        tokens: Tensor | None,
        proposals: tuple[Int32s, Int32s] | None,
        logprobs: tuple[Int32s, Tensor, Tensor, Tensor] | None,
        prompt: tuple[Int32s, Tensor, Tensor, Tensor] | None,
    ) -> Callable[[], SampledTokens]:
        """Start the copies to the host; the returned function waits for them."""
        on_host = None if tokens is None else tokens.to("cpu", non_blocking=True)
        tops = None if logprobs is None else [t.to("cpu", non_blocking=True) for t in logprobs[1:]]
        prompt_tops = None if prompt is None else [t.to("cpu", non_blocking=True) for t in prompt[1:]]
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()

        def wait() -> SampledTokens:
            if copied is not None:
                copied.synchronize()
            token_ids = np.zeros(0, np.int32) if on_host is None else on_host.numpy()
            return SampledTokens(
                token_ids,
                None if proposals is None else accepted_samples(token_ids, *proposals),
                None if logprobs is None or tops is None else Logprobs(logprobs[0], *_ranked(tops)),
                None if prompt is None or prompt_tops is None else PromptLogprobs(prompt[0], *_ranked(prompt_tops)),
            )

        return wait

    def _to_device(self, rows: Int32s) -> Tensor:
        return torch.from_numpy(rows.astype(np.int64)).to(self._device, non_blocking=True)


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


def _proposals(host: dict[str, Int32s]) -> tuple[Int32s, Int32s] | None:
    """(what was proposed for the position of each sample, samples of each row), if any row has several."""
    counts = host["sample_counts"]
    if not counts.size:
        return None
    _, tokens, _ = _samples(host)
    following = np.minimum(tokens + 1, host["input_ids"].size - 1)  # beyond a row's last sample nothing was proposed
    return host["input_ids"][following].copy(), counts.copy()


def _ranked(tops: list[Tensor]) -> tuple[Int32s, NDArray[np.float32], Int32s]:
    """The likeliest tokens rank 1, 2, ...; the chosen one, which comes first, says its own rank."""
    token_ids, values, ranks = (t.numpy() for t in tops)
    ordered = np.tile(np.arange(token_ids.shape[1], dtype=np.int32), (len(token_ids), 1))
    ordered[:, 0] = ranks
    return token_ids, values, ordered


def open_runner(device: Device) -> GenerateRunner:
    """The runner of `generate` steps on `device`, with its KV pool."""
    config = device.config
    return GenerateRunner(
        device.model,
        KVTensors(device.model, device.num_blocks, config.cache.block_size, device.dtype, device.torch_device),
        vocab_size=config.model.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.scheduler.max_model_len,
        depth=config.scheduler.async_depth,
        device=device.torch_device,
        processors=load_logits_processors(config.worker.logits_processors, config.model),
    )


def _cut(sizes: tuple[int, ...], payload: Tensor) -> dict[str, Tensor]:
    return dict(zip(STEP_SECTIONS, payload.split(list(sizes)), strict=True))
