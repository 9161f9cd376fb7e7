"""`GenerateRunner`: one generation step on the device: gather inputs, forward, sample, give the tokens out.

Owns: the KV cache tensors and what the device remembers of each slot (last token, block table, sampling values).
Never does: know a request, a socket or a queue. Nothing in here waits for a GPU: the token of the step before is taken
from the device's own table, and results leave through `StepOutput.wait`, which others call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from procengine.kernels.attention import AttentionMetadata, paged_attention
from procengine.kernels.kv_cache import write_kv
from procengine.kernels.sampling import SamplingFeatures, SamplingTensors, gather_logprobs, sample
from procengine.kv_tensors import KVTensors
from procengine.messages import StepInput
from procengine.models.llama import LlamaModel
from procengine.slot_state import SlotState
from procengine.staging import StagingRing
from procengine.step_output import Logprobs, StepOutput
from procengine.step_payload import STEP_SECTIONS, cut_sections

if TYPE_CHECKING:
    from procengine.device import Device

__all__ = ["GenerateRunner", "open_runner"]

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Pass:
    """Rows of one forward pass, on the device unless named host."""

    slots: Tensor  # int64 [rows]
    input_ids: Tensor  # int32 [tokens]
    positions: Tensor  # int64 [tokens]
    token_slots: Tensor  # int64 [tokens]
    query_start_loc: Tensor  # int32 [rows + 1]
    seq_lens: Tensor  # int32 [rows]
    sample_rows: Tensor | None  # int64 [samples]; None: all rows
    last_tokens: Tensor | None  # int64 [samples], where each sampled row's last token stands; None: everywhere
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
        max_num_seqs: int,
        max_model_len: int,
        depth: int,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = cache
        self._device = device
        self._slots = SlotState(max_num_seqs, -(-max_model_len // cache.block_size), device)
        self._staging = StagingRing(depth + 1, device)

    @torch.inference_mode()
    def run(self, header: StepInput, payload: Int32s) -> Iterator[StepOutput]:
        """The outputs of a step, one for each forward pass, in order. `payload` is int32 [n] and not kept."""
        started = time.monotonic_ns()
        host_payload, device_payload = self._staging.stage(header.step_id, payload)
        host = cut_sections(STEP_SECTIONS, header.sizes, host_payload)
        on_device = _cut(header.sizes, device_payload)
        self._slots.update(host, on_device)
        rows = self._first_pass(header, host, on_device)
        for micro_step in range(header.decode_steps):
            if micro_step:
                rows = self._next_pass(rows, host["row_steps"], micro_step)
            wait = self._forward(rows, header)
            now = time.monotonic_ns()
            yield StepOutput(
                header.step_id,
                micro_step,
                micro_step == header.decode_steps - 1,
                self._slots.keys[rows.host_sample_slots],
                rows.host_sample_positions,
                wait,
                now - started,
            )
            started = time.monotonic_ns()

    def _first_pass(self, header: StepInput, host: dict[str, Int32s], on_device: dict[str, Tensor]) -> _Pass:
        slots = on_device["slots"].long()
        start_loc = on_device["query_start_loc"]
        is_decode_only = header.num_tokens == header.num_rows
        token_slots = (
            slots if is_decode_only else torch.repeat_interleave(slots, start_loc.diff(), output_size=header.num_tokens)
        )
        samples_all = header.num_samples == header.num_rows
        sample_rows = None if samples_all else on_device["sample_rows"].long()
        ends = start_loc[1:] if sample_rows is None else start_loc[1:][sample_rows]
        return _Pass(
            slots=slots,
            input_ids=self._slots.resolve_tokens(on_device["input_ids"]),
            positions=on_device["positions"].long(),
            token_slots=token_slots,
            query_start_loc=start_loc,
            seq_lens=on_device["seq_lens"],
            sample_rows=sample_rows,
            last_tokens=None if is_decode_only and samples_all else ends.long() - 1,
            num_decode_rows=header.num_decode_rows,
            max_query_len=header.max_query_len,
            max_seq_len=header.max_seq_len,
            host_sample_slots=host["slots"][host["sample_rows"]],
            host_sample_positions=host["seq_lens"][host["sample_rows"]],
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
            num_decode_rows=stays.size,
            max_seq_len=rows.max_seq_len + 1,
            host_sample_slots=rows.host_sample_slots[stays],
            host_sample_positions=rows.host_sample_positions[stays] + np.int32(1),
        )

    def _forward(self, rows: _Pass, header: StepInput) -> Callable[[], tuple[Int32s, Logprobs | None]]:
        meta = self._attention_metadata(rows)
        hidden = self._model.forward(rows.input_ids, rows.positions, self._attention(meta))
        if not rows.host_sample_slots.size:
            return lambda: (np.zeros(0, np.int32), None)
        sampled = hidden if rows.last_tokens is None else hidden[rows.last_tokens]
        logits = self._model.compute_logits(sampled)
        slots = rows.slots if rows.sample_rows is None else rows.slots[rows.sample_rows]
        seq_lens = rows.seq_lens if rows.sample_rows is None else rows.seq_lens[rows.sample_rows]
        features = SamplingFeatures(header.features)
        tokens = sample(logits, self._sampling_tensors(slots, seq_lens, features), features)
        self._slots.last_tokens[slots] = tokens
        return self._to_host(tokens, self._logprobs(rows, header, logits, tokens))

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

    def _sampling_tensors(self, slots: Tensor, seq_lens: Tensor, features: SamplingFeatures) -> SamplingTensors:
        state = self._slots
        if not features:  # all greedy: the values are not read
            empty = state.reals[:0, 0]
            return SamplingTensors(empty, state.top_k[:0], empty, empty, state.seeds[:0], state.seeds[:0])
        temperature, top_p, min_p = state.reals[slots].unbind(1)
        return SamplingTensors(temperature, state.top_k[slots], top_p, min_p, state.seeds[slots], seq_lens.long())

    def _logprobs(
        self, rows: _Pass, header: StepInput, logits: Tensor, tokens: Tensor
    ) -> tuple[Int32s, Tensor, Tensor, Tensor] | None:
        if header.num_logprobs < 0:
            return None
        asked = np.flatnonzero(self._slots.num_logprobs[rows.host_sample_slots] >= 0).astype(np.int32)
        if not asked.size:
            return None
        index = torch.from_numpy(asked).to(self._device).long()
        token_ids, logprobs, ranks = gather_logprobs(logits[index], tokens[index], header.num_logprobs)
        return asked, token_ids, logprobs, ranks

    def _to_host(
        self, tokens: Tensor, logprobs: tuple[Int32s, Tensor, Tensor, Tensor] | None
    ) -> Callable[[], tuple[Int32s, Logprobs | None]]:
        """Start the copies to the host; the returned function waits for them."""
        on_host = tokens.to("cpu", non_blocking=True)
        tops = None if logprobs is None else [t.to("cpu", non_blocking=True) for t in logprobs[1:]]
        copied = None
        if self._device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()

        def wait() -> tuple[Int32s, Logprobs | None]:
            if copied is not None:
                copied.synchronize()
            if logprobs is None or tops is None:
                return on_host.numpy(), None
            token_ids, values, ranks = (t.numpy() for t in tops)
            # The likeliest tokens rank 1, 2, ...; the chosen one says its own rank.
            ordered = np.tile(np.arange(token_ids.shape[1], dtype=np.int32), (len(token_ids), 1))
            ordered[:, 0] = ranks
            return on_host.numpy(), Logprobs(logprobs[0], token_ids, values, ordered)

        return wait


def open_runner(device: Device) -> GenerateRunner:
    """The runner of `generate` steps on `device`, with its KV pool."""
    config = device.config
    return GenerateRunner(
        device.model,
        KVTensors(device.model, device.num_blocks, config.cache.block_size, device.dtype, device.torch_device),
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.scheduler.max_model_len,
        depth=config.scheduler.async_depth,
        device=device.torch_device,
    )


def _cut(sizes: tuple[int, ...], payload: Tensor) -> dict[str, Tensor]:
    return dict(zip(STEP_SECTIONS, payload.split(list(sizes)), strict=True))
