"""From the tokens of a forward pass to its message: which samples count, and where their log probabilities go."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.step_output import (
    Logprobs,
    PassTimes,
    PromptLogprobs,
    SampledTokens,
    StepOutput,
    WorkerIdentity,
    accepted_samples,
)
from procengine.step_payload import RESULT_SECTIONS, cut_sections, join_int64

ROWS = st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=5), max_size=6)


def plain_accepted(rows: list[list[tuple[int, int]]]) -> list[bool]:
    found = []
    for row in rows:
        counts = True
        for sampled, proposed in row:
            found.append(counts)
            counts = counts and sampled == proposed
    return found


@settings(max_examples=300, deadline=None, derandomize=True)
@given(ROWS)
def test_samples_count_up_to_the_first_that_differs_from_its_proposal(rows: list[list[tuple[int, int]]]) -> None:
    sampled = np.array([pair[0] for row in rows for pair in row], np.int32)
    proposed = np.array([pair[1] for row in rows for pair in row], np.int32)
    counts = np.array([len(row) for row in rows], np.int32)
    found = accepted_samples(sampled, proposed, counts)
    assert found.dtype == np.bool_
    assert found.tolist() == plain_accepted(rows)


def test_only_what_counts_is_sent_and_logprobs_follow_their_rows() -> None:
    keys = np.array([4, 4, 4, 5, 2**40], np.int64)
    tokens = SampledTokens(
        np.array([10, 11, 12, 20, 30], np.int32),
        np.array([True, True, False, True, True]),
        Logprobs(
            np.array([3, 4], np.int32),
            np.array([[20, 1], [30, 2]], np.int32),
            np.array([[-0.5, -1], [-2, -3]], np.float32),
            np.array([[2, 1], [3, 1]], np.int32),
        ),
        PromptLogprobs(
            np.array([[9, 0, 1, 2]], np.int32),
            np.array([[7], [8]], np.int32),
            np.array([[-4], [-5]], np.float32),
            np.array([[1], [6]], np.int32),
        ),
    )
    output = StepOutput(3, 0, True, keys, np.array([7, 8, 9, 4, 5], np.int32), lambda: tokens, PassTimes(1, 2, 3, 12))
    header, payload = output.to_message(WorkerIdentity(1, 2), output.wait())
    assert (header.rank, header.epoch, header.step_id, header.num_rows, header.busy_ns) == (1, 2, 3, 4, 11)
    sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
    assert join_int64(sections["key_words"]).tolist() == [4, 4, 5, 2**40]
    assert sections["positions"].tolist() == [7, 8, 4, 5]
    assert sections["token_ids"].tolist() == [10, 11, 20, 30]
    assert sections["logprob_rows"].tolist() == [2, 3]
    assert sections["logprob_token_ids"].tolist() == [20, 1, 30, 2]
    assert sections["logprobs"].view(np.float32).tolist() == [-0.5, -1, -2, -3]
    assert sections["prompt_spans"].tolist() == [9, 0, 1, 2]
    assert sections["prompt_logprob_token_ids"].tolist() == [7, 8]
    assert sections["prompt_logprobs"].view(np.float32).tolist() == [-4, -5]
    assert sections["prompt_logprob_ranks"].tolist() == [1, 6]


def test_pass_without_samples_is_an_empty_result() -> None:
    none = np.zeros(0, np.int32)
    output = StepOutput(3, 0, True, np.zeros(0, np.int64), none, lambda: SampledTokens(none), PassTimes(0, 0, 0, 0))
    header, payload = output.to_message(WorkerIdentity(0, 0), output.wait())
    assert (header.num_rows, payload.size, set(header.sizes)) == (0, 0, {0})
