"""What is refused at the door, before anything is tokenized or compiled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from procengine.admission import Admission
from procengine.client_bodies import encode_body, generate_body
from procengine.config import LimitsConfig
from procengine.errors import InvalidRequestError, OverloadedError
from procengine.messages import Submit
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs
from procengine.workflows.generate import GenerateBody
from procengine.workflows.parts import load_frontend_parts

LIMITS = LimitsConfig(max_request_bytes=2000, max_queued_requests=5, max_client_requests=3, max_grammar_bytes=100)


def check(params: SamplingParams | None = None, request_id: str = "r", workflow: str = "generate", **state: Any) -> Any:
    body = encode_body(generate_body({"prompt": "x"}, params))
    admission = Admission({"generate": load_frontend_parts("generate")}, LIMITS)
    facts: dict[str, Any] = {
        "num_bytes": len(body),
        "num_unfinished": 0,
        "num_of_client": 0,
        "is_running": False,
        **state,
    }
    return admission.check(Submit(request_id, workflow, msgspec.Raw(body)), **facts)


def test_request_within_the_limits_comes_in() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputs(regex="a+"))
    assert check(params) == GenerateBody(prompt="x", sampling_params=params)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"workflow": "paint"}, InvalidRequestError, "workflow: 'paint' is not supported"),
        ({"num_bytes": 2001}, InvalidRequestError, r"request: has 2001 bytes, the limit \(max_request_bytes\) is 2000"),
        ({"request_id": ""}, InvalidRequestError, "request_id: must have 1 to 256 bytes"),
        ({"is_running": True}, InvalidRequestError, "request_id: 'r' is already running"),
        ({"num_unfinished": 5}, OverloadedError, r"5 unfinished requests, the limit \(max_queued_requests\) is 5"),
        ({"num_of_client": 3}, OverloadedError, r"3 unfinished requests, the limit \(max_client_requests\) is 3"),
    ],
)
def test_what_is_refused_names_the_field_the_value_and_the_limit(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^.*{message}"):
        check(**arguments)


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutputs(regex="a" * 101),
        StructuredOutputs(choice=tuple(f"choice {number}" for number in range(20))),
        StructuredOutputs(json_schema={"description": "é" * 50}),
        StructuredOutputs(grammar="é" * 50),
    ],
    ids=lambda spec: spec.kind,
)
def test_large_grammar_is_refused_before_it_is_compiled(spec: StructuredOutputs) -> None:
    message = r"^structured_outputs: has \d+ bytes, the limit \(max_grammar_bytes\) is 100$"
    with pytest.raises(InvalidRequestError, match=message):
        check(SamplingParams(structured_outputs=spec))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": ("a", "b", "c", "d")}, "bad_words: at most 3 words are allowed, got 4"),
        ({"bad_words": ("é" * 20, "a")}, "bad_words: at most 32 bytes in all are allowed, got 41"),
        ({"stop": ("a",) * 17}, "stop: at most 16 stop strings are allowed, got 17"),
        ({"n": 10**6}, "n: at most 128 choices are allowed, got 1000000"),
    ],
)
def test_too_much_is_refused_before_any_of_it_is_tokenized(fields: dict[str, Any], message: str) -> None:
    limits = LimitsConfig(max_bad_words=3, max_stop_bytes=32)
    submit = Submit("r", "generate", msgspec.Raw(encode_body(generate_body({"prompt": "x"}, SamplingParams(**fields)))))
    with pytest.raises(InvalidRequestError, match=f"^{message}$"):
        Admission({"generate": load_frontend_parts("generate")}, limits).check(
            submit, num_bytes=9, num_unfinished=0, num_of_client=0, is_running=False
        )
