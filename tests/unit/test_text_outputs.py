"""From results to deltas: every token once, text cut where it must be, one terminal delta a request."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from procengine.messages import Delta, Register, RequestTimes, StepResult, TokenLogprobs
from procengine.postprocessor import Item
from procengine.step_output import Logprobs, PassTimes, PromptLogprobs, SampledTokens, StepOutput, WorkerIdentity
from procengine.stopping import NOT_FINISHED
from procengine.text_outputs import TextOutputs
from tests.tiny_tokenizers import byte_level

TOKENIZER = byte_level()
EOS = TOKENIZER.token_to_id("<|end|>") or 0
PROMPT = [1, 2, 3]


def ids(text: str | bytes) -> list[int]:
    """One token a byte."""
    from tests.tiny_tokenizers import byte_alphabet

    data = text.encode() if isinstance(text, str) else text
    found = [TOKENIZER.token_to_id(byte_alphabet()[byte]) for byte in data]
    return [token for token in found if token is not None]


def register(key: int = 0, max_tokens: int = 1000, client: bytes = b"c", **fields: Any) -> Register:
    values: dict[str, Any] = {"stop_token_ids": (EOS,), "end_position": len(PROMPT) + max_tokens}
    return Register(
        key=key,
        client=client,
        request_id=f"r{key}",
        index=0,
        workflow="generate",
        prompt_token_ids=PROMPT,
        **(values | fields),
    )


def result(
    rows: Sequence[tuple[int, int, int]],
    logprob_rows: Sequence[int] = (),
    width: int = 1,
    prompt: PromptLogprobs | None = None,
) -> tuple[StepResult, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Rows are (key, how many tokens it had before, token). Logprobs are -position."""
    keys = np.array([key for key, _, _ in rows], np.int64)
    positions = np.array([len(PROMPT) + count for _, count, _ in rows], np.int32)
    tokens = np.array([token for _, _, token in rows], np.int32)
    logprobs = None
    if logprob_rows:
        at = np.array(logprob_rows, np.int32)
        shown = np.repeat(tokens[at][:, None], width, axis=1)
        values = np.repeat(-positions[at][:, None].astype(np.float32), width, axis=1)
        logprobs = Logprobs(at, shown, values, np.ones(shown.shape, np.int32))
    sampled = SampledTokens(tokens, None, logprobs, prompt)
    output = StepOutput(0, 0, True, keys, positions, lambda: sampled, PassTimes(0, 0, 0, 0))
    return output.to_message(WorkerIdentity(0, 0), sampled)


