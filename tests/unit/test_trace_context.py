"""`traceparent`, as W3C Trace Context defines it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.errors import InvalidRequestError
from procengine.trace_context import TraceContext

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_example_of_the_standard() -> None:
    context = TraceContext.parse(EXAMPLE)
    assert context == TraceContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, 1)
    assert context.is_sampled and not TraceContext.parse(EXAMPLE[:-1] + "0").is_sampled
    assert str(context) == EXAMPLE


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 255))
def test_words_and_text_hold_all_of_it(trace_id: int, span_id: int, flags: int) -> None:
    context = TraceContext(trace_id, span_id, flags)
    words = context.to_words()
    assert all(-(2**63) <= word < 2**63 for word in words)
    assert TraceContext.from_words(words) == TraceContext.parse(str(context)) == context


def test_what_a_later_version_appends_is_passed_over() -> None:
    assert TraceContext.parse("01" + EXAMPLE[2:] + "-what-ever") == TraceContext.parse(EXAMPLE)


@pytest.mark.parametrize(
    "text",
    [
        " ",
        "00",
        EXAMPLE.upper(),
        EXAMPLE + "-00",  # version 00 ends with the flags
        "ff" + EXAMPLE[2:],
        EXAMPLE[:-3],
        "00-" + "0" * 32 + EXAMPLE[35:],
        EXAMPLE[:36] + "0" * 16 + "-01",
        EXAMPLE + "\n",
        "00-" + "\N{ARABIC-INDIC DIGIT ZERO}" * 32 + EXAMPLE[35:],  # digits, but not of ASCII
        "01" + EXAMPLE[2:] + "-" + "x" * 300,
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"^traceparent: "):
        TraceContext.parse(text)
