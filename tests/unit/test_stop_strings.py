"""StopBuffer: what is shown never depends on how the text was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.errors import InvalidRequestError
from procengine.stop_strings import StopBuffer

# What SmolLM2's greedy tokens for "Here is the English alphabet: ABC" spell.
P2 = ["DEF", "GH", "I", "J", "K", "LM", "N", "OP", "QR", "ST", "UV", "W"]


def run(deltas: list[str], *stops: str, include: bool = False) -> tuple[list[str], str | None]:
    """The non-empty deltas shown, up to the first match, and what matched."""
    buffer = StopBuffer(stops, include)
    shown: list[str] = []
    for delta in deltas:
        emit, matched = buffer.push(delta)
        shown.append(emit)
        if matched is not None:
            return [text for text in shown if text], matched
    shown.append(buffer.flush())
    return [text for text in shown if text], None


def test_det_07_start_of_a_stop_string_is_not_shown() -> None:
    assert run(P2, "DEFGHIJ") == ([], "DEFGHIJ")


@pytest.mark.parametrize(("stop", "text"), [("FGHI", "DE"), ("GHIJ", "DEF"), ("W", "DEFGHIJKLMNOPQRSTUV")])
def test_det_08_stop_string_across_tokens(stop: str, text: str) -> None:
    shown, matched = run(P2, stop)
    assert ("".join(shown), matched) == (text, stop)
    assert run(["".join(P2)], stop) == ([text], stop)


@pytest.mark.parametrize(
    ("stops", "excluded", "included", "matched"),
    [
        (("E",), "D", "DE", "E"),
        (("E", "DE"), "", "DE", "DE"),  # both end at E: the longer one
        (("DE", "E"), "", "DE", "DE"),  # whatever the order of the list
        (("G", "EF"), "D", "DEF", "EF"),  # EF is complete before G comes
        (("FGHIJKL", "GH"), "DEF", "DEFGH", "GH"),  # complete first wins over beginning first
    ],
)
def test_det_10_inside_one_token_and_several_stops(
    stops: tuple[str, ...], excluded: str, included: str, matched: str
) -> None:
    for deltas in (P2, ["".join(P2)], list("".join(P2))):
        for include, text in ((False, excluded), (True, included)):
            shown, found = run(deltas, *stops, include=include)
            assert ("".join(shown), found) == (text, matched)


def test_no_stop_strings_pass_text_through_untouched() -> None:
    buffer = StopBuffer(())
    text = "".join(P2)
    emit, matched = buffer.push(text)
    assert emit is text and matched is None and buffer.flush() == ""


def test_text_held_back_in_vain_comes_out_with_what_follows() -> None:
    buffer = StopBuffer(("</s>",))
    assert buffer.push("a <") == ("a ", None)
    assert buffer.push("/") == ("", None)
    assert buffer.push("b> <") == ("</b> ", None)
    assert buffer.flush() == "<"


def test_nothing_is_shown_after_a_match() -> None:
    buffer = StopBuffer(("x",))
    assert buffer.push("axb") == ("a", "x")
    assert buffer.push("c") == ("", None)
    assert buffer.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="stop"):
        StopBuffer(("a", ""))


def test_self_overlapping_stop_is_found_at_its_first_end() -> None:
    assert run(["aa", "ba", "ab", "aac"], "aabaac") == (["aab"], "aabaac")


@given(
    st.text("ab\n日", max_size=40),
    st.lists(st.text("ab日", min_size=1, max_size=4), max_size=4),
    st.booleans(),
    st.data(),
)
def test_chunking_never_changes_the_result(text: str, stops: list[str], include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = run(chunks, *stops, include=include)
    one_by_one, expected = run(list(text), *stops, include=include)
    assert ("".join(shown), matched) == ("".join(one_by_one), expected)


@given(st.text("ab", max_size=40), st.text("ab", min_size=1, max_size=5), st.booleans())
def test_single_stop_equals_find(text: str, stop: str, include: bool) -> None:
    start = text.find(stop)
    shown, matched = run(list(text), stop, include=include)
    expected = text if start < 0 else text[: start + len(stop) * include]
    assert ("".join(shown), matched) == (expected, stop if start >= 0 else None)


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_could_become_a_stop(text: str, stops: list[str]) -> None:
    buffer = StopBuffer(tuple(stops))
    emit, matched = buffer.push(text)
    if matched is None:
        held = text[len(emit) :]
        suffixes = [text[i:] for i in range(len(text) + 1)]
        assert held == next(s for s in suffixes if any(stop.startswith(s) and stop != s for stop in stops))
