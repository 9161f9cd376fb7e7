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
        "outputs": [
            {
                "index": 0,
                "text": "there",
                "token_ids": [4, 5],
                "finish_reason": "length",
                "stop_reason": None,
                "logprobs": [{"4": {"logprob": -0.5, "rank": 1}}],
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cached_tokens": 2},
    }


def test_text_is_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    _print_all([RESULT, RESULT], ["hi", "hi"], as_json=False)
    assert capsys.readouterr().out == "there\nthere\n"
