"""Which implementation of an operation runs where.

Owns: the table of backends and the choice among them. Never does: run an operation, or read the environment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from procengine.errors import ConfigError

__all__ = [
    "FP8_CAPABILITY",
    "OPERATIONS",
    "Backend",
    "Conditions",
    "cache_dtypes",
    "preferred_block_size",
    "resolve_backend",
]

logger = logging.getLogger(__name__)

# rowwise: norms, activations, rope with the write to the cache, changes to logits, sampling, log probabilities.
OPERATIONS = ("attention", "rowwise")
FP8_CAPABILITY = (8, 9)  # of GPUs, from which on there is e4m3


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a backend has to cope with.

    Attributes:
        quantized_cache: "int8" or "fp8", if keys and values are kept as that; None: in `dtype`.
        capability: of a GPU that is there; None: nobody has looked.
    """

    device_type: str  # "cpu" or "cuda"
    dtype: str = "float32"
    block_size: int = 16
    head_dim: int = 64
    quantized_cache: str | None = None
    capability: tuple[int, int] | None = None


_WhyNot = Callable[[Conditions], str | None]  # None: nothing speaks against it


def _nothing(_: Conditions) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Backend:
    """A named implementation: why it cannot run, and why it is not chosen where nobody names it."""

    name: str
    why_not: _WhyNot = _nothing
    why_not_auto: _WhyNot = _nothing
    block_sizes: int = 1  # of the KV cache: multiples of this
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    cache_dtypes: tuple[str, ...] = ("int8", "fp8")  # of the KV cache, beside `dtype`


def _why_not_flash_attn(conditions: Conditions) -> str | None:
    if find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    if conditions.device_type != "cuda":
        return f"it is for GPUs, not for a {conditions.device_type}"
    if conditions.head_dim > 256 or conditions.head_dim % 8:
        return f"its heads have at most 256 dimensions, a multiple of 8, and the model's have {conditions.head_dim}"
    try:  # it is built for one version of torch, and other packages of its makers have its name without its functions
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: F401
    except ImportError as error:
        return f"flash-attn cannot be loaded ({error})"
    return None


def _why_not_triton(conditions: Conditions) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if conditions.device_type == "cuda":
        return _why_no_fp8(conditions)
    from triton import knobs

    return None if knobs.runtime.interpret else f"it compiles for GPUs, not for a {conditions.device_type}"


def _why_no_fp8(conditions: Conditions) -> str | None:
    found = conditions.capability
    if conditions.quantized_cache != "fp8" or found is None or found >= FP8_CAPABILITY:
        return None
    needed, has = (".".join(map(str, one)) for one in (FP8_CAPABILITY, found))
    return f"kv_cache_dtype fp8 takes a GPU of compute capability {needed}, and this one has {has}"


def _why_not_interpreted(conditions: Conditions) -> str | None:
    return None if conditions.device_type == "cuda" else "its interpreter is for tests"


_FLASH_ATTN = Backend(
    "flash_attn", _why_not_flash_attn, block_sizes=256, dtypes=("bfloat16", "float16"), cache_dtypes=()
)  # version 2, whose paged cache takes no smaller blocks, and no numbers with scales
_TRITON = Backend("triton", _why_not_triton, _why_not_interpreted)
_TORCH = Backend("torch")

# Best first: "auto" takes the first against which nothing speaks.
_BACKENDS: dict[str, tuple[Backend, ...]] = {
    "attention": (_FLASH_ATTN, _TRITON, _TORCH),
    "rowwise": (_TRITON, _TORCH),
}


def preferred_block_size(attention_backend: str, default: int) -> int:
    """What the block size of the KV cache is if nobody says. Of a backend that does not exist: the default."""
    sizes = {backend.name: backend.block_sizes for backend in _BACKENDS["attention"]}.get(attention_backend, 1)
    return -(-default // sizes) * sizes


def cache_dtypes(attention_backend: str) -> tuple[str, ...]:
    """Of the quantised KV caches those that a backend can read; of "auto", that some can."""
    backends = _BACKENDS["attention"]
    return tuple({dtype for one in backends if attention_backend in ("auto", one.name) for dtype in one.cache_dtypes})


def _why_not(backend: Backend, conditions: Conditions) -> str | None:
    if conditions.block_size % backend.block_sizes:
        return f"its KV blocks are multiples of {backend.block_sizes} tokens, and block_size is {conditions.block_size}"
    if conditions.dtype not in backend.dtypes:
        return f"it computes in {' or '.join(backend.dtypes)}, not in {conditions.dtype}"
    if conditions.quantized_cache is not None and conditions.quantized_cache not in backend.cache_dtypes:
        return (
            f"it reads keys and values in {conditions.dtype} alone, and kv_cache_dtype is {conditions.quantized_cache}"
        )
    return backend.why_not(conditions)


@cache  # one answer, and with it one log line, for each question
def resolve_backend(op: str, name: str, conditions: Conditions) -> str:
    """The backend of `op`. `name` is a backend or "auto".

    Raises ConfigError for a backend that does not exist or cannot run under these conditions.
    """
    if op not in _BACKENDS:
        raise ConfigError(f"unknown operation {op!r}; there are: {', '.join(OPERATIONS)}")
    if name == "auto":
        return _choose(op, conditions)
    found = next((backend for backend in _BACKENDS[op] if backend.name == name), None)
    if found is None:
        names = ", ".join(backend.name for backend in _BACKENDS[op])
        raise ConfigError(f"unknown {op} backend {name!r}; there are: auto, {names}")
    reason = _why_not(found, conditions)
    if reason is not None:
        raise ConfigError(f"{op} backend {name!r} cannot run on {conditions.device_type}: {reason}")
    return name


def _choose(op: str, conditions: Conditions) -> str:
    backends = _BACKENDS[op]
    reasons = {one.name: _why_not(one, conditions) or one.why_not_auto(conditions) for one in backends}
    chosen = next((name for name, reason in reasons.items() if reason is None), None)
    refused = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items() if reason is not None)
    if chosen is None:
        raise ConfigError(f"no {op} backend runs on {conditions.device_type}: {refused}")
    logger.info("%s on %s: %s%s", op, conditions.device_type, chosen, f" ({refused})" if refused else "")
    return chosen
