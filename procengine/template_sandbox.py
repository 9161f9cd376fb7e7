"""The environment that chat templates run in: Jinja's sandbox, and bounds on what one operation may cost.

Owns: which single operations are refused because they would take all memory, or hold the interpreter for ever (a power
cannot be interrupted). Never does: bound the time of many small ones: whoever renders does that (`Interruptible`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["BoundedSandbox"]

_MAX_NUMBER: Final = 1 << 20  # of an argument: widths, counts
_MAX_SIZE: Final = 1 << 28  # product of the sizes of all that takes part in an operation
_MAX_TEXT: Final = 1 << 25  # characters of a text that is put together
_MAX_BITS: Final = 4096
_ITERATOR_SIZE: Final = 1 << 17  # of one whose length is not known: more than Jinja's range() allows
_WIDTH: Final = re.compile(r"\d{5}|\*")  # in a format: a width of its own, or taken from an argument


class _Generator(CodeGenerator):
    """`a ~ b` becomes a call that can be bounded."""

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - Jinja's name
        self.write("environment.join_texts((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with trimmed blocks. Operations that are too large raise SecurityError."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Generator

    def __init__(self, *extensions: Any) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, *extensions])
        del self.globals["lipsum"]  # makes up text
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """One of the operators above."""
        if operator == "**":
            _check_bits(_bits(left) * abs(right) if isinstance(right, int) else 0)
        elif operator == "%":
            _check_format(left)
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(_bits(left) + _bits(right))
        elif operator == "*":
            _check_size((left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """A function or method."""
        if obj is self.globals["range"]:
            return super().call(context, obj, *args, **kwargs)  # it has a limit of its own
        own = getattr(obj, "__self__", None)
        if getattr(obj, "__name__", "") in ("format", "format_map"):
            _check_format(own)
        _check_arguments((own, *args, *kwargs.values()))
        return super().call(context, obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Any:
        """The `format` of a text, when a template asks for it."""
        if getattr(value, "__name__", "") in ("format", "format_map"):
            _check_format(getattr(value, "__self__", None))
        return super().wrap_str_format(value)

    def join_texts(self, parts: Iterable[Any]) -> str:
        """What `~` does."""
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > _MAX_TEXT:
            raise SecurityError(f"a text of more than {_MAX_TEXT} characters")
        return "".join(texts)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at its arguments first."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "do_format" and args:
            _check_format(args[0])
        _check_arguments((*args, *kwargs.values()))
        return function(*args, **kwargs)

    return call


def _check_arguments(values: Iterable[Any]) -> None:
    values = tuple(values)
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise SecurityError(f"the argument {value:.3g} is more than {_MAX_NUMBER}")
    _check_size(tuple(value for value in values if not isinstance(value, int)))


def _check_size(values: Iterable[Any]) -> None:
    size = 1
    for value in values:
        if isinstance(value, int):
            size *= max(1, abs(value))
        elif isinstance(value, str | bytes | list | tuple | dict):
            size *= max(1, len(value))
        elif isinstance(value, Iterator):
            size *= _ITERATOR_SIZE
    if size > _MAX_SIZE:
        raise SecurityError("an operation that would take too much memory")


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise SecurityError(f"a number of more than {_MAX_BITS} bits")


def _check_format(text: Any) -> None:
    if isinstance(text, str) and _WIDTH.search(text):
        raise SecurityError("a format with a width of five digits, or one that an argument gives")
