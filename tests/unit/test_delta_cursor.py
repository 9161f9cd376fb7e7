"""Deltas that repeat what came before become a stream that does not."""

from __future__ import annotations

import random

import pytest

from procengine.delta_cursor import DeltaCursor
from procengine.errors import ProtocolError
from procengine.messages import Delta, TokenLogprobs

TOKENS = list(range(100, 120))
TEXT = "".join("abcdé日"[at % 6] * (at % 3) for at in range(20))  # 0 to 2 characters a token
BOUNDS = [sum(at % 3 for at in range(count)) for count in range(21)]
LOGPROBS = [TokenLogprobs((token,), (-float(token),), (1,)) for token in TOKENS]


def delta(first: int, end: int, finish_reason: str | None = None, held: int = 0, begins_text_at: int = -1) -> Delta:
    """Tokens from `first` to `end`; the last `held` characters are held back."""
    start = BOUNDS[first] if begins_text_at < 0 else begins_text_at
    return Delta(
        "r",
        0,
        TEXT[start : BOUNDS[end] - held],
        TOKENS[first:end],
        finish_reason,
        logprobs=LOGPROBS[first:end],
        prompt_token_ids=[1, 2] if not first else None,
        prompt_logprobs=[None] if not first else None,
        token_offset=first,
        text_offset=start,
    )


def test_deltas_that_follow_each_other_are_passed_on_as_they_are() -> None:
    cursor = DeltaCursor()
    for count in range(20):
        one = delta(count, count + 1, "length" if count == 19 else None)
        assert cursor.take(one) is one
    assert cursor.has_ended


def test_what_came_before_is_cut_off_tokens_logprobs_and_text() -> None:
    cursor = DeltaCursor()
    cursor.take(delta(0, 5))
    assert cursor.take(delta(0, 3)) is None
    assert cursor.take(delta(0, 5)) is None
    new = cursor.take(delta(0, 9))
    assert new is not None
    assert (new.token_ids, new.logprobs, new.text) == (TOKENS[5:9], LOGPROBS[5:9], TEXT[BOUNDS[5] : BOUNDS[9]])
    assert (new.token_offset, new.text_offset) == (5, BOUNDS[5])
    assert new.prompt_token_ids is None and new.prompt_logprobs is None, "the first one had them"


def test_text_that_was_held_back_comes_without_a_token() -> None:
    cursor = DeltaCursor()
    cursor.take(delta(0, 6, held=2))
    new = cursor.take(delta(0, 6))
    assert new is not None
    assert (new.token_ids, new.logprobs, new.text) == ([], None, TEXT[BOUNDS[6] - 2 : BOUNDS[6]])


def test_the_end_is_passed_on_once_even_if_it_brings_nothing() -> None:
    cursor = DeltaCursor()
    cursor.take(delta(0, 5))
    end = cursor.take(delta(0, 3, "abort"))
    assert end is not None
    assert (end.token_ids, end.text, end.finish_reason) == ([], "", "abort")
    assert cursor.take(delta(0, 5, "abort")) is None
    assert cursor.take(delta(5, 6)) is None


def test_an_end_without_a_token_is_passed_on_once() -> None:
    cursor = DeltaCursor()
    end = Delta("r", 0, "", [], "abort", token_offset=0, text_offset=0)
    assert cursor.take(end) is end
    assert cursor.take(end) is None


@pytest.mark.parametrize("gap", [delta(6, 7), delta(5, 6, begins_text_at=BOUNDS[5] + 1)], ids=["tokens", "text"])
def test_a_gap_is_an_error_that_says_where(gap: Delta) -> None:
    cursor = DeltaCursor()
    cursor.take(delta(0, 5))
    where = rf"'r', choice 0: .* token {gap.token_offset}, character {gap.text_offset}, but 5 and {BOUNDS[5]}"
    with pytest.raises(ProtocolError, match=where):
        cursor.take(gap)


def test_of_cumulative_deltas_only_longer_ones_are_passed_on() -> None:
    cursor = DeltaCursor(is_cumulative=True)
    taken = [cursor.take(Delta("r", 0, "x" * count, [0] * count)) for count in (2, 3, 1, 3, 4)]
    assert [one is not None for one in taken] == [True, True, False, False, True]
    assert cursor.take(Delta("r", 0, "xxxx", [0] * 4, "stop")) is not None
    assert cursor.take(Delta("r", 0, "xxxx", [0] * 4, "stop")) is None


def test_deltas_that_do_not_say_where_they_stand_are_passed_on() -> None:
    cursor = DeltaCursor()
    assert all(cursor.take(Delta("r", 0, "x", [0])) for _ in range(3))


@pytest.mark.parametrize("seed", range(50))
def test_any_number_of_new_beginnings_gives_the_same_stream(seed: int) -> None:
    rng = random.Random(seed)
    cursor = DeltaCursor()
    got: list[Delta] = []
    for process in range(4):
        at, start = 0, 0
        end = 20 if process == 3 else rng.randint(0, 20)
        while at < end:
            after = min(at + rng.randint(1, 4), end)
            held = 0 if after == 20 else min(rng.choice((0, 0, 1)), BOUNDS[after] - start)
            new = cursor.take(delta(at, after, "length" if after == 20 else None, held, start))
            got += [new] if new else []
            at, start = after, BOUNDS[after] - held
    assert [token for one in got for token in one.token_ids] == TOKENS
    assert [entry for one in got for entry in one.logprobs or ()] == LOGPROBS
    assert "".join(one.text for one in got) == TEXT
    assert [one.finish_reason for one in got if one.finish_reason] == ["length"]