class Client:
    """`TextOutputs` and what its clients got."""

    def __init__(self, *registers: Register) -> None:
        self.outputs = TextOutputs(TOKENIZER)
        self.deltas: dict[str, list[Delta]] = {}
        self.text_stopped: list[int] = []
        for message in registers:
            self.outputs.register(message)

    def feed(self, token_ids: Sequence[int], key: int = 0, start: int = 0, batch: int = 1) -> None:
        """Tokens one result each; the deltas are taken every `batch` results."""
        for count, token in enumerate(token_ids, start):
            assert self.outputs.take_result(*result([(key, count, token)])) == []
            if (count + 1) % batch == 0:
                self.take()
        self.take()

    def take(self) -> None:
        taken = self.outputs.take_items()
        self.text_stopped += taken.text_stopped_keys
        for deltas in taken.items_by_client.values():
            self.add(deltas)

    def add(self, deltas: list[Item]) -> None:
        for delta in deltas:
            assert isinstance(delta, Delta)
            self.deltas.setdefault(delta.request_id, []).append(delta)

    def text(self, key: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas.get(f"r{key}", []))

    def token_ids(self, key: int = 0) -> list[int]:
        return [token for delta in self.deltas.get(f"r{key}", []) for token in delta.token_ids]

    def end(self, key: int = 0) -> Delta:
        """The last delta, the only terminal one."""
        deltas = self.deltas[f"r{key}"]
        assert [delta.finish_reason is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        return deltas[-1]


@pytest.mark.parametrize("batch", [1, 2, 5, 100])
def test_deltas_joined_are_the_text_and_the_last_one_alone_is_terminal(batch: int) -> None:
    client = Client(register(max_tokens=11))
    client.feed(ids("hello world") + ids("more"), batch=batch)
    assert client.text() == "hello world"
    assert client.token_ids() == ids("hello world")
    assert client.end().finish_reason == "length"
    assert client.outputs.num_unfinished == 0


def test_whose_text_is_worked_on_is_noted_before_it_is() -> None:
    client = Client(register(3), register(4), register(5))
    for key in (4, 3):
        client.outputs.take_result(*result([(key, 0, ids("a")[0])]))
    noted: list[int] = []
    taken = client.outputs.take_items(0, noted.append)
    assert [item.key for item in taken.items_by_client[b"c"]] == [4, 3]
    assert noted == [4, 3, -1]


def test_many_steps_merge_into_one_delta_a_request() -> None:
    client = Client(register(0), register(1), register(2, client=b"d"))
    for count, character in enumerate("abc"):
        client.outputs.take_result(*result([(key, count, ids(character)[0]) for key in range(3)]))
    taken = client.outputs.take_items()
    assert {
        name: [(d.request_id, d.text) for d in deltas if isinstance(d, Delta)]
        for name, deltas in taken.items_by_client.items()
    } == {
        b"c": [("r0", "abc"), ("r1", "abc")],
        b"d": [("r2", "abc")],
    }
    assert client.outputs.take_items().items_by_client == {}


def test_prompt_and_cached_tokens_come_in_the_first_delta_only() -> None:
    client = Client(register())
    client.outputs.admit(0, 16)
    client.feed(ids("abc"))
    assert [delta.prompt_token_ids for delta in client.deltas["r0"]] == [PROMPT, None, None]
    assert [delta.num_cached_tokens for delta in client.deltas["r0"]] == [16, None, None]


def test_cached_tokens_that_are_told_late_come_in_the_next_delta() -> None:
    client = Client(register())
    client.feed(ids("a"))
    client.outputs.admit(0, 16)  # over another socket than the results
    client.feed(ids("bc"), start=1)
    assert [delta.num_cached_tokens for delta in client.deltas["r0"]] == [None, 16, None]


def test_admission_of_an_ended_request_is_ignored() -> None:
    client = Client()
    client.outputs.admit(5, 16)
    assert client.outputs.take_items().items_by_client == {}


# --- ends by tokens


@pytest.mark.parametrize(
    ("fields", "shown", "stop_reason"),
    [
        ({}, "ab", None),
        ({"requested_stop_token_ids": (EOS,)}, "ab", EOS),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "ab<|end|>", None),
        ({"include_stop_str_in_output": True}, "ab", None),
        ({"skip_special_tokens": False}, "ab", None),
    ],
)
@pytest.mark.parametrize("batch", [1, 100])
def test_stop_token_ends_the_request_and_is_shown_only_on_demand(
    fields: dict[str, Any], shown: str, stop_reason: int | None, batch: int
) -> None:
    client = Client(register(**fields))
    client.feed([*ids("ab"), EOS, *ids("wasted")], batch=batch)
    assert client.text() == shown
    assert client.token_ids() == [*ids("ab"), EOS]
    assert (client.end().finish_reason, client.end().stop_reason) == ("stop", stop_reason)


def test_stop_token_at_the_last_position_is_a_stop() -> None:
    client = Client(register(max_tokens=3))
    client.feed([*ids("ab"), EOS])
    assert client.end().finish_reason == "stop"


def test_more_stop_tokens_than_the_table_was_made_for() -> None:
    many = tuple(ids("abcdefgh"))
    client = Client(register(0), register(1, stop_token_ids=many), register(2))
    for key in range(3):
        client.feed(ids("xh"), key=key)
    assert client.end(1).finish_reason == "stop"
    assert client.deltas["r0"][-1].finish_reason is client.deltas["r2"][-1].finish_reason is None


@pytest.mark.parametrize("text", ["日本語日本語", "naïve 👩‍🚀 ok"])
@pytest.mark.parametrize("batch", [1, 3])
def test_character_over_several_tokens_comes_out_whole(text: str, batch: int) -> None:
    client = Client(register(max_tokens=len(text.encode())))
    client.feed(ids(text), batch=batch)
    assert client.text() == text
    assert all("�" not in delta.text for delta in client.deltas["r0"])


