"""The fold from wire messages to results."""

from __future__ import annotations

import struct

from procengine.messages import Delta, Embedding, TokenLogprobs
from procengine.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    Logprob,
    RequestOutput,
    StreamDelta,
    collect_deltas,
    collect_embedding,
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
