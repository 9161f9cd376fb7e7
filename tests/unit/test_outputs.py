"""The fold from wire messages to results."""

from __future__ import annotations

import struct

import msgspec
import pytest

from procengine.messages import Delta, Embedding, RequestTimes, TokenLogprobs
from procengine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestOutput,
    StreamDelta,
    collect_deltas,
    collect_embedding,
    request_metrics,
    stream_delta,
)

FIRST = Delta("r", 0, "a", [1], prompt_token_ids=[7, 8], num_cached_tokens=1)


def test_deltas_become_one_result() -> None:
    deltas = [FIRST, Delta("r", 0, "b", [2, 3]), Delta("r", 0, "", [4], "stop", 4)]
    assert collect_deltas("r", "text", deltas) == RequestOutput(
        request_id="r",
        prompt="text",
        prompt_token_ids=[7, 8],
        outputs=[CompletionOutput(0, "ab", [1, 2, 3, 4], "stop", 4)],
        finished=True,
        num_cached_tokens=1,
    )


def test_request_without_its_last_delta_is_not_finished() -> None:
    result = collect_deltas("r", None, [FIRST])
    assert not result.finished
    assert result.outputs[0].finish_reason is None


def test_request_aborted_before_its_first_token_has_an_empty_output() -> None:
    result = collect_deltas("r", None, [Delta("r", 0, "", [], "abort", prompt_token_ids=[7])])
    assert result.finished
    assert result.prompt_token_ids == [7]
    assert result.outputs == [CompletionOutput(0, "", [], "abort")]
    assert result.num_cached_tokens is None


def test_choices_are_told_apart_by_index() -> None:
    deltas = [FIRST, Delta("r", 1, "x", [5]), Delta("r", 0, "", [], "length"), Delta("r", 1, "y", [6], "stop")]
    outputs = collect_deltas("r", None, deltas).outputs
    assert [(o.index, o.text, o.token_ids, o.finish_reason) for o in outputs] == [
        (0, "a", [1], "length"),
        (1, "xy", [5, 6], "stop"),
    ]


def test_choices_come_in_order_of_index_each_once() -> None:
    ended = [Delta("r", index, str(index), [index], "stop") for index in (3, 0, 4, 2, 1)]
    result = collect_deltas("r", None, ended)
    assert [(output.index, output.text, output.finish_reason) for output in result.outputs] == [
        (index, str(index), "stop") for index in range(5)
    ]
    assert result.finished
    assert not collect_deltas("r", None, [FIRST, *ended[2:]]).finished


def test_final_messages_give_what_their_deltas_would() -> None:
    logprob = TokenLogprobs((1,), (-0.5,), (1,))
    deltas = [
        Delta("r", 0, "a", [1], logprobs=[logprob], prompt_token_ids=[7, 8], num_cached_tokens=1),
        Delta("r", 0, "b", [1], "stop", "end", logprobs=[logprob]),
    ]
    final = Delta("r", 0, "ab", [1, 1], "stop", "end", [logprob, logprob], [7, 8], 1)
    assert collect_deltas("r", None, [final]) == collect_deltas("r", None, deltas)


def test_prompt_logprobs_are_one_map_a_prompt_token_and_none_for_the_first() -> None:
    wire = [None, TokenLogprobs((8, 8, 9), (-0.5, -0.5, -1.0), (1, 1, 2))]
    first = Delta("r", 0, "a", [1], prompt_token_ids=[7, 8], prompt_logprobs=wire)
    maps = [None, {8: Logprob(-0.5, 1), 9: Logprob(-1.0, 2)}]
    assert collect_deltas("r", None, [first, Delta("r", 0, "", [], "stop")]).prompt_logprobs == maps
    assert stream_delta(first).prompt_logprobs == maps
    assert collect_deltas("r", None, [FIRST]).prompt_logprobs is None
    assert stream_delta(FIRST).prompt_logprobs is None


def test_logprobs_are_one_map_a_token() -> None:
    chosen_is_third = TokenLogprobs((3, 1, 2), (-2.0, -0.5, -1.0), (3, 1, 2))
    chosen_is_first = TokenLogprobs((1, 1, 2), (-0.5, -0.5, -1.0), (1, 1, 2))
    deltas = [
        Delta("r", 0, "a", [3], logprobs=[chosen_is_third]),
        Delta("r", 0, "b", [1], "length", logprobs=[chosen_is_first]),
    ]
    logprobs = collect_deltas("r", None, deltas).outputs[0].logprobs
    assert logprobs == [
        {3: Logprob(-2.0, 3), 1: Logprob(-0.5, 1), 2: Logprob(-1.0, 2)},
        {1: Logprob(-0.5, 1), 2: Logprob(-1.0, 2)},
    ]
    assert list(logprobs[0]) == [3, 1, 2]  # the chosen token first


def test_stream_delta_shows_what_callers_need() -> None:
    assert stream_delta(Delta("r", 0, "b", [2], "stop", "end")) == StreamDelta("r", 0, "b", [2], "stop", "end")


def test_embedding_bytes_become_floats() -> None:
    message = Embedding("e", struct.pack("<3f", 0.5, -0.25, 0.0), [1, 2])
    assert collect_embedding(message) == EmbeddingOutput("e", [0.5, -0.25, 0.0], [1, 2])


# --- times


MS = 10**6


@pytest.mark.parametrize(
    ("times", "delivered", "arrived", "stages"),
    [
        ((1, 2, 4, 7, 11, 16), 22, 29, (1, 2, 3, 4, 5, 6, 7)),
        ((0, 2, 4, 7, 11, 16), 22, 29, (0, 2, 3, 4, 5, 6, 7)),  # a client that did not say when
        ((1, 2, 4, 0, 0, 0), 22, 29, (1, 2, 0, 0, 0, 18, 7)),  # aborted in the queue
        ((1, 2, 4, 7, 11, 11), 22, 0, (1, 2, 3, 4, 0, 11, 0)),  # nobody noted when it came
    ],
)
def test_stages_add_up(times: tuple[int, ...], delivered: int, arrived: int, stages: tuple[int, ...]) -> None:
    reached = msgspec.structs.replace(RequestTimes(*(at * MS for at in times)), num_preemptions=3)
    found = request_metrics(reached, delivered * MS, arrived * MS)
    assert msgspec.structs.astuple(found) == (*stages, sum(stages), 3)


def test_the_times_of_the_choice_that_ended_last_are_the_requests() -> None:
    ends = [Delta("r", at, "", [4], "stop", times=RequestTimes(1, 1, 1, 1, 1, at * MS)) for at in (2, 1)]
    metrics = collect_deltas("r", None, [FIRST, *ends], 3 * MS, 4 * MS).metrics
    assert metrics is not None
    assert (metrics.detokenize_ms, metrics.deliver_ms) == (2.0, 1.0)
    assert stream_delta(ends[1], 3 * MS, 4 * MS).metrics == metrics
