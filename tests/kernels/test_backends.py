"""The choice of a backend."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from procengine.errors import ConfigError
from procengine.kernels import backends
from procengine.kernels.backends import OPERATIONS, Backend, Conditions, cache_dtypes, resolve_backend

CPU, CUDA = Conditions("cpu"), Conditions("cuda")


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("conditions", [CPU, CUDA])
def test_torch_runs_everywhere(op: str, conditions: Conditions) -> None:
    assert resolve_backend(op, "torch", conditions) == "torch"


@pytest.mark.parametrize("op", OPERATIONS)
def test_auto_is_triton_on_a_gpu_and_torch_elsewhere(op: str) -> None:
    assert resolve_backend(op, "auto", CUDA) == "triton"
    assert resolve_backend(op, "auto", CPU) == "torch"


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_a_quantised_cache_is_for_triton_and_torch(op: str, cache: str) -> None:
    assert resolve_backend(op, "auto", Conditions("cuda", "bfloat16", quantized_cache=cache)) == "triton"
    assert resolve_backend(op, "auto", Conditions("cpu", quantized_cache=cache)) == "torch"
    with pytest.raises(ConfigError, match=f"reads keys and values in bfloat16 alone, and kv_cache_dtype is {cache}"):
        resolve_backend("attention", "flash_attn", Conditions("cuda", "bfloat16", 256, quantized_cache=cache))
    assert set(cache_dtypes("triton")) == set(cache_dtypes("torch")) == {"int8", "fp8"}
    assert cache_dtypes("flash_attn") == ()


@pytest.mark.parametrize("op", OPERATIONS)
def test_fp8_takes_a_gpu_that_has_it(op: str) -> None:
    old, new = (
        Conditions("cuda", "bfloat16", quantized_cache="fp8", capability=capability) for capability in ((8, 6), (8, 9))
    )
    assert resolve_backend(op, "triton", new) == resolve_backend(op, "auto", new) == "triton"
    assert resolve_backend(op, "auto", old) == "torch"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype fp8 takes .* capability 8\.9, and this one has 8\.6"):
        resolve_backend(op, "triton", old)
    ints = Conditions("cuda", "bfloat16", quantized_cache="int8", capability=(8, 6))
    assert resolve_backend(op, "triton", ints) == "triton"


def test_unknown_names_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="there are: auto, "):
        resolve_backend("attention", "cutlass", CPU)
    with pytest.raises(ConfigError, match="unknown operation 'convolution'"):
        resolve_backend("convolution", "auto", CPU)


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend that runs on a GPU, and is chosen there for small blocks only."""
    fast = Backend(
        "fast",
        lambda where: None if where.device_type == "cuda" else "needs a GPU",
        lambda where: None if where.block_size <= 16 else "its blocks are small",
    )
    monkeypatch.setitem(backends._BACKENDS, "attention", (fast, Backend("torch")))
    backends.resolve_backend.cache_clear()
    yield
    backends.resolve_backend.cache_clear()


@pytest.mark.usefixtures("fast")
def test_a_named_backend_that_cannot_run_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="'fast' cannot run on cpu: needs a GPU"):
        resolve_backend("attention", "fast", CPU)
    assert resolve_backend("attention", "fast", Conditions("cuda", block_size=64)) == "fast"


@pytest.mark.usefixtures("fast")
def test_auto_says_once_what_it_chose_and_why_not_the_others(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="procengine.kernels.backends"):
        assert resolve_backend("attention", "auto", CPU) == "torch"
        assert resolve_backend("attention", "auto", CPU) == "torch"
        assert resolve_backend("attention", "auto", CUDA) == "fast"
        assert resolve_backend("attention", "auto", Conditions("cuda", block_size=64)) == "torch"
    assert caplog.messages == [
        "attention on cpu: torch (not fast: needs a GPU)",
        "attention on cuda: fast",
        "attention on cuda: torch (not fast: its blocks are small)",
    ]
