"""The life of one choice: min_tokens, output kinds, echo, prompt logprobs, several tokens of a key in one result."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from procengine.choice import Choice
from procengine.detokenizer import Detokenizer
from procengine.messages import Delta, Register, TokenLogprobs
from procengine.step_output import PromptLogprobs
from procengine.stopping import LENGTH, NOT_FINISHED
from tests.unit.test_text_outputs import EOS, PROMPT, TOKENIZER, Client, ids, register, result

DETOKENIZER = Detokenizer(TOKENIZER)


def choice(**fields: Any) -> Choice:
    return Choice(register(**fields), 0, DETOKENIZER)


def with_prompt(prompt: list[int], **fields: Any) -> Register:
    return msgspec.structs.replace(register(**fields), prompt_token_ids=prompt)


def entry(value: float) -> TokenLogprobs:
    return TokenLogprobs((0,), (value,), (1,))


def step(subject: Choice, token_ids: list[int], code: int = NOT_FINISHED) -> Delta | None:
    """Some tokens at once, the last of which ends it by `code`."""
    for at, token_id in enumerate(token_ids):
        subject.take_token(token_id)
        if code and at == len(token_ids) - 1:
            subject.take_end(code)
    subject.advance()
    return subject.make_delta() if subject.is_due else None


# --- DET-11: min_tokens


@pytest.mark.parametrize("batch", [1, 2, 5, 100])
@pytest.mark.parametrize(
    ("stop", "min_tokens", "text"),
    [
        ("E", 0, "D"),
        ("E", 1, "D"),
        ("E", 2, "DEFGHIJD"),  # the first comes too early, the second counts
        ("EF", 2, "DEFGHIJD"),  # one that begins too early does not count either
        ("EF", 1, "D"),
        ("J", 6, "DEFGHI"),
        ("J", 7, "DEFGHIJDEFG"),
    ],
)
def test_det_11_stop_string_before_min_tokens_does_not_count(stop: str, min_tokens: int, text: str, batch: int) -> None:
    whole = "DEFGHIJDEFG"
    client = Client(register(stop=(stop,), max_tokens=len(whole), min_position=len(PROMPT) + min_tokens))
    client.feed(ids(whole), batch=batch)
    assert client.text() == text
    assert client.end().finish_reason == ("length" if text == whole else "stop")


@pytest.mark.parametrize(("min_tokens", "count"), [(0, 3), (2, 3), (3, 5), (4, 5), (5, 6)])
def test_det_11_end_token_before_min_tokens_does_not_count(min_tokens: int, count: int) -> None:
    client = Client(register(max_tokens=6, min_position=len(PROMPT) + min_tokens))
    client.feed([*ids("ab"), EOS, *ids("c"), EOS, *ids("d")])
    assert len(client.token_ids()) == count
    assert client.end().finish_reason == ("length" if count == 6 else "stop")


# --- detokenize, echo


@pytest.mark.parametrize("echo", [False, True])
def test_without_detokenization_there_are_tokens_and_no_text(echo: bool) -> None:
    client = Client(register(detokenize=False, echo=echo, num_logprobs=0))
    for count, token in enumerate([*ids("ab"), EOS]):
        client.outputs.take_result(*result([(0, count, token)], logprob_rows=(0,)))
        client.take()
    assert (client.text(), client.token_ids()) == ("", [*ids("ab"), EOS])
    assert client.end().finish_reason == "stop"
    assert all(len(delta.logprobs or []) == 1 for delta in client.deltas["r0"])


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_echo_puts_the_prompt_before_the_text_and_no_stop_is_looked_for_in_it(kind: str) -> None:
    client = Client(with_prompt(ids("ab"), echo=True, stop=("b",), output_kind=kind, end_position=5))
    for count, token in enumerate(ids("xyz"), 2 - len(PROMPT)):
        client.outputs.take_result(*result([(0, count, token)]))
        client.take()
    texts = [delta.text for delta in client.deltas["r0"]]
    assert texts == {"delta": ["abx", "y", "z"], "cumulative": ["abx", "abxy", "abxyz"], "final": ["abxyz"]}[kind]


# --- output kinds and intervals


@pytest.mark.parametrize("interval", [1, 2, 3, 50])
@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 12])
def test_output_kind_and_interval(kind: str, interval: int, num_tokens: int) -> None:
    text = "abcdefghijkl"[:num_tokens]
    subject = choice(output_kind=kind, stream_interval=interval, num_logprobs=0)
    deltas: list[Delta] = []
    for at, token in enumerate(ids(text)):
        is_last = at == num_tokens - 1
        subject.take_token(token)
        if is_last:
            subject.take_end(LENGTH)
        subject.take_logprobs(entry(-at))
        subject.advance()
        if subject.is_due:
            deltas.append(subject.make_delta())
    # The first token at once, then every `interval` tokens, then what is left.
    borders = [1, *range(1 + interval, num_tokens + 1, interval)]
    borders = [num_tokens] if kind == "final" else sorted({b for b in borders if b <= num_tokens} | {num_tokens})
    starts = [0, *borders[:-1]] if kind == "delta" else [0] * len(borders)
    for delta, start, end in zip(deltas, starts, borders, strict=True):
        assert (delta.text, delta.token_ids) == (text[start:end], ids(text[start:end]))
        assert [at.logprobs[0] for at in delta.logprobs or []] == [-at for at in range(start, end)]
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert [delta.prompt_token_ids for delta in deltas] == [PROMPT] + [None] * (len(deltas) - 1)


def test_messages_that_were_made_do_not_change_later() -> None:
    subject = choice(output_kind="cumulative")
    first = step(subject, ids("a"))
    second = step(subject, ids("b"), LENGTH)
    assert first is not None
    assert second is not None
    assert (first.token_ids, second.token_ids) == (ids("a"), ids("ab"))


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_abort_sends_what_was_kept_back_by_the_interval(kind: str) -> None:
    subject = choice(output_kind=kind, stream_interval=10)
    sent = [delta for delta in (step(subject, ids(character)) for character in "abc") if delta is not None]
    subject.end_from_outside("abort")
    sent.append(subject.make_delta())
    assert sent[-1].finish_reason == "abort"
    assert ("".join(delta.text for delta in sent) if kind == "delta" else sent[-1].text) == "abc"


# --- log probabilities


@pytest.mark.parametrize("batch", [1, 2, 7])
@pytest.mark.parametrize("include", [False, True])
def test_logprobs_end_with_the_tokens_where_a_stop_string_cuts(batch: int, include: bool) -> None:
    client = Client(register(stop=("cd",), num_logprobs=0, include_stop_str_in_output=include))
    for count, token in enumerate(ids("abcdefg")):
        client.outputs.take_result(*result([(0, count, token)], logprob_rows=(0,)))
        if (count + 1) % batch == 0:
            client.take()
    client.take()
    assert client.text() == ("abcd" if include else "ab")
    assert client.token_ids() == ids("abcd")
    values = [at.logprobs[0] for delta in client.deltas["r0"] for at in delta.logprobs or []]
    assert values == [-float(len(PROMPT) + count) for count in range(4)]


def prompt_part(first: int, count: int, key: int = 0, width: int = 2) -> PromptLogprobs:
    """Positions from `first` on; the log probability is the position's negative."""
    positions = np.arange(first, first + count)
    shown = np.repeat(positions[:, None], width, axis=1)
    spans = np.array([[key, 0, first, count]], np.int32)
    return PromptLogprobs(spans, shown.astype(np.int32), -shown.astype(np.float32), np.ones(shown.shape, np.int32))


