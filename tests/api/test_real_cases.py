"""The cases of texts, sampling and log probabilities with SmolLM2 that are about more than one text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.api.http_client import HttpClient

pytestmark = pytest.mark.model

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
P1, P2, P3 = "The capital of France is", "Here is the English alphabet: ABC", "日本語" * 4
P4 = "cat dog cat dog cat dog"
P5: Any = [{"role": "user", "content": "What is the capital of France?"}]
DOG = 2767


@pytest.fixture
def http(smollm2_http: HttpClient) -> HttpClient:
    return smollm2_http


def greedy(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}


def choice_of(http: HttpClient, body: dict[str, Any]) -> dict[str, Any]:
    (choice,) = http.post(TEXT, body).json["choices"]
    return dict(choice)


def at_once(http: HttpClient, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: choice_of(http, body), bodies))


def pieces_of(http: HttpClient, path: str, body: dict[str, Any]) -> list[str]:
    """The texts of a stream's events that have one."""
    choices = [event["choices"][0] for event in http.events(path, body)]
    texts = [one["text"] if path == TEXT else one["delta"].get("content", "") for one in choices]
    return [text for text in texts if text]


def test_det_01_and_03_characters_are_whole_also_in_a_crowd(http: HttpClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        for pieces in pool.map(lambda _: pieces_of(http, TEXT, greedy(P3, 12)), range(8)):
            assert "".join(pieces) == "日本語日本語" and len(pieces) <= 6
            assert not any("\ufffd" in piece for piece in pieces)
    for max_tokens, texts in (
        (1, ("", "\ufffd")),
        (2, ("日",)),
        (3, ("日本",)),
        (4, ("日本", "日本\ufffd")),
        (5, None),
    ):
        answer = http.post(TEXT, greedy(P3, max_tokens)).json
        assert answer["usage"]["completion_tokens"] == max_tokens
        assert answer["choices"][0]["finish_reason"] == "length"
        assert texts is None or answer["choices"][0]["text"] in texts
        assert "".join(pieces_of(http, TEXT, greedy(P3, max_tokens))) == answer["choices"][0]["text"]


def test_det_07_10_and_11_nothing_of_a_stop_is_shown(http: HttpClient) -> None:
    assert pieces_of(http, TEXT, greedy(P2, 12, stop=["DEFGHIJ"])) == []
    assert pieces_of(http, CHAT, {"messages": P5, "temperature": 0, "max_tokens": 20, "stop": ["The capital"]}) == []
    for stop, texts in ((["E", "DE"], ("", "D")), (["G", "EF"], ("D", "DEF"))):  # by place, or by the order of the list
        whole = choice_of(http, greedy(P2, 12, stop=stop))
        assert whole["text"] in texts and whole["finish_reason"] == "stop"
        assert "".join(pieces_of(http, TEXT, greedy(P2, 12, stop=stop))) == whole["text"]
    body = {"messages": P5, "temperature": 0, "max_tokens": 20, "min_tokens": 12, "return_token_ids": True}
    answer = http.post(CHAT, body).json
    assert answer["usage"]["completion_tokens"] >= 12 and 2 not in answer["choices"][0]["token_ids"][:12]


def test_smp_02_and_03_in_one_batch(http: HttpClient) -> None:
    alone = choice_of(http, greedy(P2, 12))["token_ids"]
    neighbour = greedy(P1, 12, temperature=1, seed=7)
    expected = choice_of(http, neighbour)["token_ids"]
    cold = [greedy(P2, 12, temperature=10.0**-power, logprobs=1) for power in (2, 3, 4, 5, 6, 7, 38)]
    *rows, last, of_one, of_five, again = at_once(
        http,
        [
            *cold,
            neighbour,
            greedy(P2, 12, temperature=1, top_k=1),
            greedy(P1, 12, top_k=5, temperature=1, ignore_eos=True),
            greedy(P2, 12),
        ],
    )
    assert all(row["token_ids"] == alone for row in (*rows, of_one, again))  # strict JSON: no log probability is NaN
    assert last["token_ids"] == expected and len(of_five["token_ids"]) == 12


def test_smp_08_penalties_count_what_they_should_and_hit_nobody_else(http: HttpClient) -> None:
    rows = at_once(
        http,
        [
            greedy(P4, 8, repetition_penalty=1.3),
            greedy(P4, 8, frequency_penalty=0.5),
            greedy(P4, 8, presence_penalty=0.5),
            greedy(P4, 8),
        ],
    )
    assert [row["token_ids"][0] for row in rows] == [198, DOG, DOG, DOG]
    assert rows[3]["token_ids"] == [DOG] * 8
    assert choice_of(http, greedy(P4, 8, repetition_penalty=1.3))["token_ids"] == rows[0]["token_ids"]  # a warm cache


def test_smp_10_choices_are_all_there_and_counted_once(http: HttpClient) -> None:
    body = {"prompt": P1, "temperature": 1.2, "max_tokens": 16, "n": 5, "ignore_eos": True}
    for seed in ({}, {"seed": 11}):
        answer = http.post(TEXT, body | seed).json
        assert [one["index"] for one in answer["choices"]] == list(range(5))
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 80)
        assert len({one["text"] for one in answer["choices"]}) > 1
        texts, ends = [""] * 5, [0] * 5
        for event in http.events(TEXT, body | seed):
            for one in event["choices"]:
                texts[one["index"]] += one["text"]
                ends[one["index"]] += one["finish_reason"] is not None
        assert ends == [1] * 5
        assert not seed or texts == [one["text"] for one in answer["choices"]]
    alike = http.post(TEXT, body | {"temperature": 0}).json["choices"]
    assert len({one["text"] for one in alike}) == 1


def test_smp_12_and_14_log_probabilities_are_the_models(http: HttpClient) -> None:
    logprobs = choice_of(http, greedy(P1, 1, logprobs=5))["logprobs"]
    expected = {" Paris": -0.2606, " the": -2.7454, " London": -4.4058, " Le": -4.6082, " New": -4.6807}
    assert logprobs["top_logprobs"] == [pytest.approx(expected, abs=0.05)]
    text = " ".join(f"word{number} and" for number in range(30))
    for ids in (http.post("/tokenize", {"prompt": text}).json["tokens"][:length] for length in (31, 32, 33, 48, 100)):
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        cold, *warm = (choice_of(http, body)["prompt_logprobs"] for _ in range(3))
        assert cold[0] is None and len(cold) == len(ids)
        for run in warm:
            for before, after in zip(cold[1:], run[1:], strict=True):
                assert {k: v["logprob"] for k, v in after.items()} == pytest.approx(
                    {k: v["logprob"] for k, v in before.items()}, abs=1e-3
                )
