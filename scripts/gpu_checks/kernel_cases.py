"""Every Triton kernel of the engine at the sizes of one model.

Owns: the inputs, and the bytes that each must move. Never does: measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate

import torch
from gpu_checks.kernel_case import KernelCase, Sizes
from torch import Tensor

from procengine.kernels.activation import reference as activation_reference
from procengine.kernels.activation import triton as activation
from procengine.kernels.attention import reference as attention_reference
from procengine.kernels.attention import triton as attention
from procengine.kernels.attention.metadata import AttentionMetadata
from procengine.kernels.backends import FP8_CAPABILITY
from procengine.kernels.kv_cache import reference as kv_cache_reference
from procengine.kernels.kv_cache import triton as kv_cache
from procengine.kernels.kv_cache.quantized import KVCache, QuantizedCache, QuantizedKind, open_cache
from procengine.kernels.logits import reference as logits_reference
from procengine.kernels.logits import triton as logits_kernels
from procengine.kernels.norm import reference as norm_reference
from procengine.kernels.norm import triton as norm
from procengine.kernels.rope import RopeSpec, make_rotary_table
from procengine.kernels.rope import reference as rope_reference
from procengine.kernels.rope import triton as rope
from procengine.kernels.sampling import SamplingColumns, SamplingFeatures
from procengine.kernels.sampling import reference as sampling_reference
from procengine.kernels.sampling import triton as sampling
from procengine.kernels.sampling.logprobs import gather_logprobs
from procengine.kernels.sampling.triton_logprobs import gather_logprobs as triton_logprobs

__all__ = ["kernel_cases"]

_MAY_ROUND_OTHERWISE = 1e-3  # of the numbers of 8 bits: those halfway between two, but for a bit, and zeros
_ALL = SamplingFeatures.RANDOM | SamplingFeatures.TOP_K | SamplingFeatures.TOP_P | SamplingFeatures.MIN_P


def kernel_cases(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Iterator[Callable[[], KernelCase]]:
    """Each case, to be made when its turn comes: their tensors are not all there at once."""
    make = _Cases(sizes, dtype, device)
    yield make.rms_norm
    yield make.add_rms_norm
    yield make.silu_and_mul
    yield make.rope
    yield make.rope_and_write_kv
    yield make.write_kv
    yield lambda: make.decode_attention("decode", sizes.rows, sizes.context)
    yield lambda: make.decode_attention("decode, 1 row", 1, 4 * sizes.context)
    yield lambda: make.decode_attention("decode, window and cap", sizes.rows, sizes.context, window=100, softcap=30.0)
    yield make.prefill_attention
    yield make.chunked_attention
    yield make.encoder_attention
    yield lambda: make.sample("greedy", SamplingFeatures.NONE)
    yield lambda: make.sample("random", SamplingFeatures.RANDOM)
    yield lambda: make.sample("top-k, top-p, min-p", _ALL)
    yield make.logprobs
    yield make.penalties
    yield make.bitmask
    if dtype == (torch.bfloat16 if device.type == "cuda" else torch.float32):  # once: they are many to compile
        for kind in make.cache_kinds():
            yield partial(make.rope_and_write_kv, kind)
            yield partial(make.write_kv, kind)
            yield partial(make.decode_attention, "decode", sizes.rows, sizes.context, kind=kind)
            yield partial(make.decode_attention, "decode, 1 row", 1, 4 * sizes.context, kind=kind)
            yield partial(make.chunked_attention, kind)


def _parts(cache: KVCache) -> tuple[Tensor, ...]:
    """To be compared; numbers of 8 bits as integers."""
    return (cache.numbers.view(torch.int8), cache.scales) if isinstance(cache, QuantizedCache) else (cache,)


def _exact(cache: KVCache) -> KVCache:
    """For a reference that computes in float32."""
    return cache if isinstance(cache, QuantizedCache) else cache.float()


def _of_cache(kind: QuantizedKind | None) -> str:
    return "" if kind is None else f", {kind} cache"


class _Cases:
    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self._sizes, self._dtype, self._device = sizes, dtype, device
        self._item = dtype.itemsize
        self._eps = torch.finfo(dtype).eps
        self._generator = torch.Generator(device).manual_seed(11)

    def _randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self._device)
        return values.to(dtype or self._dtype)

    def _ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    # --- rows of hidden states ---

    def rms_norm(self) -> KernelCase:
        x, weight = self._randn(self._sizes.prompt, self._sizes.hidden), self._randn(self._sizes.hidden)
        return KernelCase(
            "rms_norm",
            lambda: (norm.rms_norm(x, weight, 1e-5),),
            lambda: (norm_reference.rms_norm(x, weight, 1e-5),),
            2 * x.numel() * self._item,
            2 * self._eps,
        )

    def add_rms_norm(self) -> KernelCase:
        x, added = (self._randn(self._sizes.prompt, self._sizes.hidden) for _ in range(2))
        weight = self._randn(self._sizes.hidden)
        return KernelCase(
            "add_rms_norm",
            lambda: norm.add_rms_norm(x, added, weight, 1e-5),
            lambda: norm_reference.add_rms_norm(x, added, weight, 1e-5),
            4 * x.numel() * self._item,
            2 * self._eps,
        )

    def silu_and_mul(self) -> KernelCase:
        x = self._randn(self._sizes.prompt, 2 * self._sizes.intermediate)
        return KernelCase(
            "silu_and_mul",
            lambda: (activation.silu_and_mul(x),),
            lambda: (activation_reference.silu_and_mul(x),),
            x.numel() * self._item * 3 // 2,
            2 * self._eps,
        )

    # --- positions and cache ---

    def _heads(self) -> tuple[Tensor, Tensor, Tensor]:
        sizes = self._sizes
        fused = self._randn(sizes.prompt, sizes.heads + 2 * sizes.kv_heads, sizes.head_dim)
        q, k, v = fused.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), dim=1)
        return q, k, v

    def _rotary(self) -> tuple[Tensor, Tensor, Tensor]:
        table = make_rotary_table(RopeSpec(self._sizes.head_dim), self._sizes.prompt)
        cos, sin = (torch.from_numpy(one).to(self._device) for one in (table.cos, table.sin))
        return cos, sin, torch.arange(self._sizes.prompt, dtype=torch.int32, device=self._device)

    def cache_kinds(self) -> tuple[QuantizedKind, ...]:
        """Caches of 8 bits that Triton has here."""
        has_fp8 = self._device.type == "cpu" or torch.cuda.get_device_capability(self._device) >= FP8_CAPABILITY
        return ("int8", "fp8") if has_fp8 else ("int8",)

    def _caches(self, num_blocks: int, count: int, kind: QuantizedKind | None = None) -> list[KVCache]:
        shape = (num_blocks, self._sizes.block_size, self._sizes.kv_heads)
        if kind is None:
            size = (*shape, self._sizes.head_dim)
            return [torch.zeros(size, dtype=self._dtype, device=self._device) for _ in range(count)]
        size = (*shape, self._sizes.head_dim + 4)
        return [open_cache(torch.zeros(size, dtype=torch.int8, device=self._device), kind) for _ in range(count)]

    def _kv_bytes(self, kind: QuantizedKind | None) -> float:
        """Of one number of a key or value, its share of a scale included."""
        return self._item if kind is None else 1 + 4 / self._sizes.head_dim

    def _slots(self, num_blocks: int) -> Tensor:
        places = torch.randperm(num_blocks * self._sizes.block_size, generator=self._generator, device=self._device)
        return places[: self._sizes.prompt]

    def rope(self) -> KernelCase:
        (q, k, _), (cos, sin, positions) = self._heads(), self._rotary()
        return KernelCase(
            "rope",
            lambda: rope.apply_rope(q, k, cos, sin, positions),
            lambda: rope_reference.apply_rope(q, k, cos, sin, positions),
            2 * (q.numel() + k.numel()) * self._item,
            2 * self._eps,
        )

    def rope_and_write_kv(self, kind: QuantizedKind | None = None) -> KernelCase:
        (q, k, v), (cos, sin, positions) = self._heads(), self._rotary()
        num_blocks = 2 * self._sizes.prompt // self._sizes.block_size
        keys, values, other_keys, other_values = self._caches(num_blocks, 4)
        slots = self._slots(num_blocks)

        def run() -> tuple[Tensor, ...]:
            rotated = rope.rope_and_write_kv(q, k, v, cos, sin, positions, keys, values, slots)
            return rotated, *_parts(keys), *_parts(values)

        def reference() -> tuple[Tensor, ...]:
            rotated, rotated_k = rope_reference.apply_rope(q, k, cos, sin, positions)
            kv_cache_reference.write_kv(rotated_k, v, other_keys, other_values, slots)
            return rotated, *_parts(other_keys), *_parts(other_values)

        num_bytes = int(2 * (q.numel() + k.numel()) * self._item + 2 * k.numel() * self._kv_bytes(kind))
        name = f"rope_and_write_kv{_of_cache(kind)}"
        return KernelCase(name, run, reference, num_bytes, 2 * self._eps, may_differ=_MAY_ROUND_OTHERWISE)

    def write_kv(self, kind: QuantizedKind | None = None) -> KernelCase:
        _, k, v = self._heads()
        num_blocks = 2 * self._sizes.prompt // self._sizes.block_size
        keys, values, other_keys, other_values = self._caches(num_blocks, 4)
        slots = self._slots(num_blocks)

        def run() -> tuple[Tensor, ...]:
            kv_cache.write_kv(k, v, keys, values, slots)
            return *_parts(keys), *_parts(values)

        def reference() -> tuple[Tensor, ...]:
            kv_cache_reference.write_kv(k, v, other_keys, other_values, slots)
            return *_parts(other_keys), *_parts(other_values)

        num_bytes = int(2 * k.numel() * (self._item + self._kv_bytes(kind)))
        tolerance = 0.0 if kind is None else 1e-6
        name = f"write_kv{_of_cache(kind)}"
        return KernelCase(name, run, reference, num_bytes, tolerance, may_differ=_MAY_ROUND_OTHERWISE)

    # --- attention ---

    def _paged(self, query_lens: list[int], seq_lens: list[int]) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
        """Contexts in shuffled blocks."""
        sizes = self._sizes
        blocks = [-(-length // sizes.block_size) for length in seq_lens]
        order = torch.randperm(sum(blocks), generator=self._generator, device=self._device).to(torch.int32)
        tables = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32, device=self._device)
        for row, (end, count) in enumerate(zip(accumulate(blocks), blocks, strict=True)):
            tables[row, :count] = order[end - count : end]
        shape = (sum(blocks), sizes.block_size, sizes.kv_heads, sizes.head_dim)
        num_tokens = sum(query_lens)
        meta = AttentionMetadata(
            num_decode_rows=sum(length == 1 for length in query_lens),
            query_start_loc=self._ints([0, *accumulate(query_lens)]),
            seq_lens=self._ints(seq_lens),
            block_tables=tables,
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=self._device),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_lens),
        )
        return self._randn(num_tokens, sizes.heads, sizes.head_dim), self._randn(*shape), self._randn(*shape), meta

    def _quantized(self, floats: Tensor, kind: QuantizedKind) -> QuantizedCache:
        (cache,) = self._caches(floats.shape[0], 1, kind)
        assert isinstance(cache, QuantizedCache)
        slots = torch.arange(floats.shape[0] * floats.shape[1], device=self._device)
        kv_cache_reference.write_kv(floats.flatten(0, 1), floats.flatten(0, 1), cache, cache, slots)
        return cache

    def _paged_case(
        self,
        name: str,
        query_lens: list[int],
        seq_lens: list[int],
        window: int | None = None,
        softcap: float | None = None,
        kind: QuantizedKind | None = None,
    ) -> KernelCase:
        keys: KVCache
        values: KVCache
        q, keys, values, meta = self._paged(query_lens, seq_lens)
        if kind is not None:
            keys, values = self._quantized(keys, kind), self._quantized(values, kind)
        scale = self._sizes.head_dim**-0.5
        pairs_of = list(zip(query_lens, seq_lens, strict=True))
        seen = [length if window is None else min(length, window + query) for query, length in pairs_of]
        kv = 2 * sum(seen) * self._sizes.kv_heads * self._sizes.head_dim
        pairs = sum(query * (length - query / 2) for query, length in pairs_of)
        return KernelCase(
            f"attention, {name}{_of_cache(kind)}",
            lambda: (attention.paged_attention(q, keys, values, meta, scale, window, softcap),),
            lambda: (
                attention_reference.paged_attention(
                    q.float(), _exact(keys), _exact(values), meta, scale, window, softcap
                ),
            ),
            int(kv * self._kv_bytes(kind) + 2 * q.numel() * self._item),
            max(4 * self._eps, 2e-5),
            operations=0 if max(query_lens) == 1 else int(4 * pairs * self._sizes.heads * self._sizes.head_dim),
        )

    def decode_attention(
        self,
        name: str,
        rows: int,
        context: int,
        window: int | None = None,
        softcap: float | None = None,
        kind: QuantizedKind | None = None,
    ) -> KernelCase:
        seq_lens = [max(1, context - 3 * row) for row in range(rows)]  # ends within blocks and at their borders
        return self._paged_case(name, [1] * rows, seq_lens, window, softcap, kind)

    def prefill_attention(self) -> KernelCase:
        return self._paged_case("prompt", [self._sizes.prompt], [self._sizes.prompt])

    def chunked_attention(self, kind: QuantizedKind | None = None) -> KernelCase:
        part = self._sizes.prompt // 4
        query_lens = [1, 1, part, part + 1]
        seq_lens = [self._sizes.context, 7, part, self._sizes.prompt]
        return self._paged_case("mixed", query_lens, seq_lens, kind=kind)

    def encoder_attention(self) -> KernelCase:
        q, k, v = self._heads()
        half = self._sizes.prompt // 2
        starts, scale = self._ints([0, half, self._sizes.prompt]), self._sizes.head_dim**-0.5
        return KernelCase(
            "attention, bidirectional",
            lambda: (attention.varlen_attention(q, k, v, starts, half, scale, causal=False),),
            lambda: (
                attention_reference.varlen_attention(
                    q.float(), k.float(), v.float(), starts, half, scale, causal=False
                ),
            ),
            2 * (q.numel() + k.numel()) * self._item,
            max(4 * self._eps, 2e-5),
            operations=8 * half * half * self._sizes.heads * self._sizes.head_dim,
        )

    # --- logits ---

    def _logits(self) -> Tensor:
        return self._randn(self._sizes.rows, self._sizes.vocab, dtype=torch.float32) * 3

    def sample(self, name: str, features: SamplingFeatures) -> KernelCase:
        logits, rows = self._logits(), self._sizes.rows

        def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=self._device)

        columns = SamplingColumns(
            temperature=column(0.9),
            top_k=column(50, torch.int32),
            top_p=column(0.9),
            min_p=column(0.02),
            seeds=torch.arange(rows, device=self._device) * 977 - 30000,
            positions=torch.arange(rows, device=self._device),
        )
        return KernelCase(
            f"sample, {name}",
            lambda: (sampling.sample(logits, columns, features),),
            lambda: (sampling_reference.sample(logits, columns, features),),
            logits.numel() * 4,
            0.0,
            may_differ=0.0 if features is SamplingFeatures.NONE else 0.02,
        )

    def logprobs(self) -> KernelCase:
        logits = self._logits()
        token_ids = torch.arange(self._sizes.rows, dtype=torch.int32, device=self._device)
        return KernelCase(
            "logprobs",
            lambda: triton_logprobs(logits, token_ids, 5),
            lambda: gather_logprobs(logits, token_ids, 5),
            logits.numel() * 4,
            1e-5,
        )

    def penalties(self) -> KernelCase:
        ours = self._logits()
        shape = (self._sizes.rows, self._sizes.vocab)
        counts = torch.randint(0, 3, shape, generator=self._generator, device=self._device, dtype=torch.int32)
        mask = torch.rand(shape, generator=self._generator, device=self._device) < 0.3
        rows = torch.arange(self._sizes.rows, device=self._device)
        values = torch.tensor([1.3, 0.5, 0.7], device=self._device).repeat(self._sizes.rows, 1)
        expected = ours.clone()

        def run() -> tuple[Tensor, ...]:
            logits_kernels.apply_penalties(ours, rows, counts, mask, rows, values)
            return (ours,)

        def reference() -> tuple[Tensor, ...]:
            logits_reference.apply_penalties(expected, rows, counts, mask, rows, values)
            return (expected,)

        return KernelCase("penalties", run, reference, counts.numel() * (4 + 1 + 8), 1e-6)

    def bitmask(self) -> KernelCase:
        ours = self._logits()
        shape = (self._sizes.rows, -(-self._sizes.vocab // 32))
        words = torch.randint(
            -(2**31), 2**31 - 1, shape, generator=self._generator, device=self._device, dtype=torch.int32
        )
        rows, expected = torch.arange(self._sizes.rows, device=self._device), ours.clone()

        def run() -> tuple[Tensor, ...]:
            logits_kernels.apply_token_bitmask(ours, rows, words)
            return (ours,)

        def reference() -> tuple[Tensor, ...]:
            logits_reference.apply_token_bitmask(expected, rows, words)
            return (expected,)

        return KernelCase("bitmask", run, reference, words.numel() * 4 + ours.numel() * 2, 0.0)
