"""What `procengine generate` prints."""

from __future__ import annotations

import json

import pytest

from procengine.cli.generate import _print_all
from procengine.outputs import CompletionOutput, Logprob, RequestOutput

RESULT = RequestOutput(
    "r0", "hi", [1, 2, 3], [CompletionOutput(0, "there", [4, 5], "length", None, [{4: Logprob(-0.5, 1)}])], True, 2
)


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    _print_all([RESULT, RESULT], ["hi", "hi"], as_json=True)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert json.loads(lines[0]) == {
        "request_id": "r0",
        "prompt": "hi",
        "prompt_token_ids": [1, 2, 3],
        "prompt_logprobs": None,
        "outputs": [
            {
                "index": 0,
                "text": "there",
                "token_ids": [4, 5],
                "finish_reason": "length",
                "stop_reason": None,
                "logprobs": [{"4": {"logprob": -0.5, "rank": 1}}],
                "tool_calls": None,
                "error": None,
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 2},
    }


def test_usage_counts_the_prompt_once_and_all_choices(capsys: pytest.CaptureFixture[str]) -> None:
    choices = [CompletionOutput(index, "x", [4] * length, "stop") for index, length in enumerate((3, 0, 5))]
    prompt_logprobs = [None, {2: Logprob(-0.5, 1)}]
    _print_all([RequestOutput("r", "hi", [1, 2], choices, True, None, prompt_logprobs)], ["hi"], as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed["usage"] == {"prompt_tokens": 2, "completion_tokens": 8, "total_tokens": 10, "cached_tokens": 0}
    assert [output["index"] for output in printed["outputs"]] == [0, 1, 2]
    assert printed["prompt_logprobs"] == [None, {"2": {"logprob": -0.5, "rank": 1}}]


def test_each_choice_is_a_text(capsys: pytest.CaptureFixture[str]) -> None:
    choices = [CompletionOutput(index, text, [4], "stop") for index, text in enumerate(("one", "two"))]
    _print_all([RequestOutput("r", "hi", [1], choices, True)], ["hi"], as_json=False)
    assert capsys.readouterr().out == "one\ntwo\n"


def test_text_is_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _print_all([RESULT, RESULT], ["hi", "hi"], as_json=False)
    assert capsys.readouterr().out == "there\nthere\n"