@pytest.mark.parametrize(("count", "text"), [(1, "�"), (2, "�"), (3, "日"), (4, "日�")])
def test_end_in_the_middle_of_a_character_shows_what_decode_shows(count: int, text: str) -> None:
    client = Client(register(max_tokens=count))
    client.feed(ids("日本")[:count])
    assert client.text() == text == TOKENIZER.decode(ids("日本")[:count])
    assert client.end().finish_reason == "length"


# --- stop strings: P2 of the cases, in pieces as the model gives them

P2 = ["DEF", "GH", "I", "J", "K", "LM", "N", "OP", "Q", "R", "ST", "UVW"]


def alphabet_client(stops: tuple[str, ...], include: bool, batch: int) -> Client:
    client = Client(
        register(stop=stops, include_stop_str_in_output=include, max_tokens=len("".join(P2)), stop_token_ids=())
    )
    client.feed(ids("".join(P2)), batch=batch)
    return client


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_det_07_start_of_a_stop_string_is_never_shown(batch: int) -> None:
    client = alphabet_client(("DEFGHIJ",), False, batch)
    assert [delta.text for delta in client.deltas["r0"] if delta.text] == []
    assert (client.end().finish_reason, client.end().stop_reason) == ("stop", "DEFGHIJ")
    assert client.text_stopped == [0]
    assert client.token_ids() == ids("DEFGHIJ")


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
@pytest.mark.parametrize(("stop", "text"), [("FGHI", "DE"), ("GHIJ", "DEF")])
def test_det_08_stop_string_across_tokens_is_seen(stop: str, text: str, batch: int) -> None:
    client = alphabet_client((stop,), False, batch)
    assert client.text() == text
    assert client.end().finish_reason == "stop"


@pytest.mark.parametrize("batch", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "include", "text"),
    [
        (("E",), False, "D"),
        (("E",), True, "DE"),
        (("E", "DE"), False, ""),  # both end at E: the longest counts
        (("E", "DE"), True, "DE"),
        (("G", "EF"), False, "D"),  # EF is complete first
        (("G", "EF"), True, "DEF"),
    ],
)
def test_det_10_stop_string_inside_a_token_and_several_stops(
    stops: tuple[str, ...], include: bool, text: str, batch: int
) -> None:
    client = alphabet_client(stops, include, batch)
    assert client.text() == text
    assert client.end().finish_reason == "stop"


@pytest.mark.parametrize("include", [False, True])
def test_det_10_stop_string_in_the_middle_of_one_token_cuts_it(include: bool) -> None:
    client = Client(register(stop=("a",), include_stop_str_in_output=include))
    client.feed([TOKENIZER.encode(" Paris")[0], *ids("x")], batch=100)
    assert client.text() == (" Pa" if include else " P")
    assert len(client.token_ids()) == 1


def test_text_held_back_for_a_stop_string_comes_out_at_the_end() -> None:
    client = Client(register(stop=("abcd",), max_tokens=5))
    client.feed(ids("xxabc"))
    assert client.text() == "xxabc"
    assert (client.end().finish_reason, client.end().text) == ("length", "abc")


def test_stop_string_wins_over_a_later_end_by_length_in_the_same_batch() -> None:
    client = Client(register(stop=("b",), max_tokens=4))
    client.feed(ids("abcd"), batch=100)
    assert (client.text(), client.end().stop_reason, client.token_ids()) == ("a", "b", ids("ab"))


def test_replacement_character_at_the_end_can_complete_a_stop_string() -> None:
    client = Client(register(stop=("�",), max_tokens=2))
    client.feed([*ids("a"), *ids("日")[:1]])
    assert (client.text(), client.end().finish_reason, client.end().stop_reason) == ("a", "stop", "�")


# --- results that come early, twice, or not at all


def test_results_before_the_register_are_kept() -> None:
    client = Client(register(0))
    for count, text in enumerate(("aA", "bB", "cC")):
        assert client.outputs.take_result(*result([(0, count, ids(text)[0]), (1, count, ids(text)[1])])) == []
    client.take()
    assert (client.text(0), client.text(1)) == ("abc", "")
    client.outputs.register(register(1))
    client.take()
    client.feed(ids("D"), key=1, start=3)
    assert (client.text(0), client.text(1)) == ("abc", "ABCD")
    assert client.token_ids(0) == ids("abc")


