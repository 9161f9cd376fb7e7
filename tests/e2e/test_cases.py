"""shared/cases.md on the real model through a running group: streamed and not, alone and eight at once."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from procengine import Client, SamplingParams
from procengine.errors import InvalidRequestError
from procengine.outputs import StreamDelta
from tests.e2e.oracle import next_logprobs
from tests.e2e.running_group import RunningGroup, joined
from tests.e2e.smollm2 import P1, P2, P3, P4, P5, Prompt, greedy

pytestmark = pytest.mark.model

VOCAB_SIZE = 49152
_NUM_STREAMS = 8


def message(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt.text}]


def stream(client: Client, prompt: Prompt, params: SamplingParams) -> list[StreamDelta]:
    return list(client.stream(prompt.text, params))


def eight_streams(client: Client, prompt: Prompt, params: SamplingParams) -> list[list[StreamDelta]]:
    """The same request eight times at once, on threads that share one client."""
    results: list[list[StreamDelta]] = [[] for _ in range(_NUM_STREAMS)]

    def run(at: int) -> None:
        results[at].extend(stream(client, prompt, params))

    threads = [threading.Thread(target=run, args=(at,)) for at in range(_NUM_STREAMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def check_everywhere(
    group: RunningGroup, prompt: Prompt, params: SamplingParams, expected: tuple[str, list[int], str, int | str | None]
) -> list[list[StreamDelta]]:
    """(text, token ids, finish reason, stop reason) are alike without a stream, in one, and in eight at once."""
    whole = group.client.generate(prompt.text, params)
    assert len(whole.prompt_token_ids) == prompt.num_tokens
    (output,) = whole.outputs
    assert (output.text, output.token_ids, output.finish_reason, output.stop_reason) == expected
    streams = [stream(group.client, prompt, params), *eight_streams(group.client, prompt, params)]
    for deltas in streams:
        assert joined(deltas) == expected
    return streams


def texts(deltas: list[StreamDelta]) -> list[str]:
    return [delta.text for delta in deltas if delta.text]


def decode(group: RunningGroup, token_ids: list[int]) -> str:
    return str(Backend.from_file(group.config.model.tokenizer_path).decode(token_ids, skip_special_tokens=True))


# --- the canary


@pytest.fixture
def canary(smollm2: RunningGroup) -> Iterator[None]:
    """After whatever a test has done: the group answers as before, with the same processes and as many open files."""
    files_before = smollm2.num_open_files()
    yield
    started_s = time.monotonic()
    assert smollm2.client.generate(P1.text, greedy(4)).outputs[0].token_ids == P1.token_ids
    assert time.monotonic() - started_s < 20
    assert smollm2.num_open_files() == files_before  # and so all pids are still there
    assert "Traceback" not in smollm2.log


# --- P1 to P5


@pytest.mark.parametrize("prompt", [P1, P2, P3, P4], ids=["P1", "P2", "P3", "P4"])
def test_greedy_continuations(prompt: Prompt, smollm2: RunningGroup) -> None:
    params = greedy(len(prompt.token_ids))
    check_everywhere(smollm2, prompt, params, (prompt.completion, prompt.token_ids, "length", None))


def test_all_continuations_in_one_batch(smollm2: RunningGroup) -> None:
    prompts = [P1, P2, P3, P4] * 2
    params = [greedy(len(prompt.token_ids)) for prompt in prompts]
    found = smollm2.generate([prompt.text for prompt in prompts], params)
    assert [output.outputs[0].token_ids for output in found] == [prompt.token_ids for prompt in prompts]


def test_p5_chat(smollm2: RunningGroup) -> None:
    result = smollm2.client.chat(message(P5), greedy(64))
    assert len(result.prompt_token_ids) == P5.num_tokens
    (output,) = result.outputs
    assert (output.text, output.token_ids, output.finish_reason) == (P5.completion, P5.token_ids, "stop")
    deltas = list(smollm2.client.stream(messages=message(P5), params=greedy(64)))
    assert joined(deltas) == (P5.completion, P5.token_ids, "stop", None)


# --- detokenization


def test_det_01_characters_of_several_tokens_come_out_whole(smollm2: RunningGroup) -> None:
    streams = check_everywhere(smollm2, P3, greedy(12), ("日本語日本語", P3.token_ids, "length", None))
    assert decode(smollm2, P3.token_ids) == "日本語日本語"
    for deltas in streams:
        assert len(texts(deltas)) <= 6
        assert all("\ufffd" not in text and text.encode() for text in texts(deltas))


@pytest.mark.parametrize(
    ("max_tokens", "text"), [(1, "\ufffd"), (2, "日"), (3, "日本"), (4, "日本\ufffd"), (6, "日本語")]
)
def test_det_03_an_end_in_the_middle_of_a_character(max_tokens: int, text: str, smollm2: RunningGroup) -> None:
    token_ids = P3.token_ids[:max_tokens]
    assert decode(smollm2, token_ids) == text
    check_everywhere(smollm2, P3, greedy(max_tokens), (text, token_ids, "length", None))


def test_det_05_leading_space(smollm2: RunningGroup) -> None:
    check_everywhere(smollm2, P1, greedy(1), (" Paris", [7042], "length", None))
    check_everywhere(smollm2, P4, greedy(2), (" dog dog", [2767, 2767], "length", None))


# --- stop strings


def test_det_07_the_start_of_a_stop_string_is_never_shown(smollm2: RunningGroup) -> None:
    params = greedy(12, stop=("DEFGHIJ",))
    streams = check_everywhere(smollm2, P2, params, ("", P2.token_ids[:4], "stop", "DEFGHIJ"))
    assert [texts(deltas) for deltas in streams] == [[]] * len(streams)


@pytest.mark.parametrize(("stop", "text", "num_tokens"), [("FGHI", "DE", 3), ("GHIJ", "DEF", 4)])
def test_det_08_a_stop_string_across_tokens(stop: str, text: str, num_tokens: int, smollm2: RunningGroup) -> None:
    assert text == P2.completion[: P2.completion.find(stop)]
    check_everywhere(smollm2, P2, greedy(12, stop=stop), (text, P2.token_ids[:num_tokens], "stop", stop))


@pytest.mark.parametrize(
    ("stops", "excluding", "including", "matched"),
    [
        (("E",), "D", "DE", "E"),
        # The match that is complete first wins; of two that end at the same character, the longer one.
        (("E", "DE"), "", "DE", "DE"),
        (("G", "EF"), "D", "DEF", "EF"),
    ],
)
def test_det_10_a_stop_string_inside_a_token(
    stops: tuple[str, ...], excluding: str, including: str, matched: str, smollm2: RunningGroup
) -> None:
    token_ids = P2.token_ids[:1]  # DEF
    check_everywhere(smollm2, P2, greedy(12, stop=stops), (excluding, token_ids, "stop", matched))
    params = greedy(12, stop=stops, include_stop_str_in_output=True)
    check_everywhere(smollm2, P2, params, (including, token_ids, "stop", matched))


# --- logprobs


def test_smp_12_logprobs(smollm2: RunningGroup, smollm2_oracle: Any) -> None:
    result = smollm2.client.generate(P1.text, greedy(1, logprobs=5))
    (found,) = result.outputs[0].logprobs or []
    assert list(found) == [7042, 260, 4528, 2250, 1315]  # Paris, the, London, Le, New
    assert [entry.rank for entry in found.values()] == [1, 2, 3, 4, 5]
    assert found[7042].logprob == pytest.approx(-0.2606, abs=0.01)
    logprobs = next_logprobs(smollm2_oracle, result.prompt_token_ids)
    assert [entry.logprob for entry in found.values()] == pytest.approx(logprobs[list(found)].tolist(), abs=1e-3)


def test_smp_12_none_is_off_and_zero_is_the_chosen_token_alone(smollm2: RunningGroup) -> None:
    prompts = [P1.text] * 3
    params = [greedy(4), greedy(4, logprobs=0), greedy(4, logprobs=1)]
    off, chosen, top = (output.outputs[0].logprobs for output in smollm2.generate(prompts, params))
    assert off is None
    assert [list(at) for at in chosen or []] == [[token] for token in P1.token_ids]
    assert [list(at) for at in top or []] == [[token] for token in P1.token_ids]
    streamed = [at for delta in smollm2.client.stream(P1.text, greedy(4, logprobs=0)) for at in delta.logprobs or []]
    assert [list(at) for at in streamed] == [[token] for token in P1.token_ids]
    assert [at[token].logprob for at, token in zip(streamed, P1.token_ids, strict=True)] == pytest.approx(
        [at[token].logprob for at, token in zip(chosen or [], P1.token_ids, strict=True)], abs=1e-3
    )


# --- odd but lawful sampling parameters


def test_smp_02_very_small_temperatures_are_greedy(smollm2: RunningGroup) -> None:
    temperatures = [1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-38, 5e-324, 0.0]
    cold = [SamplingParams(temperature=value, max_tokens=12, seed=7, logprobs=0) for value in temperatures]
    warm = SamplingParams(temperature=1.0, max_tokens=12, seed=7, ignore_eos=True)
    *found, neighbour = smollm2.generate([P2.text] * (len(cold) + 1), [*cold, warm])
    for output in found:
        assert output.outputs[0].token_ids == P2.token_ids
        for at, token in zip(output.outputs[0].logprobs or [], P2.token_ids, strict=True):
            assert -10 < at[token].logprob <= 0
    assert neighbour.outputs[0].token_ids == smollm2.client.generate(P2.text, warm).outputs[0].token_ids


def test_smp_03_top_k_at_and_beyond_its_bounds(smollm2: RunningGroup) -> None:
    values = [-1, 0, VOCAB_SIZE, VOCAB_SIZE + 1, 9999999, 2**40, VOCAB_SIZE - 1, 1, 5]
    params = [SamplingParams(top_k=value, seed=7, max_tokens=12, ignore_eos=True) for value in values]
    found = smollm2.generate([P2.text] * (len(values) + 1), [*params, greedy(12)])
    off, *others = [output.outputs[0].token_ids for output in found]
    assert others[:6] == [off] * 6  # also all but the last token: it is not the one to be drawn
    assert others[6] == others[8] == P2.token_ids
    assert others[7] == smollm2.client.generate(P2.text, params[8]).outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match=r"^top_k: .* -2"):
        SamplingParams(top_k=-2)


# --- validation


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda client: client.generate(""), "prompt"),
        (lambda client: client.generate([""]), "prompt"),
        (lambda client: client.generate([[]]), "prompt_token_ids"),
        (lambda client: client.generate(["ok", ""]), "prompt"),
        (lambda client: client.generate({"prompt_token_ids": []}), "prompt_token_ids"),
        (lambda client: client.chat([]), "messages"),
        (lambda client: list(client.stream("")), "prompt"),
        (lambda client: list(client.stream([])), "prompt"),
        (lambda client: list(client.stream(messages=[])), "messages"),
        (lambda client: client.embed(""), "prompt"),
    ],
)
def test_val_01_empty_prompts(ask: Callable[[Client], object], field: str, smollm2: RunningGroup, canary: None) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}: "):
        ask(smollm2.client)


@pytest.mark.parametrize("wrong", [VOCAB_SIZE, -1, 5279552648203111001, 2**64, 1.5, True, None], ids=repr)
def test_val_02_token_ids_outside_the_vocabulary(wrong: Any, smollm2: RunningGroup, canary: None) -> None:
    client = smollm2.client
    prompts: list[Any] = [[wrong], [1, wrong], {"prompt_token_ids": [1, wrong]}]
    for prompt in prompts:
        for ask in (client.generate, client.embed, lambda prompt: list(client.stream(prompt))):
            with pytest.raises(InvalidRequestError, match=r"^prompt_token_ids"):
                ask(prompt)


def test_val_02_the_last_id_of_the_vocabulary_is_fine(smollm2: RunningGroup) -> None:
    result = smollm2.client.generate([VOCAB_SIZE - 1, 0], greedy(1))
    assert result.prompt_token_ids == [VOCAB_SIZE - 1, 0]
    assert len(result.outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("room", "max_tokens", "num_new"), [(2, 1, 1), (2, 2, 2), (1, 1, 1), (2, None, 2), (1, None, 1)]
)
def test_val_03_what_fits_the_context_runs(
    room: int, max_tokens: int | None, num_new: int, smollm2: RunningGroup
) -> None:
    prompt = list(range(smollm2.client.welcome.max_model_len - room))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    (output,) = smollm2.client.generate(prompt, params).outputs
    assert (len(output.token_ids), output.finish_reason) == (num_new, "length")


def test_val_03_what_does_not_is_refused_with_both_numbers(smollm2: RunningGroup, canary: None) -> None:
    limit = smollm2.client.welcome.max_model_len
    for length in (limit - 2, limit - 1, limit, limit + 1, 100_000):
        for max_tokens in (1, 2, 3, 10**12, None):
            if length + (max_tokens or 1) <= limit:
                continue
            params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
            with pytest.raises(InvalidRequestError, match=r"^(prompt|max_tokens): ") as refused:
                smollm2.client.generate([7] * length, params)
            assert {str(limit), str(length)} <= set(re.findall(r"\d+", str(refused.value)))
