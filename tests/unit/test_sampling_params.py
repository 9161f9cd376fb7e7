"""Ranges of the sampling parameters; what is refused is named with its value."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import pytest

from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.seed, params.stop, params.stop_token_ids, params.max_tokens) == (None, None, None, 16)
    assert (params.stop_strings, params.stop_ids) == ((), ())
    assert (params.logprobs, params.ignore_eos, params.skip_special_tokens) == (None, False, True)
    assert params.include_stop_str_in_output is False


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 2},
        {"temperature": 1e-38},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 9_999_999},
        {"min_p": 0},
        {"min_p": 1.0},
        {"seed": 2**63 - 1},
        {"seed": -(2**63)},
        {"max_tokens": 1},
        {"max_tokens": None},
        {"logprobs": 0},
        {"stop": "x"},
        {"stop": ("x", "y")},
        {"stop_token_ids": (0, 5)},
    ],
)
def test_values_in_range_are_taken_and_survive_the_wire(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", (NAN, INF, -INF, -0.1, True, "1", None, [1], 10**400)),
        ("top_p", (NAN, INF, 0, -0.1, 1.01, True, "1", 10**400)),
        ("min_p", (NAN, INF, -0.1, 1.01, False, -(10**400))),
        ("top_k", (-2, 1.0, NAN, True, "5")),
        ("seed", (2**63, -(2**63) - 1, 1.5, True, "x")),
        ("max_tokens", (0, -1, 1.0, INF, True)),
        ("logprobs", (-1, 1.0, True, "all")),
        ("stop", ("", ("a", ""), (5,), [None])),
        ("stop_token_ids", ((-1,), (1.0,), (True,), ("a",))),
    ],
)
def test_values_out_of_range_are_refused_by_name_and_value(field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError, match=rf"^{field}: ") as caught:
            SamplingParams(**{field: value})
        shown = repr(value[0] if field == "stop_token_ids" else value)
        assert shown in str(caught.value)


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
@pytest.mark.parametrize("value", [5, {"a": 1}])
def test_what_is_no_list_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}: .*{value!r}"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("json", "message"),
    [
        (b'{"temperature": -1}', "temperature: must be finite and 0 or more, got -1.0"),
        (b'{"temperature": "hot"}', "Expected `float`, got `str` - at `$.temperature`"),
        (b'{"top_k": 1.5}', "Expected `int`, got `float` - at `$.top_k`"),
        (b'{"max_tokens": true}', "Expected `int | null`, got `bool` - at `$.max_tokens`"),
        (b'{"temprature": 1}', "Object contains unknown field `temprature`"),
        (b'{"stop_token_ids": [-3]}', "stop_token_ids: must be at least 0, got -3"),
    ],
)
def test_decoder_names_the_field(json: bytes, message: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=re.escape(message)):
        msgspec.json.decode(json, type=SamplingParams)


@pytest.mark.parametrize("token", [b"NaN", b"Infinity", b"-Infinity"])
def test_json_without_numbers_is_refused(token: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(b'{"temperature": ' + token + b"}", type=SamplingParams)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
def test_messagepack_can_carry_what_json_cannot_and_it_is_refused_too(field: str, value: float) -> None:
    with pytest.raises(msgspec.ValidationError, match=f"{field}: must be finite"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({field: value}), type=SamplingParams)


@pytest.mark.parametrize(
    ("temperature", "is_greedy"), [(0, True), (1e-7, True), (9.9e-6, True), (1e-5, False), (1, False)]
)
def test_tiny_temperatures_are_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is is_greedy


def test_one_stop_string_is_not_its_characters() -> None:
    assert SamplingParams(stop="ab").stop_strings == ("ab",)
    assert SamplingParams(stop=["ab", "c"]).stop_strings == ("ab", "c")  # type: ignore[arg-type]


def test_parameters_are_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().top_k = 5  # type: ignore[misc]