def test_early_results_of_several_requests_wait_each_for_its_own_register() -> None:
    client = Client()
    client.outputs.take_result(*result([(0, 0, ids("a")[0]), (1, 0, ids("A")[0])], logprob_rows=(0, 1)))
    client.outputs.take_result(*result([(0, 1, ids("b")[0]), (1, 1, ids("B")[0])], logprob_rows=(0, 1)))
    client.outputs.register(register(0, num_logprobs=0))
    client.take()
    client.outputs.register(register(1, num_logprobs=0))
    client.take()
    for key, text in ((0, "ab"), (1, "AB")):
        assert client.text(key) == text
        values = [at.logprobs for delta in client.deltas[f"r{key}"] for at in delta.logprobs or []]
        assert values == [(-3.0,), (-4.0,)]


def test_repeated_positions_are_dropped() -> None:
    client = Client(register())
    for count, token in ((0, "a"), (0, "a"), (1, "b"), (0, "a"), (1, "b"), (2, "c")):
        assert client.outputs.take_result(*result([(0, count, ids(token)[0])], logprob_rows=(0,))) == []
    client.take()
    assert client.text() == "abc"
    assert len(client.deltas["r0"][0].logprobs or []) == 3


def test_gap_is_reported_and_a_replay_fills_it() -> None:
    client = Client(register(0), register(1))
    client.feed(ids("ab"))
    gaps = client.outputs.take_result(*result([(0, 4, ids("e")[0]), (1, 0, ids("x")[0])]))
    assert gaps == [(0, len(PROMPT) + 2)]
    client.take()
    assert (client.text(0), client.text(1)) == ("ab", "x")
    client.outputs.replay(0, len(PROMPT) + 1, ids("bcde"))
    client.take()
    assert client.text(0) == "abcde"
    client.feed(ids("f"), start=5)
    assert client.text(0) == "abcdef"


def test_replay_can_end_a_request_and_stops_there() -> None:
    client = Client(register(max_tokens=3))
    client.outputs.replay(0, len(PROMPT), ids("abcdef"))
    client.take()
    assert (client.text(), client.end().finish_reason) == ("abc", "length")
    client.outputs.replay(0, len(PROMPT), ids("abc"))
    assert client.outputs.take_items().items_by_client == {}


def test_tokens_behind_the_end_are_no_gap() -> None:
    client = Client(register(max_tokens=1), register(1))
    assert client.outputs.take_result(*result([(0, 0, 5)])) == []
    assert client.outputs.take_result(*result([(0, 1, 5)])) == []
    client.take()
    assert client.outputs.take_result(*result([(0, 2, 5)])) == []
    assert client.token_ids() == [5]


def test_gap_in_results_that_came_before_their_register_is_reported_with_it() -> None:
    client = Client(register(0))
    assert client.outputs.take_result(*result([(1, 2, ids("c")[0])])) == []
    assert client.outputs.register(register(1)) == [(1, len(PROMPT))]
    client.outputs.replay(1, len(PROMPT), ids("ab"))
    client.take()
    assert client.text(1) == "abc"


def test_results_behind_a_gap_are_taken_as_soon_as_it_is_filled_by_results() -> None:
    client = Client(register(num_logprobs=0))
    for count, token in ((1, "b"), (2, "c"), (0, "a")):
        client.outputs.take_result(*result([(0, count, ids(token)[0])], logprob_rows=(0,)))
    client.take()
    assert client.text() == "abc"
    expect_logprobs(client, "abc", unknown=())
    client.outputs.replay(0, len(PROMPT), ids("abcdef"))  # it was asked for, and comes too late
    client.take()
    assert client.text() == "abc"


def test_a_register_that_comes_again_changes_nothing() -> None:
    client = Client(register())
    client.feed(ids("ab"))
    client.outputs.register(register())
    client.feed(ids("c"), start=2)
    assert client.text() == "abc"
    assert client.outputs.num_unfinished == 1


def test_deltas_say_where_they_stand() -> None:
    client = Client(register(3, stop=("bcx",), max_tokens=5))
    client.feed(ids("é")[:1] + ids("é")[1:] + ids("bcd"), key=3)
    places = [(delta.token_offset, delta.text_offset, delta.text, delta.key) for delta in client.deltas["r3"]]
    assert places == [(0, 0, "", 3), (1, 0, "é", 3), (2, 1, "", 3), (3, 1, "", 3), (4, 1, "bcd", 3)]