def test_prompt_logprobs_come_once_in_the_first_delta_and_repeats_are_dropped() -> None:
    client = Client(with_prompt(list(range(7)), num_prompt_logprobs=0, end_position=20))
    for first, count in ((1, 3), (1, 3), (3, 2), (2, 1), (4, 3), (1, 6)):
        assert client.outputs.take_result(*result([], prompt=prompt_part(first, count))) == []
        client.take()
    assert client.deltas == {}
    for count, token in enumerate(ids("ab"), 7 - len(PROMPT)):
        client.outputs.take_result(*result([(0, count, token)], prompt=prompt_part(1, 6)))
        client.take()
    first_delta, second = client.deltas["r0"]
    assert second.prompt_logprobs is None
    shown = first_delta.prompt_logprobs or []
    assert shown[0] is None
    assert shown[1:] == [TokenLogprobs((at,), (-float(at),), (1,)) for at in range(1, 7)], "as wide as it asked for"


def test_prompt_logprobs_that_come_before_the_register_are_kept() -> None:
    client = Client()
    client.outputs.take_result(*result([], prompt=prompt_part(1, 1)))
    client.outputs.take_result(*result([(0, 0, ids("a")[0])], prompt=prompt_part(2, 1)))
    client.outputs.register(register(num_prompt_logprobs=1))
    client.take()
    assert [at and at.logprobs[0] for at in client.deltas["r0"][0].prompt_logprobs or []] == [None, -1.0, -2.0]


