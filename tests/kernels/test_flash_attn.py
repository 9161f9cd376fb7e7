"""The adapter to flash-attn, which cannot be here: what it is called with, by a stand-in that computes from that."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine.errors import ConfigError
from procengine.kernels import backends
from procengine.kernels.attention import reference
from procengine.kernels.backends import Conditions, preferred_block_size, resolve_backend
from tests.kernels.attention_cases import attend_one, make_case


def _one(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
    left, right = options["window_size"]
    assert right == (0 if left >= 0 else -1)
    window = left + 1 if left >= 0 else None
    return attend_one(q, k, v, options["softmax_scale"], window, options["causal"], options["softcap"] or None)


def _pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    return cache[table.long()].flatten(0, 1)[:length]


def with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, **options: Any
) -> Tensor:
    """flash-attn's meaning of these arguments. q: [R, 1, H, D]."""
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    rows = zip(q, cache_seqlens.tolist(), block_table, strict=True)
    return torch.stack(
        [_one(one, _pages(k_cache, table, n), _pages(v_cache, table, n), options) for one, n, table in rows]
    )


def varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """The same. q: [T, H, D]."""
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    parts = []
    spans = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for row, ((start, end), (first, last)) in enumerate(spans):
        assert end - start <= max_seqlen_q
        assert last - first <= max_seqlen_k
        if block_table is None:
            keys, values = k[first:last], v[first:last]
        else:
            keys, values = (_pages(cache, block_table[row], last - first) for cache in (k, v))
        parts.append(_one(q[start:end], keys, values, options))
    assert sum(part.shape[0] for part in parts) == q.shape[0]
    return torch.cat(parts)


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_in: Any = ModuleType("flash_attn")
    stand_in.flash_attn_with_kvcache, stand_in.flash_attn_varlen_func = with_kvcache, varlen
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    name = "procengine.kernels.attention.flash_attn"
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 1.5)])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"), [([1, 1], [3, 70]), ([7], [7]), ([1, 1, 5, 9], [6, 40, 5, 30])], ids=str
)
def test_paged_attention_is_that_of_the_reference(
    adapter: Any, query_lens: list[int], seq_lens: list[int], window: int | None, softcap: float | None
) -> None:
    case = make_case(query_lens, seq_lens)
    found = adapter.paged_attention(case.q, case.k_cache, case.v_cache, case.meta, 0.3, window, softcap)
    torch.testing.assert_close(found, case.expected(0.3, window, softcap), atol=1e-5, rtol=1e-5)


def test_packed_sequences_are_those_of_the_reference(adapter: Any) -> None:
    q, k, v = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    start = torch.tensor([0, 1, 8, 12], dtype=torch.int32)
    for causal, window in ((True, None), (True, 3), (False, None)):
        found = adapter.varlen_attention(q, k, v, start, 7, 0.3, causal, window, 2.0)
        expected = reference.varlen_attention(q, k, v, start, 7, 0.3, causal, window, 2.0)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, adapter: Any) -> Iterator[None]:
    monkeypatch.setattr(backends, "find_spec", lambda _name: object())
    resolve_backend.cache_clear()
    yield
    resolve_backend.cache_clear()


@pytest.mark.usefixtures("installed")
def test_it_says_what_it_takes() -> None:
    fits = Conditions("cuda", "bfloat16", 256, 128)
    assert resolve_backend("attention", "flash_attn", fits) == "flash_attn"
    assert resolve_backend("attention", "auto", fits) == "flash_attn"
    assert resolve_backend("attention", "auto", Conditions("cuda", "bfloat16", 16, 128)) == "triton"
    for conditions, reason in (
        (Conditions("cuda", "bfloat16", 16, 128), "its KV blocks are multiples of 256 tokens, and block_size is 16"),
        (Conditions("cuda", "float32", 256, 128), "it computes in bfloat16 or float16, not in float32"),
        (Conditions("cuda", "float16", 256, 288), "its heads have at most 256 dimensions"),
        (Conditions("cpu", "float16", 256, 128), "it is for GPUs"),
    ):
        with pytest.raises(ConfigError, match=reason):
            resolve_backend("attention", "flash_attn", conditions)


@pytest.mark.usefixtures("installed")
def test_one_that_cannot_be_loaded_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    fits = Conditions("cuda", "bfloat16", 256, 128)
    monkeypatch.setitem(
        sys.modules, "flash_attn", ModuleType("flash_attn")
    )  # as flash-attn 4, which has flash_attn.cute
    assert resolve_backend("attention", "auto", fits) == "triton"
    with pytest.raises(ConfigError, match=r"flash-attn cannot be loaded \(cannot import name"):
        resolve_backend("attention", "flash_attn", fits)


def test_without_it_naming_it_is_an_error() -> None:
    with pytest.raises(ConfigError, match="flash-attn is not installed"):
        resolve_backend("attention", "flash_attn", Conditions("cuda", "bfloat16", 256, 128))


@pytest.mark.parametrize(("backend", "size"), [("auto", 16), ("triton", 16), ("flash_attn", 256), ("other", 16)])
def test_the_block_size_follows_from_the_backend(backend: str, size: int) -> None:
    assert preferred_block_size(backend, 16) == size