@pytest.mark.parametrize("kind", ["cumulative", "final"])
def test_deltas_that_hold_everything_do_not_say_where_they_stand(kind: str) -> None:
    client = Client(register(output_kind=kind, max_tokens=3))
    client.feed(ids("abc"))
    assert {(delta.token_offset, delta.text_offset) for delta in client.deltas["r0"]} == {(-1, -1)}


def test_step_without_samples_brings_nothing() -> None:
    client = Client(register())
    assert client.outputs.take_result(*result([])) == []
    assert client.outputs.take_items().items_by_client == {}


# --- log probabilities


@pytest.mark.parametrize("batch", [1, 3, 100])
def test_every_token_has_its_logprob_even_while_text_is_held_back(batch: int) -> None:
    client = Client(register(num_logprobs=1, stop=("abcz",), max_tokens=6), register(1))
    for count, token in enumerate(ids("abcabc")):
        client.outputs.take_result(*result([(1, count, token), (0, count, token)], logprob_rows=(1,), width=3))
        if (count + 1) % batch == 0:
            client.take()
    client.take()
    assert client.text() == "abcabc"
    for delta in client.deltas["r0"]:
        assert len(delta.logprobs or []) == len(delta.token_ids)
    shown = [at for delta in client.deltas["r0"] for at in delta.logprobs or []]
    assert [at.token_ids for at in shown] == [(token, token) for token in ids("abcabc")], "as many as it asked for"
    assert [at.logprobs[0] for at in shown] == [-float(len(PROMPT) + count) for count in range(6)]
    assert all(delta.logprobs is None for delta in client.deltas["r1"])


def expect_logprobs(client: Client, text: str, unknown: Sequence[int]) -> None:
    """One entry a token; those of the tokens `unknown` are empty."""
    shown = [at for delta in client.deltas["r0"] for at in delta.logprobs or []]
    assert [at.token_ids for at in shown] == [
        () if count in unknown else (token,) for count, token in enumerate(ids(text))
    ]
    assert [at.logprobs for at in shown] == [
        () if count in unknown else (-float(len(PROMPT) + count),) for count in range(len(text))
    ]


def test_replayed_tokens_have_empty_logprobs_so_that_the_others_keep_their_places() -> None:
    client = Client(register(num_logprobs=0, max_tokens=6))
    client.outputs.replay(0, len(PROMPT), ids("abc"))
    for count, token in enumerate(ids("abcdef")):
        client.outputs.take_result(*result([(0, count, token)], logprob_rows=(0,)))
    client.take()
    assert client.text() == "abcdef"
    expect_logprobs(client, "abcdef", unknown=(0, 1, 2))


def test_replay_does_not_fill_more_than_the_gap() -> None:
    client = Client(register(num_logprobs=0, max_tokens=6))
    gaps = []
    for count, token in enumerate(ids("abcdef")):
        if count not in (1, 2):
            gaps += client.outputs.take_result(*result([(0, count, token)], logprob_rows=(0,)))
    assert gaps == [(0, len(PROMPT) + 1)]
    assert client.outputs.replay(0, len(PROMPT) + 1, ids("bcdef")) == []
    client.take()
    assert client.text() == "abcdef"
    expect_logprobs(client, "abcdef", unknown=(1, 2))


def test_replayed_tokens_of_one_that_asks_for_no_logprobs_have_none() -> None:
    client = Client(register(max_tokens=2))
    client.outputs.replay(0, len(PROMPT), ids("ab"))
    client.take()
    assert [delta.logprobs for delta in client.deltas["r0"]] == [None]


def test_prompt_logprobs_that_were_lost_leave_empty_places() -> None:
    client = Client(register(num_prompt_logprobs=0))
    spans = np.array([[0, 0, 2, 1]], np.int32)
    shown = np.array([[3]], np.int32)
    prompt = PromptLogprobs(spans, shown, -shown.astype(np.float32), shown)
    client.outputs.take_result(*result([(0, 0, 5)], prompt=prompt))
    client.take()
    logprobs = client.deltas["r0"][0].prompt_logprobs
    assert logprobs == [None, TokenLogprobs((), (), ()), TokenLogprobs((3,), (-3.0,), (3,))]


