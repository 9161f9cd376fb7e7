"""Deltas that wait for a slow reader are joined; what it sees in the end is what all of them would have shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from procengine.delta_cursor import DeltaCursor
from procengine.merged_delta import MergedDelta, wire_bytes
from procengine.messages import Delta, Embedding, RequestTimes, TokenLogprobs, encode
from procengine.outputs import collect_deltas


def stream(sizes: list[int], *, logprobs: bool = False) -> list[Delta]:
    """One request's deltas with so many tokens each; the last one ends it."""
    deltas, num_tokens, num_chars = [], 0, 0
    for at, size in enumerate(sizes):
        ids = list(range(num_tokens, num_tokens + size))
        text = "".join(f"é{token_id}" for token_id in ids)
        is_last = at == len(sizes) - 1
        deltas.append(
            Delta(
                "r",
                1,
                text,
                ids,
                "stop" if is_last else None,
                "END" if is_last else None,
                [TokenLogprobs((i,), (-0.5,), (1,)) for i in ids] if logprobs else None,
                [7, 8] if at == 0 else None,
                2 if at == 1 else None,
                prompt_logprobs=[None, TokenLogprobs((8,), (-1.0,), (2,))] if at == 0 else None,
                times=RequestTimes(1, 2, 3) if is_last else None,
                token_offset=num_tokens,
                text_offset=num_chars,
                key=9,
            )
        )
        num_tokens, num_chars = num_tokens + size, num_chars + len(text)
    return deltas


def merge(deltas: list[Delta]) -> MergedDelta:
    merged = MergedDelta(deltas[0])
    for delta in deltas[1:]:
        merged.add(delta)
    return merged


@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.data(), st.booleans())
def test_any_neighbours_joined_give_the_same_result(sizes: list[int], data: st.DataObject, logprobs: bool) -> None:
    deltas = stream(sizes, logprobs=logprobs)
    first = data.draw(st.integers(0, len(deltas) - 1))
    end = data.draw(st.integers(first + 1, len(deltas)))
    joined = [*deltas[:first], merge(deltas[first:end]).take(), *deltas[end:]]
    cursor = DeltaCursor()
    assert [cursor.take(delta) for delta in joined] == joined, "each goes on where the one before ended"
    assert collect_deltas("r", None, joined) == collect_deltas("r", None, deltas)
    assert merge(deltas[first:end]).has_ended == (end == len(deltas))


def test_a_message_that_holds_everything_replaces_those_before() -> None:
    first = Delta("r", 0, "a", [1], prompt_token_ids=[5, 6], num_cached_tokens=0, key=3)
    last = Delta("r", 0, "abc", [1, 2, 3], "length", key=3, times=RequestTimes(1))
    taken = merge([first, Delta("r", 0, "ab", [1, 2], key=3), last]).take()
    assert (taken.text, taken.token_ids, taken.finish_reason) == ("abc", [1, 2, 3], "length")
    assert (taken.prompt_token_ids, taken.num_cached_tokens, taken.token_offset) == ([5, 6], 0, -1)


def test_what_was_added_stays_as_it_was() -> None:
    deltas = stream([2, 3, 4])
    merge(deltas).take()
    assert deltas == stream([2, 3, 4])


def test_bytes_are_about_those_on_the_wire_and_grow_with_each_delta() -> None:
    deltas = stream([3] * 50, logprobs=True)
    merged = MergedDelta(deltas[0])
    for delta in deltas[1:]:
        before = merged.num_bytes
        merged.add(delta)
        assert merged.num_bytes > before
    assert len(encode(merged.take())) < merged.num_bytes < 3 * len(encode(merged.take()))
    vector = Embedding("r", bytes(4096), [1] * 10)
    assert len(encode(vector)) < wire_bytes(vector) < 2 * len(encode(vector))