def test_prompt_logprobs_nobody_asked_for_or_of_a_request_that_is_gone_are_ignored() -> None:
    client = Client(register(), register(1, num_prompt_logprobs=0, max_tokens=1))
    client.feed(ids("a"), key=1)
    assert client.outputs.take_result(*result([(0, 0, ids("a")[0])], prompt=prompt_part(1, 2, key=1))) == []
    client.take()
    assert client.deltas["r0"][0].prompt_logprobs is None
    assert client.deltas["r1"][0].prompt_logprobs == [None]


def test_prompt_of_one_token_has_one_empty_entry() -> None:
    client = Client(with_prompt([5], num_prompt_logprobs=0, end_position=3))
    client.outputs.take_result(*result([(0, 1 - len(PROMPT), ids("a")[0])]))
    client.take()
    assert client.deltas["r0"][0].prompt_logprobs == [None]


# --- several tokens of a key in one result


def test_accepted_proposals_come_out_as_if_they_had_come_one_by_one() -> None:
    client = Client(register(0), register(1, max_tokens=3), register(2, stop=("bc",)))
    rows = [(key, count, token) for key in range(3) for count, token in enumerate(ids("abcd"))]
    assert client.outputs.take_result(*result(rows)) == []
    client.take()
    assert [client.text(key) for key in range(3)] == ["abcd", "abc", "a"]
    assert [client.deltas[f"r{key}"][-1].finish_reason for key in range(3)] == [None, "length", "stop"]
    assert client.text_stopped == [2]


def test_stop_token_among_accepted_proposals_ends_there() -> None:
    client = Client(register(0), register(1))
    tokens = [*ids("a"), EOS, *ids("bc")]
    assert client.outputs.take_result(*result([(key, at, t) for key in (0, 1) for at, t in enumerate(tokens)])) == []
    client.take()
    for key in (0, 1):
        assert (client.text(key), client.token_ids(key)) == ("a", tokens[:2])
        assert client.end(key).finish_reason == "stop"


def test_logprobs_of_plain_rows_beside_rows_with_several_tokens() -> None:
    client = Client(register(0), register(1, num_logprobs=0))
    rows = [(0, 0, ids("a")[0]), (0, 1, ids("b")[0]), (1, 0, ids("x")[0])]
    client.outputs.take_result(*result(rows, logprob_rows=(2,)))
    client.take()
    assert [at.logprobs[0] for at in client.deltas["r1"][0].logprobs or []] == [-float(len(PROMPT))]
    assert client.deltas["r0"][0].logprobs is None


@pytest.mark.parametrize("seed", range(15))
def test_any_grouping_of_tokens_gives_the_same_text(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choice("abé日 ") for _ in range(rng.randint(1, 30))) for _ in range(4)]
    stops = tuple("".join(rng.choice("abé日") for _ in range(rng.randint(1, 3))) for _ in range(2))
    fields: dict[str, Any] = {"stop": stops, "min_position": len(PROMPT) + rng.choice((0, 0, 4, 9))}
    registers = [register(key, max_tokens=len(ids(text)), **fields) for key, text in enumerate(texts)]
    slow, fast = Client(*registers), Client(*registers)
    for key, text in enumerate(texts):
        slow.feed(ids(text), key=key)
    fed = [0] * 4
    while any(count < len(ids(texts[key])) for key, count in enumerate(fed)):
        rows = []
        for key in range(4):
            count = min(rng.choice((0, 1, 1, 3, 5)), len(ids(texts[key])) - fed[key])
            rows += [(key, at, ids(texts[key])[at]) for at in range(fed[key], fed[key] + count)]
            fed[key] += count
        assert fast.outputs.take_result(*result(rows)) == []
        if rng.random() < 0.5:
            fast.take()
    fast.take()
    for key in range(4):
        assert (fast.text(key), fast.token_ids(key)) == (slow.text(key), slow.token_ids(key))
        assert fast.end(key).finish_reason == slow.end(key).finish_reason