def test_logprobs_are_cut_with_the_tokens_at_a_stop_string() -> None:
    client = Client(register(num_logprobs=0, stop=("b",)))
    for count, token in enumerate(ids("abcd")):
        client.outputs.take_result(*result([(0, count, token)], logprob_rows=(0,)))
    client.take()
    assert len(client.end().logprobs or []) == len(client.token_ids()) == 2


# --- ends from outside


def test_abort_gives_what_is_there_and_one_terminal_delta() -> None:
    client = Client(register(stop=("bcd",)))
    client.feed(ids("a"))
    for count, token in enumerate(ids("bc"), 1):
        client.outputs.take_result(*result([(0, count, token)]))
    ended = client.outputs.finish(0, "abort")
    assert ended is not None
    client.add(ended[1])
    assert (client.text(), client.token_ids(), client.end().finish_reason) == ("abc", ids("abc"), "abort")
    assert client.outputs.finish(0, "abort") is None
    assert client.outputs.take_items().items_by_client == {}
    assert client.outputs.take_result(*result([(0, 3, 5)])) == []
    assert client.outputs.num_unfinished == 0


def test_abort_before_the_first_token_brings_the_prompt_and_no_text() -> None:
    client = Client(register())
    ended = client.outputs.finish(0, "error", "it broke")
    assert ended is not None
    client.add(ended[1])
    times = RequestTimes()
    end = Delta("r0", 0, "", [], "error", None, None, PROMPT, None, "it broke", None, times, 0, 0, 0)
    assert client.end() == end


@pytest.mark.parametrize(
    ("fields", "text", "finish_reason"),
    [({"max_tokens": 2}, "ab", "length"), ({"stop": ("b",)}, "a", "stop")],
)
def test_abort_of_a_request_whose_tokens_already_ended_it_does_not_change_its_end(
    fields: dict[str, Any], text: str, finish_reason: str
) -> None:
    client = Client(register(**fields))
    for count, token in enumerate(ids("ab")):
        client.outputs.take_result(*result([(0, count, token)]))
    ended = client.outputs.finish(0, "abort")
    assert ended is not None
    client.add(ended[1])
    assert (client.text(), client.end().finish_reason) == (text, finish_reason)


def test_requests_are_found_by_client() -> None:
    client = Client(register(0), register(1, client=b"d"), register(2))
    assert client.outputs.keys_of_client(b"c") == [0, 2]
    assert client.outputs.all_keys() == [0, 1, 2]


def test_rows_are_used_again_without_a_trace_of_their_last_holder() -> None:
    client = Client()
    for key in range(300):
        client.outputs.register(register(key, max_tokens=2, stop_token_ids=(5,) if key % 2 else ()))
        if key >= 100:
            client.feed([5, 6], key=key - 100)
    assert client.outputs.num_unfinished == 100
    for key in range(200):
        assert client.token_ids(key) == ([5] if key % 2 else [5, 6])
        assert client.end(key).finish_reason == ("stop" if key % 2 else "length")


@pytest.mark.parametrize("seed", range(10))
def test_any_grouping_of_results_gives_the_same_text(seed: int) -> None:
    rng = random.Random(seed)
    texts = ["".join(rng.choice("abé日 ") for _ in range(rng.randint(1, 30))) for _ in range(5)]
    stops = tuple("".join(rng.choice("abé日") for _ in range(rng.randint(1, 3))) for _ in range(2))
    registers = [
        register(key, stop=stops, max_tokens=max(1, len(text.encode()) - rng.randint(0, 2)))
        for key, text in enumerate(texts)
    ]
    slow, fast = Client(*registers), Client()
    fed = [0] * 5
    for key, text in enumerate(texts):
        slow.feed(ids(text), key=key)
    late = list(registers)
    while any(count < len(ids(texts[key])) for key, count in enumerate(fed)) or late:
        if late and rng.random() < 0.3:
            fast.outputs.register(late.pop(0))
        keys = [key for key in range(5) if fed[key] < len(ids(texts[key])) and rng.random() < 0.7]
        fast.outputs.take_result(*result([(key, fed[key], ids(texts[key])[fed[key]]) for key in keys]))
        for key in keys:
            fed[key] += 1
        if rng.random() < 0.3:
            fast.take()
    fast.take()
    for key in range(5):
        assert (fast.text(key), fast.token_ids(key)) == (slow.text(key), slow.token_ids(key))
        assert fast.end(key).finish_reason == slow.end(key).finish_reason
    assert NOT_FINISHED == 0
