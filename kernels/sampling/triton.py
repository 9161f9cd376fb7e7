"""Sampling in Triton: one program a row, filters by a search for their threshold, no sort.

Owns: the kernel and its launch. Never does: keep state, change logits, or wait for the device.

A filter keeps the largest logits, so it is a threshold: all above it, and of those equal to it the ones of lowest id,
as many as there is room for. A threshold is found among float32 values in their order as integers, sixteen candidates a
pass over the row: eight passes find it exactly, whatever the row looks like, where a sort would move the whole row many
times. The row stays in the cache from pass to pass.

The draw is the reference's (Gumbel-max with `randomness`' hash), so both give the same token, unless two candidates are
as close as the rounding of a logarithm, or the mass of a nucleus is as close to its bound as that of a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from procengine.kernels.sampling.inputs import GREEDY_TEMPERATURE, SamplingColumns, SamplingFeatures
from procengine.kernels.sampling.randomness import row_keys

__all__ = ["sample"]

_BLOCK = 4096
_SEARCH_BLOCK = 1024  # sixteen candidates for each of its entries
_NUM_WARPS = 16  # a row has one program: what it waits for memory is what it takes


def sample(logits: Tensor, tensors: SamplingColumns[Tensor], features: SamplingFeatures) -> Tensor:
    """As the reference. logits: float32 [S, V], rows contiguous; returns int32 [S]."""
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return tokens
    is_random = bool(features & SamplingFeatures.RANDOM)
    none = tokens  # stands for what a greedy batch does not read
    reals = (tensors.temperature, tensors.top_p, tensors.min_p)  # often columns of one table
    assert len({column.stride(0) for column in reals}) == 1 or not is_random
    assert tensors.top_k.is_contiguous()
    _sample_kernel[(num_rows,)](
        logits,
        tokens,
        tensors.temperature if is_random else none,
        tensors.top_k if is_random else none,
        tensors.top_p if is_random else none,
        tensors.min_p if is_random else none,
        row_keys(tensors.seeds, tensors.positions) if is_random else none,
        logits.stride(0),
        tensors.temperature.stride(0),
        vocab_size,
        int(features),
        GREEDY=GREEDY_TEMPERATURE,
        IS_RANDOM=is_random,
        TOP_K=int(SamplingFeatures.TOP_K),
        TOP_P=int(SamplingFeatures.TOP_P),
        MIN_P=int(SamplingFeatures.MIN_P),
        BLOCK=min(_BLOCK, triton.next_power_of_2(vocab_size)),
        SEARCH_BLOCK=min(_SEARCH_BLOCK, triton.next_power_of_2(vocab_size)),
        num_warps=_NUM_WARPS,
    )
    return tokens


# Which filters a batch uses is asked when it runs: the kernel takes seconds to compile, which no step is to wait for.
@triton.jit(
    do_not_specialize=["features", "reals_stride"],
    do_not_specialize_on_alignment=["temperatures", "top_ks", "top_ps", "min_ps"],
)
def _sample_kernel(
    logits: tl.tensor,
    tokens: tl.tensor,
    temperatures: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    keys: tl.tensor,
    stride: tl.tensor,
    reals_stride: tl.tensor,
    vocab_size: tl.tensor,
    features: tl.tensor,
    GREEDY: tl.constexpr,
    IS_RANDOM: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
    SEARCH_BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * stride
    best, highest = _argmax(row_logits, vocab_size, BLOCK)
    if IS_RANDOM:
        temperature = tl.load(temperatures + row * reals_stride)
        if temperature >= GREEDY:
            top = tl.div_rn(highest, temperature)
            bound = tl.full([], -2147483648, tl.int32)  # everything is above it
            vacancies = tl.full([], 0, tl.int32)
            if (features & MIN_P) != 0:
                min_p = tl.load(min_ps + row * reals_stride)
                if min_p > 0:
                    floor = top + tl.log(tl.minimum(min_p, 1.0))
                    bound = _ordered(floor) - 1
            if (features & TOP_K) != 0:
                top_k = tl.load(top_ks + row)
                if (top_k > 0) & (top_k < vocab_size):
                    bound, vacancies = _top_k(row_logits, vocab_size, temperature, top_k, bound, top, SEARCH_BLOCK)
            if (features & TOP_P) != 0:
                top_p = tl.load(top_ps + row * reals_stride)
                if top_p < 1.0:
                    bound, vacancies = _top_p(
                        row_logits, vocab_size, temperature, top_p, bound, vacancies, top, SEARCH_BLOCK
                    )
            best = _draw(row_logits, vocab_size, temperature, tl.load(keys + row), bound, vacancies, BLOCK)
    tl.store(tokens + row, best)


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """int32 that compare as the float32 do. Minus zero is zero."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _load_scaled(row_logits: tl.tensor, ids: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    # Rounded as the reference rounds it: a filter's bound is compared with it.
    return tl.div_rn(tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf")), temperature)


@triton.jit
def _argmax(row_logits: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The lowest id of the largest logit, int32, and that logit."""
    best, highest = tl.full([], 0, tl.int32), tl.full([], float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        values = tl.load(row_logits + ids, mask=ids < vocab_size, other=float("-inf"))
        tile = tl.max(values, axis=0)
        if tile > highest:
            highest = tile
            best = tl.min(tl.where(values == tile, ids, 2147483647), axis=0)
    return best, highest


@triton.jit
def _top_k(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    bound: tl.tensor,
    top: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The bound that leaves the k largest of what is above `bound`, and how many equal to it still have room.

    Looks for the lowest b with fewer than k values above it: low is never that, high always is.
    """
    low, high = bound.to(tl.int64) - 1, _ordered(top).to(tl.int64)
    numbers = tl.arange(0, 16)
    if _count_above(row_logits, vocab_size, temperature, bound, BLOCK) < top_k:
        high = bound.to(tl.int64)  # the filter before left no more than k
        low = high - 1
    while high - low > 1:
        width = high - low
        candidates = tl.minimum(low + 1 + width * numbers // 16, high)
        above = _count_all_above(row_logits, vocab_size, temperature, candidates, BLOCK)
        is_enough = above < top_k
        high = tl.min(tl.where(is_enough, candidates, high), axis=0)
        low = tl.max(tl.where(is_enough, low, candidates), axis=0)
    found = high.to(tl.int32)
    room = top_k - _count_above(row_logits, vocab_size, temperature, found, BLOCK)
    return found, tl.where(found == bound, 0, room)


@triton.jit
def _count_above(
    row_logits: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor, bound: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    count = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        order = _ordered(_load_scaled(row_logits, ids, vocab_size, temperature))
        count += tl.sum(((order > bound) & (ids < vocab_size)).to(tl.int32), axis=0)
    return count


@triton.jit
def _count_all_above(
    row_logits: tl.tensor, vocab_size: tl.tensor, temperature: tl.tensor, bounds: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """int32 [16]: how many are above each of the bounds, int64 [16] of int32's range."""
    limits = bounds.to(tl.int32)[None, :]
    counts = tl.zeros([BLOCK, 16], tl.int32)  # added up at the end: threads do not wait for each other meanwhile
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        order = _ordered(_load_scaled(row_logits, ids, vocab_size, temperature))
        counts += ((order[:, None] > limits) & (ids < vocab_size)[:, None]).to(tl.int32)
    return tl.sum(counts, axis=0)


@triton.jit
def _mass_above(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    top: tl.tensor,
    bounds: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """float64 [16]: the sum of exp(value - top) above each of the bounds, int64 [16] of int32's range."""
    limits = bounds.to(tl.int32)[None, :]
    sums = tl.zeros([BLOCK, 16], tl.float64)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = _load_scaled(row_logits, ids, vocab_size, temperature)
        masses = tl.exp(scaled - top).to(tl.float64)
        is_above = (_ordered(scaled)[:, None] > limits) & (ids < vocab_size)[:, None]
        sums += tl.where(is_above, masses[:, None], 0.0)
    return tl.sum(sums, axis=0)


@triton.jit
def _value_of(order: tl.tensor) -> tl.tensor:
    """The float32 whose `_ordered` this is."""
    return tl.where(order >= 0, order, order ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _top_p(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    top_p: tl.tensor,
    bound: tl.tensor,
    vacancies: tl.tensor,
    top: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The bound that leaves the smallest set of largest values whose mass reaches top_p of what `bound` left.

    Looks for the lowest b such that the mass above it is less than top_p.
    """
    numbers = tl.arange(0, 16)
    edge = tl.exp(_value_of(bound) - top).to(tl.float64)
    equal_mass = tl.where(vacancies > 0, edge * vacancies, 0.0)
    before = _mass_above(row_logits, vocab_size, temperature, top, bound.to(tl.int64) + numbers * 0, BLOCK)
    above_bound = tl.max(before, axis=0)
    wanted = (above_bound + equal_mass) * top_p
    low, high = bound.to(tl.int64) - 1, _ordered(top).to(tl.int64)
    if above_bound < wanted:
        high = bound.to(tl.int64)  # the nucleus reaches into those that are equal to the bound
        low = high - 1
    while high - low > 1:
        width = high - low
        candidates = tl.minimum(low + 1 + width * numbers // 16, high)
        masses = _mass_above(row_logits, vocab_size, temperature, top, candidates, BLOCK)
        is_enough = masses < wanted
        high = tl.min(tl.where(is_enough, candidates, high), axis=0)
        low = tl.max(tl.where(is_enough, low, candidates), axis=0)
    found = high.to(tl.int32)
    above = tl.max(_mass_above(row_logits, vocab_size, temperature, top, high + numbers * 0, BLOCK), axis=0)
    each = tl.exp(_value_of(found) - top).to(tl.float64)
    missing = tl.ceil((wanted - above) / tl.where(each > 0.0, each, 1.0))
    room = tl.where(each > 0.0, tl.minimum(tl.maximum(missing, 1.0), vocab_size).to(tl.int32), 0)
    return found, tl.where(found == bound, tl.minimum(room, vacancies), room)


@triton.jit
def _draw(
    row_logits: tl.tensor,
    vocab_size: tl.tensor,
    temperature: tl.tensor,
    key: tl.tensor,
    bound: tl.tensor,
    vacancies: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The id of the largest scaled logit plus noise among those that the bound leaves, int32."""
    low, high = key.to(tl.int32), (key >> 32).to(tl.int32)
    best, highest = tl.full([], 0, tl.int32), tl.full([], float("-inf"), tl.float32)
    num_equal = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scaled = _load_scaled(row_logits, ids, vocab_size, temperature)
        order = _ordered(scaled)
        is_equal = ((order == bound) & (ids < vocab_size)).to(tl.int32)
        number = num_equal + tl.cumsum(is_equal, axis=0)  # of each equal one, from 1
        num_equal += tl.sum(is_equal, axis=0)
        is_kept = (order > bound) | ((is_equal > 0) & (number <= vacancies))
        noisy = tl.where(is_kept & (ids < vocab_size), scaled + _gumbel(ids, low, high), float("-inf"))
        tile = tl.max(noisy, axis=0)
        if tile > highest:
            highest = tile
            best = tl.min(tl.where(noisy == tile, ids, 2147483647), axis=0)
    return best


@triton.jit
def _gumbel(ids: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """The noise of `randomness.add_gumbel_noise`: -log(-log(1 - w)) with w from 31 bits of a hash."""
    z = _mix(ids.to(tl.uint32) * 0x9E3779B9 ^ low.to(tl.uint32))
    z = _mix(z ^ high.to(tl.uint32))
    w = ((z & 0x7FFFFFFF).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    # log1p(-w): what rounding 1 - w did to w is divided out again (Goldberg 1991, theorem 4).
    u = 1.0 - w
    exponential = tl.where(u == 1.0, w, -tl.log(u) * (w / (1.0 - u)))
    return -tl.log(exponential)


@triton.jit
def _mix(z: tl.tensor) -> tl.tensor:
    z = (z ^ (z >> 16)) * 0x7FEB352D
    z = (z ^ (z >> 15)) * 0x846CA68B
    return z ^ (z >> 16)
