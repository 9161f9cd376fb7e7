"""What a generation request may ask of this model, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from procengine.adapter_table import AdapterFacts
from procengine.config import LimitsConfig
from procengine.errors import InvalidRequestError, UnknownAdapterError
from procengine.request import NO_ADAPTER, Request, RowSampling
from procengine.row_features import ADAPTER
from procengine.sampling_params import SamplingParams
from procengine.workflows.generate import GenerateBody, accept, register
from procengine.workflows.prompt import ModelFacts, Prepared
from tests.unit.simulated_worker import ToyMasks

VOCAB = 49152
EOS = (2, 0)


@dataclass(frozen=True)
class Identity:
    key: int = 7
    client: bytes = b"client"
    request_id: str = "r"
    seed: int = 99


def facts(**changes: Any) -> ModelFacts:
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_model_len": 8192,
        "pool_tokens": 1 << 20,
        "max_embed_tokens": 2048,
        "eos_token_ids": EOS,
        "limits": LimitsConfig(),
    }
    return ModelFacts(**(values | changes))


def accepted(token_ids: list[int], model: ModelFacts | None = None, **params: Any) -> Request:
    body = GenerateBody(prompt_token_ids=token_ids, sampling_params=SamplingParams(**params))
    (request,) = accept(body, Prepared(token_ids), model or facts(), Identity())
    return request


def refusal(token_ids: list[int], model: ModelFacts | None = None, **params: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        accepted(token_ids, model, **params)
    return str(caught.value)


# --- VAL-02


@pytest.mark.parametrize("wrong", [VOCAB, -1, 5279552648203111001, 2**64])
def test_val_02_id_outside_the_vocabulary_is_refused_by_value(wrong: int) -> None:
    for token_ids in ([wrong], [1, wrong, 3]):
        text = f"prompt_token_ids: {wrong} is not a token of this model; ids go from 0 to 49151"
        assert refusal(token_ids) == text


def test_val_02_first_and_last_id_are_accepted() -> None:
    assert accepted([0, VOCAB - 1]).prompt_token_ids.tolist() == [0, VOCAB - 1]


@pytest.mark.parametrize("wrong", [1.5, True, None, "1"])
def test_val_02_what_is_no_integer_does_not_decode(wrong: Any) -> None:
    data = msgspec.msgpack.encode({"prompt_token_ids": [1, wrong]})
    with pytest.raises(msgspec.ValidationError, match=r"Expected `int`.*prompt_token_ids"):
        msgspec.msgpack.decode(data, type=GenerateBody)


# --- VAL-01, VAL-03


@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids", "messages"])
def test_val_01_empty_prompt_is_refused_by_field(field: str) -> None:
    empty: Any = "" if field == "prompt" else []
    with pytest.raises(InvalidRequestError, match=f"^{field}: must not be empty"):
        GenerateBody(**{field: empty})


def test_val_01_text_that_becomes_no_token_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="prompt: must have at least one token, got 0"):
        accept(GenerateBody(prompt="x"), Prepared([]), facts(), Identity())


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": "a", "prompt_token_ids": [1]}, {"prompt": "a", "messages": [{"role": "user"}]}]
)
def test_exactly_one_kind_of_prompt_must_be_given(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="prompt: exactly one of"):
        GenerateBody(**fields)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "end"),
    [(8190, 1, 8191), (8190, 2, 8192), (8191, 1, 8192), (8190, None, 8192), (8191, None, 8192), (5, None, 8192)],
)
def test_val_03_what_fits_the_context_runs_to_the_last_position(
    num_tokens: int, max_tokens: int | None, end: int
) -> None:
    assert accepted([1] * num_tokens, max_tokens=max_tokens).end_position == end


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "numbers"),
    [
        (8191, 2, ("8191", "8193", "8192")),
        (8192, 1, ("8192",)),
        (8192, None, ("8192",)),
        (8193, 1, ("8193", "8192")),
        (8193, None, ("8193", "8192")),
        (100_000, 1, ("100000", "8192")),
        (5, 10**12, ("1000000000000", "8192")),
    ],
)
def test_val_03_what_does_not_fit_is_refused_with_both_numbers(
    num_tokens: int, max_tokens: int | None, numbers: tuple[str, ...]
) -> None:
    text = refusal([1] * num_tokens, max_tokens=max_tokens)
    assert all(number in text for number in numbers)
    assert "max_model_len" in text


# --- SCH-01: the pool is a limit too


def test_sch_01_prompt_over_the_pool_is_refused_at_once() -> None:
    small = facts(pool_tokens=640, max_model_len=2048)
    assert refusal([1] * 700, small) == "prompt: has 700 tokens, the KV cache of a worker holds 640"


@pytest.mark.parametrize(("num_tokens", "max_tokens", "end"), [(600, 200, 640), (600, 10, 610), (640, 5, 640)])
def test_sch_01_request_that_outgrows_the_pool_ends_with_it(num_tokens: int, max_tokens: int, end: int) -> None:
    assert (
        accepted([1] * num_tokens, facts(pool_tokens=640, max_model_len=2048), max_tokens=max_tokens).end_position
        == end
    )


# --- stops, logprobs, priority


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop": ("a",) * 17}, "stop: at most 16 stop strings are allowed, got 17"),
        ({"stop": ("é" * 2049,)}, "stop: at most 4096 bytes in all are allowed, got 4098"),
        ({"stop_token_ids": (1,) * 65}, "stop_token_ids: at most 64 ids are allowed, got 65"),
        ({"stop_token_ids": (VOCAB,)}, f"stop_token_ids: {VOCAB} is not a token of this model; ids go from 0 to 49151"),
        ({"logprobs": 21}, "logprobs: at most 20 alternatives are allowed, got 21"),
    ],
)
def test_limits_of_the_server_are_named(params: dict[str, Any], message: str) -> None:
    assert refusal([1], **params) == message


@pytest.mark.parametrize(
    "params", [{"stop": ("a",) * 16}, {"stop": ("é" * 2048,)}, {"stop_token_ids": (VOCAB - 1,) * 64}, {"logprobs": 20}]
)
def test_limits_themselves_are_allowed(params: dict[str, Any]) -> None:
    assert accepted([1], **params).key == 7


@pytest.mark.parametrize("priority", [2**31 + 1, -(2**31) - 1])
def test_priority_out_of_range_is_refused(priority: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"^priority: .*{priority}"):
        accept(GenerateBody(prompt_token_ids=[1], priority=priority), Prepared([1]), facts(), Identity())


@pytest.mark.parametrize(
    ("params", "stops"),
    [
        ({}, EOS),
        ({"stop_token_ids": (5,)}, (*EOS, 5)),
        ({"ignore_eos": True}, ()),
        ({"ignore_eos": True, "stop_token_ids": (2,)}, (2,)),
    ],
)
def test_model_ends_and_own_stop_tokens_add_up(params: dict[str, Any], stops: tuple[int, ...]) -> None:
    assert accepted([1], **params).stop_token_ids == stops


# --- what the worker gets


@pytest.mark.parametrize(
    ("params", "row"),
    [
        ({"temperature": 0}, RowSampling(99)),
        ({"temperature": 1e-7, "top_k": 5, "top_p": 0.5}, RowSampling(99)),  # greedy: nothing else matters
        ({}, RowSampling(99, 1.0, features=1)),
        ({"seed": 5, "temperature": 0.5}, RowSampling(5, 0.5, features=1)),
        ({"seed": 0}, RowSampling(0, 1.0, features=1)),
        ({"top_k": 5}, RowSampling(99, 1.0, 5, features=3)),
        ({"top_k": -1}, RowSampling(99, 1.0, features=1)),
        ({"top_k": VOCAB}, RowSampling(99, 1.0, features=1)),  # SMP-03: all of them is no limit
        ({"top_k": 9_999_999}, RowSampling(99, 1.0, features=1)),
        ({"top_k": VOCAB - 1}, RowSampling(99, 1.0, VOCAB - 1, features=3)),
        ({"top_p": 0.5}, RowSampling(99, 1.0, top_p=0.5, features=5)),
        ({"min_p": 0.5}, RowSampling(99, 1.0, min_p=0.5, features=9)),
        ({"logprobs": 0}, RowSampling(99, 1.0, num_logprobs=0, features=1)),  # SMP-12: 0 is not off
        ({"logprobs": 3, "temperature": 0}, RowSampling(99, num_logprobs=3)),
    ],
)
def test_row_values(params: dict[str, Any], row: RowSampling) -> None:
    assert accepted([1], **params).sampling == row


@pytest.mark.parametrize("temperature", [1e39, 1e300])
def test_temperature_beyond_float32_is_its_largest_value(temperature: float) -> None:
    sampling = accepted([1], temperature=temperature).sampling
    assert np.isfinite(np.array([sampling.temperature], np.float32)).all()


def test_register_tells_the_output_process_what_it_needs() -> None:
    body = GenerateBody(
        prompt_token_ids=[1, 3],
        sampling_params=SamplingParams(
            max_tokens=9, stop=("x",), stop_token_ids=(5,), include_stop_str_in_output=True, logprobs=2
        ),
    )
    message = register(accept(body, Prepared([1, 3]), facts(), Identity())[0], body)
    assert (message.key, message.client, message.request_id, message.workflow) == (7, b"client", "r", "generate")
    assert (message.prompt_token_ids, message.end_position) == ([1, 3], 11)
    assert (message.stop_token_ids, message.requested_stop_token_ids, message.stop) == ((*EOS, 5), (5,), ("x",))
    assert (message.include_stop_str_in_output, message.skip_special_tokens, message.num_logprobs) == (True, True, 2)


def test_cache_salt_is_part_of_the_request() -> None:
    body = GenerateBody(prompt_token_ids=[1], cache_salt="ü")
    assert accept(body, Prepared([1]), facts(), Identity())[0].cache_salt == "ü".encode()


def test_text_that_is_not_utf_8_does_not_decode() -> None:
    data = msgspec.msgpack.encode({"prompt_token_ids": [1], "cache_salt": "abc"}).replace(b"abc", b"\xed\xa0\x80")
    with pytest.raises(msgspec.DecodeError, match="UTF-8"):
        msgspec.msgpack.decode(data, type=GenerateBody)


# --- choices, truncation, words


def test_smp_10_choices_have_keys_indices_and_seeds_of_their_own_and_share_the_prompt() -> None:
    masks: list[ToyMasks] = []

    def make_grammar() -> ToyMasks:
        masks.append(ToyMasks())
        return masks[-1]

    body = GenerateBody(prompt="x", sampling_params=SamplingParams(n=3, prompt_logprobs=1, min_tokens=2, seed=5))
    choices = accept(body, Prepared([1, 2], ((8,),), make_grammar), facts(), Identity())
    assert [(c.key, c.index, c.sampling.seed) for c in choices] == [(7, 0, 5), (8, 1, 6), (9, 2, 7)]
    assert [c.num_prompt_logprobs for c in choices] == [1, -1, -1], "the prompt is scored once"
    assert [c.grammar for c in choices] == masks
    assert {(c.min_position, c.rules.early_stop_ids, c.rules.bad_words) for c in choices} == {(4, EOS, ((8,),))}


@pytest.mark.parametrize(
    ("keep", "max_tokens", "num_kept", "max_model_len"),
    [(1, 4, 1, 10), (3, 4, 3, 10), (6, 4, 6, 10), (50, 4, 10, 14), (-1, 4, 6, 10), (-1, 4, 10, 20), (-1, None, 9, 10)],
)
def test_truncation_keeps_the_end_of_the_prompt(
    keep: int, max_tokens: int | None, num_kept: int, max_model_len: int
) -> None:
    model = facts(max_model_len=max_model_len)
    request = accepted(list(range(10)), model, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert request.prompt_token_ids.tolist() == list(range(10))[-num_kept:]


# --- adapters


def named(lora_name: str, model: ModelFacts, salt: str = "") -> Request:
    body = GenerateBody(prompt_token_ids=[1], lora_name=lora_name, cache_salt=salt)
    (request,) = accept(body, Prepared([1]), model, Identity())
    return request


def test_an_adapter_is_its_place_and_its_number_salts_the_cache() -> None:
    first, again = (facts(adapters={"a": AdapterFacts(number, 3)}) for number in (10, 11))
    plain, one, reloaded, salted = named("", first), named("a", first), named("a", again), named("a", first, "s")
    assert [request.adapter for request in (plain, one, reloaded)] == [NO_ADAPTER, 3, 3]
    assert [request.sampling.features & ADAPTER for request in (plain, one)] == [0, ADAPTER]
    assert len({request.cache_salt for request in (plain, one, reloaded, salted)}) == 4


def test_an_adapter_that_is_not_loaded_is_refused_by_name() -> None:
    with pytest.raises(UnknownAdapterError, match="lora_name: there is no adapter 'b' here; there are: a"):
        named("b", facts(adapters={"a": AdapterFacts(0, 0)}))
