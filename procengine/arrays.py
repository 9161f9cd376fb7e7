"""`Arrays`: where a runner keeps its state: numpy arrays on the host, or tensors on a device.

Owns: the little that the two do differently. Indexing, assignment and addition are written alike for both, so a runner
is one piece of code. Never does: name torch or numpy's own; `host_arrays` and `torch_arrays` do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = ["A", "Array", "Arrays", "ElementType", "RowKernels", "Staging"]

ElementType = Literal["bool", "int8", "int32", "int64", "float32", "bfloat16", "float16"]


class Array(Protocol):
    """What a numpy array and a tensor have in common, as far as runners use it."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...
    def __setitem__(self, index: Any, value: Any, /) -> None: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __rsub__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __or__(self, other: Any, /) -> Any: ...
    def __lshift__(self, other: Any, /) -> Any: ...


A = TypeVar("A", bound=Array)
_Given = TypeVar("_Given", bound=Array, covariant=True)


@dataclass(frozen=True, slots=True)
class RowKernels(Generic[A]):
    """Operations on rows of logits and of hidden states, by the backend for these arrays; `reference.py` of `kernels/`
    `logits`, `sampling` and `pooling` says what they take."""

    add_rows: Callable[[A, A, A, A], None]
    apply_penalties: Callable[[A, A, A, A, A, A], None]
    apply_token_bitmask: Callable[[A, A, A], None]
    ban_sequences: Callable[[A, A, A, A, A], None]
    ban_tokens_before: Callable[[A, A, A, A], None]
    gather_logprobs: Callable[[A, A, int], tuple[A, A, A]]
    pool_last: Callable[[A, A], A]
    pool_mean: Callable[[A, A], A]


class Staging(Protocol[_Given]):
    """The way of step payloads to the device."""

    def stage(self, step_id: int, payload: NDArray[np.int32]) -> tuple[NDArray[np.int32], _Given]:
        """A payload, int32 [n], which may be unaligned and is not kept, as an aligned host array and as a device array.
        Both are valid for as many steps as there are buffers."""
        ...


class Arrays(Protocol[A]):
    """Arrays on one device. What it gives lies there."""

    @property
    def kernels(self) -> RowKernels[A]: ...

    @property
    def memory_errors(self) -> tuple[type[Exception], ...]:
        """What is raised when the device has no memory left."""
        ...

    def new(self, shape: Sequence[int], dtype: ElementType, fill: float = 0) -> A:
        """`fill` everywhere. Zeros on the host take memory only when they are first written."""
        ...

    def send(self, values: NDArray[Any]) -> A:
        """Host values, contiguous, which are not changed any more."""
        ...

    def fetch(self, arrays: Sequence[A]) -> Callable[[], list[NDArray[Any]]]:
        """Begin to copy to the host; the returned function, called once and on any thread, waits for it."""
        ...

    def open_staging(self, depth: int) -> Staging[A]: ...

    def widen(self, array: A) -> A:
        """int64, from integers."""
        ...

    def as_floats(self, bits: A) -> A:
        """float32 whose bits are these int32, which need not be contiguous."""
        ...

    def to_float32(self, array: A) -> A:
        """The same floats as float32."""
        ...

    def where(self, condition: A, yes: A, no: A | int) -> A: ...

    def concatenate(self, parts: Sequence[A], axis: int) -> A: ...

    def without_gradients(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with nothing recorded of what it computes."""
        ...

    def on_tensors(self, function: Callable[..., Any], why: str) -> Callable[..., A]:
        """A function of a tensor and other values to a tensor, as one of and to these arrays. `why` goes to the log
        where torch has to be loaded for it."""
        ...
