"""DET-11, SMP-02, -03, -06, -08, -10, -12, -14 and VAL-05 of shared/cases.md on the real model, streamed and not.

Each at depth 1, at depth 2 and with four decode steps, in a pool so small that a crowd has to preempt each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from procengine import InvalidRequestError, Logprob, ProcengineError, RequestOutput, SamplingParams
from procengine.outputs import StreamDelta
from tests.e2e.oracle import next_logprobs, one_thread
from tests.e2e.running_group import RunningGroup, joined
from tests.e2e.smollm2 import P1, P2, P4, P5, SMOLLM2_OPTIONS, greedy
from tests.procs.raw_client import RawClient, body

pytestmark = pytest.mark.model

VOCAB_SIZE = 49152
_CONTEXT = 256
_NUM_BLOCKS = 16  # one request of the context limit
_MODES: dict[str, dict[str, int]] = {
    "depth1": {"async_depth": 1},
    "depth2": {"async_depth": 2},
    "steps4": {"async_depth": 2, "decode_steps": 4},
}
_FOUR_PENALTIES: list[dict[str, float]] = [
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {},
]


# The default depth in the model lane, the others in the slow one: each takes minutes.
_MODE_PARAMS = [pytest.param(mode, marks=() if mode == "depth2" else pytest.mark.slow) for mode in _MODES]


@pytest.fixture(scope="module", params=_MODE_PARAMS)
def group(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[RunningGroup]:
    options = SMOLLM2_OPTIONS | {"max_model_len": _CONTEXT, "num_blocks": _NUM_BLOCKS} | _MODES[request.param]
    with RunningGroup(smollm2_gguf, **options) as running:
        running.client.generate(P1.text, greedy(1))
        yield running
        whole_pool = [7] * (_CONTEXT - 1)
        (whole,) = running.generate([whole_pool], greedy(1), cache_salt=running.new_salt())
        assert len(whole.outputs[0].token_ids) == 1, "a block is lost"


@pytest.fixture
def canary(group: RunningGroup) -> Iterator[None]:
    """After whatever a test has done: the group answers as before, with the same processes and files."""
    files_before, log_before = group.num_open_files(), group.log
    yield
    started_s = time.monotonic()
    assert group.client.generate(P1.text, greedy(4)).outputs[0].token_ids == P1.token_ids
    assert time.monotonic() - started_s < 20
    assert group.num_open_files() == files_before  # and so all pids are still there
    assert group.log == log_before


def stream(group: RunningGroup, prompt: str | list[int], params: SamplingParams, salt: str = "") -> list[StreamDelta]:
    return list(group.client.stream(prompt, params, cache_salt=salt))


def of_choice(deltas: Sequence[StreamDelta], index: int) -> list[StreamDelta]:
    return [delta for delta in deltas if delta.index == index]


def token_ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def both_ways(group: RunningGroup, prompt: str | list[int], params: SamplingParams) -> RequestOutput:
    """The whole result; a stream gives the same tokens, text, reasons and number of logprobs for each choice."""
    whole = group.client.generate(prompt, params)
    deltas = stream(group, prompt, params)
    assert [output.index for output in whole.outputs] == list(range(params.n))
    assert {delta.index for delta in deltas} == set(range(params.n))
    for output in whole.outputs:
        of_one = of_choice(deltas, output.index)
        assert joined(of_one) == (output.text, output.token_ids, output.finish_reason, output.stop_reason)
        streamed = [at for delta in of_one for at in delta.logprobs or []]
        assert [list(at) for at in streamed] == [list(at) for at in output.logprobs or []]
    return whole


def prompt_ids(group: RunningGroup, text: str) -> list[int]:
    return group.client.generate(text, greedy(1)).prompt_token_ids


# --- DET-11


def test_det_11_a_stop_string_waits_for_min_tokens(group: RunningGroup) -> None:
    (output,) = both_ways(group, P2.text, greedy(12, stop="E", min_tokens=4)).outputs
    assert (output.text, output.token_ids, output.finish_reason) == (P2.completion, P2.token_ids, "length")
    # One more is found when it begins behind them, and one that begins before them is not.
    (output,) = both_ways(group, P2.text, greedy(12, stop=("K", "IJ"), min_tokens=4)).outputs
    assert (output.text, output.finish_reason, output.stop_reason) == ("DEFGHIJ", "stop", "K")


@pytest.mark.parametrize("with_penalty", [False, True])
def test_det_11_the_end_token_waits_for_min_tokens(with_penalty: bool, group: RunningGroup) -> None:
    params = greedy(20, min_tokens=12, frequency_penalty=0.1 if with_penalty else 0.0)
    messages = [{"role": "user", "content": P5.text}]
    whole = group.client.chat(messages, params)
    assert len(whole.prompt_token_ids) == P5.num_tokens
    (output,) = whole.outputs
    assert output.token_ids[:7] == P5.token_ids[:7]
    assert len(output.token_ids) >= 12 and 2 not in output.token_ids[:12]
    deltas = list(group.client.stream(messages=messages, params=params))
    assert joined(deltas) == (output.text, output.token_ids, output.finish_reason, output.stop_reason)


def test_det_11_a_requested_stop_token_waits_too(group: RunningGroup) -> None:
    stop = P2.token_ids[1]
    (output,) = both_ways(group, P2.text, greedy(12, stop_token_ids=(stop,))).outputs
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (P2.token_ids[:2], "stop", stop)
    (output,) = both_ways(group, P2.text, greedy(12, stop_token_ids=(stop,), min_tokens=5)).outputs
    assert len(output.token_ids) >= 5 and stop not in output.token_ids[:5]


# --- SMP-02 and SMP-03


def test_smp_02_very_small_temperatures_are_greedy(group: RunningGroup) -> None:
    temperatures = [1e-2, 1e-3, 1e-4, 1e-5, 9e-6, 1e-6, 1e-7, 1e-38, 1e-45, 5e-324, 0.0]
    cold = [SamplingParams(temperature=value, max_tokens=12, seed=7, logprobs=2) for value in temperatures]
    warm = SamplingParams(temperature=1.0, max_tokens=12, seed=7, ignore_eos=True)
    *found, neighbour = group.generate([P2.text] * (len(cold) + 1), [*cold, warm])
    assert neighbour.outputs[0].token_ids == both_ways(group, P2.text, warm).outputs[0].token_ids
    for params in (cold[2], cold[5], cold[8]):
        assert joined(stream(group, P2.text, params))[1:3] == (P2.token_ids, "length")
    for output in found:
        assert output.outputs[0].token_ids == P2.token_ids
        assert all(-100 < entry.logprob <= 0 for at in output.outputs[0].logprobs or [] for entry in at.values())


def test_smp_02_very_high_temperatures_are_uniform_and_never_nan(group: RunningGroup) -> None:
    for temperature in (1e4, 1e38, 1.7e308):
        params = SamplingParams(temperature=temperature, seed=3, max_tokens=6, ignore_eos=True, logprobs=0)
        (output,) = both_ways(group, P2.text, params).outputs
        assert len(set(output.token_ids)) > 1
        assert all(entry.logprob <= 0 for at in output.logprobs or [] for entry in at.values())  # NaN compares false


def test_smp_03_top_k_at_and_beyond_its_bounds(group: RunningGroup) -> None:
    values = [-1, 0, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, 9999999, 2**62, 1, 5]
    params = [SamplingParams(top_k=value, seed=7, max_tokens=12, ignore_eos=True) for value in values]
    *drawn, one, five, plain = token_ids(group.generate([P2.text] * (len(values) + 1), [*params, greedy(12)]))
    assert drawn == [drawn[0]] * len(drawn)  # also all but the last token: it is not the one to be drawn
    assert one == plain == P2.token_ids
    assert drawn[0] == both_ways(group, P2.text, params[0]).outputs[0].token_ids
    assert five == both_ways(group, P2.text, params[-1]).outputs[0].token_ids
    with pytest.raises(InvalidRequestError, match=r"^top_k: .* -2"):
        SamplingParams(top_k=-2)


# --- SMP-06


@pytest.mark.parametrize(
    ("bias", "named"),
    [
        ({VOCAB_SIZE: 1.0}, "49152"),
        ({999999: 1.0}, "999999"),
        ({2**40: 1.0}, str(2**40)),
        ({-1: 1.0}, "-1"),
        ({"abc": 1.0}, "abc"),
        ({5: 1e9}, "1000000000"),
        ({5: float("nan")}, "nan"),
        ({5: float("inf")}, "inf"),
        ({5: 1.0, VOCAB_SIZE: 1.0}, "49152"),
    ],
)
def test_smp_06_a_bias_outside_vocabulary_or_range(bias: Any, named: str, group: RunningGroup, canary: None) -> None:
    """Through the Python door, and at the socket, where no client has checked before."""
    with pytest.raises(InvalidRequestError, match=rf"^logit_bias.*{named}"):
        group.client.generate(P1.text, greedy(1, logit_bias=bias))
    with RawClient(group.client._group.endpoint) as raw:
        raw.submit("biased", body(P1.text, logit_bias=bias))
        error = raw.rejection("biased").message
    assert "logit_bias" in error
    assert error.encode()


def test_smp_06_the_last_id_can_be_forced(group: RunningGroup) -> None:
    last = VOCAB_SIZE - 1
    params = [greedy(3, logit_bias={last: 100.0}), SamplingParams(seed=1, max_tokens=3, logit_bias={last: 100.0})]
    for of_one in params:
        assert both_ways(group, P1.text, of_one).outputs[0].token_ids == [last] * 3
    biased, plain = token_ids(group.generate([P1.text] * 2, [params[0], greedy(4)]))
    assert (biased, plain) == ([last] * 3, P1.token_ids)
    (output,) = both_ways(group, P1.text, greedy(1, logit_bias={P1.token_ids[0]: -100.0})).outputs
    assert output.token_ids == [260]  # " the", the second best


# --- SMP-08


def penalised_run(oracle: Any, prompt: list[int], count: int, penalties: dict[str, float]) -> list[int]:
    """Greedy, by transformers' logits and the definitions of the penalties."""
    output: list[int] = []
    repetition = penalties.get("repetition_penalty", 1.0)
    for _ in range(count):
        with one_thread(), torch.inference_mode():
            logits = oracle(torch.tensor([[*prompt, *output]])).logits[0, -1]
        logits = logits.clone()
        seen = torch.tensor(sorted({*prompt, *output}))
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / repetition, logits[seen] * repetition)
        for token in output:
            logits[token] -= penalties.get("frequency_penalty", 0.0)
        for token in set(output):
            logits[token] -= penalties.get("presence_penalty", 0.0)
        output.append(int(logits.argmax()))
    return output


@pytest.fixture(scope="module")
def penalised(smollm2_oracle: Any, smollm2_gguf: Path) -> list[list[int]]:
    """What P4 must give under each of the penalties."""
    from tokenizers import Tokenizer

    from procengine.engine_args import EngineArgs
    from procengine.resolve import resolve

    path = resolve(EngineArgs(model=str(smollm2_gguf))).model.tokenizer_path
    prompt = Tokenizer.from_file(path).encode(P4.text).ids
    assert len(prompt) == P4.num_tokens
    runs = [penalised_run(smollm2_oracle, prompt, 8, penalties) for penalties in _FOUR_PENALTIES]
    assert runs[0] == [198, 504, 2988, 314, 42, 216, 33, 30]  # cases.md
    assert [run[0] for run in runs[1:]] == [2767] * 3
    return runs


def test_smp_08_penalties_count_what_they_say_and_only_in_their_own_row(
    group: RunningGroup, penalised: list[list[int]]
) -> None:
    params = [greedy(8, ignore_eos=True, **penalties) for penalties in _FOUR_PENALTIES]
    for of_one, expected in zip(params, penalised, strict=True):
        assert both_ways(group, P4.text, of_one).outputs[0].token_ids == expected
    for salt in ("", group.new_salt()):
        found = group.generate([P4.text] * 12, params * 3, cache_salt=salt)
        assert token_ids(found) == penalised * 3


def test_smp_08_penalties_survive_preemption_and_a_warm_cache(group: RunningGroup) -> None:
    prompts = [prompt_ids(group, P4.text) * 6, prompt_ids(group, P2.text) * 5]
    params = [
        greedy(24, ignore_eos=True, repetition_penalty=1.3),
        SamplingParams(
            seed=5, max_tokens=24, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.7, presence_penalty=0.3
        ),
    ]
    alone = [
        token_ids(group.generate([prompt], of_one, cache_salt=group.new_salt()))[0]
        for prompt, of_one in zip(prompts, params, strict=True)
    ]
    salt = group.new_salt()
    group.num_preemptions()
    for _ in range(2):  # the second time with a warm cache
        with group.held_until_queued(len(prompts) * 4):
            outputs = group.generate(prompts * 4, params * 4, cache_salt=salt)
        assert token_ids(outputs) == alone * 4
    assert group.num_preemptions() > 0
    for prompt, of_one, expected in zip(prompts, params, alone, strict=True):
        again = group.generate([prompt], of_one, cache_salt=salt)
        assert token_ids(again) == [expected] and (again[0].num_cached_tokens or 0) > 0

    streamed: list[list[int]] = [[] for _ in range(8)]

    def run(at: int) -> None:
        streamed[at] = joined(stream(group, prompts[at % 2], params[at % 2], salt + "s"))[1]

    threads = [threading.Thread(target=run, args=(at,)) for at in range(len(streamed))]
    with group.held_until_queued(len(threads)):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert streamed == alone * 4
    assert group.num_preemptions() > 0


# --- SMP-10


def choices(output: RequestOutput) -> list[list[int]]:
    return [choice.token_ids for choice in output.outputs]


def test_smp_10_every_choice_once_and_each_its_own(group: RunningGroup) -> None:
    seeded = SamplingParams(n=5, temperature=1.2, max_tokens=16, seed=9)
    first = both_ways(group, P1.text, seeded)  # a stream draws the same
    assert choices(first) == choices(group.client.generate(P1.text, seeded))
    assert len(set(map(tuple, choices(first)))) > 1
    for output in first.outputs:
        assert output.finish_reason in ("stop", "length")
        assert len(output.token_ids) == 16 if output.finish_reason == "length" else len(output.token_ids) <= 16
    singles = [msgspec.structs.replace(seeded, n=1, seed=9 + index) for index in range(5)]
    assert token_ids(group.generate([P1.text] * 5, singles)) == choices(first)  # choice i has seed + i
    assert len(first.prompt_token_ids) == P1.num_tokens  # once


def test_smp_10_without_a_seed(group: RunningGroup) -> None:
    params = SamplingParams(n=5, temperature=1.2, max_tokens=16)
    first, second = (group.client.generate(P1.text, params) for _ in range(2))
    assert [output.index for output in first.outputs] == [0, 1, 2, 3, 4]
    assert len(set(map(tuple, choices(first)))) > 1 and choices(first) != choices(second)
    deltas = stream(group, P1.text, params)
    for index in range(5):
        _, ids, reason, _ = joined(of_choice(deltas, index))
        assert reason in ("stop", "length") and 1 <= len(ids) <= 16
    assert len(prompt_of(deltas)) == 1


def prompt_of(deltas: Sequence[StreamDelta]) -> set[str]:
    return {delta.request_id for delta in deltas}


def test_smp_10_greedy_choices_are_all_equal(group: RunningGroup) -> None:
    whole = both_ways(group, P1.text, greedy(4, n=5, logprobs=1))
    assert choices(whole) == [P1.token_ids] * 5
    assert sum(map(len, choices(whole))) == 20


# --- SMP-12


def test_smp_12_logprobs(group: RunningGroup, smollm2_oracle: Any) -> None:
    whole = both_ways(group, P1.text, greedy(4, logprobs=5))
    found = whole.outputs[0].logprobs or []
    assert len(found) == 4
    assert list(found[0]) == [7042, 260, 4528, 2250, 1315]  # Paris, the, London, Le, New
    assert [entry.rank for entry in found[0].values()] == [1, 2, 3, 4, 5]
    assert found[0][7042].logprob == pytest.approx(-0.2606, abs=0.01)
    for at, entries in enumerate(found):
        expected = next_logprobs(smollm2_oracle, whole.prompt_token_ids + P1.token_ids[:at])
        assert [entry.logprob for entry in entries.values()] == pytest.approx(
            expected[list(entries)].tolist(), abs=1e-3
        )


def test_smp_12_zero_is_not_off_and_none_is(group: RunningGroup) -> None:
    values = [None, 0, 1, 20]
    found = [both_ways(group, P1.text, greedy(4, logprobs=value)).outputs[0].logprobs for value in values]
    assert found[0] is None
    assert [[len(at) for at in entries or []] for entries in found[1:]] == [[1] * 4, [1] * 4, [20] * 4]
    assert all(next(iter(at)) == token for at, token in zip(found[1] or [], P1.token_ids, strict=True))
    drawn = SamplingParams(seed=4, temperature=2.0, max_tokens=8, ignore_eos=True, logprobs=0)
    (output,) = both_ways(group, P1.text, drawn).outputs
    assert [list(at) for at in output.logprobs or []] == [[token] for token in output.token_ids]


def test_smp_12_one_entry_a_token_while_text_is_held_back(group: RunningGroup) -> None:
    (output,) = both_ways(group, P2.text, greedy(12, stop="DEFGHIJKLMNOPQRSTUVWZ", logprobs=0)).outputs
    assert output.text == P2.completion and len(output.logprobs or []) == 12
    (output,) = both_ways(group, P2.text, greedy(12, stop="GHIJ", logprobs=0)).outputs
    assert output.text == "DEF" and len(output.logprobs or []) == len(output.token_ids) == 4


# --- SMP-14


def expected_logprobs(oracle: Any, prompt: list[int]) -> NDArray[np.float64]:
    """Of each token of a prompt but the first, and below it of the best one: float64 [2, n - 1]."""
    with one_thread(), torch.inference_mode():
        logprobs = oracle(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    chosen = logprobs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
    return torch.stack([chosen, logprobs.max(-1).values]).double().numpy()


def measured_logprobs(prompt: list[int], entries: list[dict[int, Logprob] | None] | None) -> NDArray[np.float64]:
    """The same as a group gives it."""
    assert entries is not None and len(entries) == len(prompt) and entries[0] is None
    later: list[dict[int, Logprob]] = [at for at in entries if at is not None]
    assert [next(iter(at)) for at in later] == prompt[1:]
    assert all(1 <= len(at) <= 2 for at in later)
    chosen = [at[token].logprob for at, token in zip(later, prompt[1:], strict=True)]
    best = [max(entry.logprob for entry in at.values()) for at in later]
    assert all(min(entry.rank for entry in at.values()) == 1 for at in later)
    return np.array([chosen, best])


def text_prompt(group: RunningGroup, length: int, first: str = "") -> list[int]:
    text = "The quick brown fox jumps over the lazy dog, and in 1984 it read a book about war and peace. " * 8
    return prompt_ids(group, first + text)[:length]


# Blocks hold 16 tokens. Below a border, at it and behind it; the others in the slow lane.
@pytest.mark.parametrize("length", [31, 32, 33, *(pytest.param(n, marks=pytest.mark.slow) for n in (48, 100))])
def test_smp_14_prompt_logprobs_with_a_warm_cache(length: int, group: RunningGroup, smollm2_oracle: Any) -> None:
    prompt = text_prompt(group, length)
    shared = min(64, length - 7)
    other = prompt[:shared] + text_prompt(group, length - shared, "Once upon a time ")
    params = greedy(2, prompt_logprobs=1)
    expected = {True: expected_logprobs(smollm2_oracle, prompt), False: expected_logprobs(smollm2_oracle, other)}
    salt = group.new_salt()

    def check(is_first: bool, whole: RequestOutput, *, cold: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        found = measured_logprobs(prompt if is_first else other, whole.prompt_logprobs)
        assert np.abs(found - expected[is_first]).max() < 1e-3
        assert cold is None or np.abs(found - cold).max() < 1e-3
        return found

    def ask(ids: list[int], cache_salt: str = salt, of_one: SamplingParams = params) -> RequestOutput:
        return group.generate([ids], of_one, cache_salt=cache_salt)[0]

    first = ask(prompt)
    cold = check(True, first)
    for _ in range(2):
        again = ask(prompt)
        check(True, again, cold=cold)
        assert again.outputs == first.outputs
    check(False, ask(other))
    check(True, ask(prompt), cold=cold)
    # A cache that a request without them has filled; several at once; in a stream; of a prompt that ends inside it.
    salt2 = group.new_salt()
    assert ask(prompt, salt2, greedy(2)).outputs == first.outputs
    for whole in group.generate([prompt] * 3, [params, greedy(2), params], cache_salt=salt2)[::2]:
        check(True, whole, cold=cold)
    deltas = stream(group, prompt, params, salt)
    assert [delta.prompt_logprobs is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert np.abs(measured_logprobs(prompt, deltas[0].prompt_logprobs) - cold).max() < 1e-3
    begin = ask(prompt[: length - 3])
    found = measured_logprobs(prompt[: length - 3], begin.prompt_logprobs)
    assert np.abs(found - cold[:, : length - 4]).max() < 1e-3


# --- VAL-05


def resident_mb(group: RunningGroup) -> float:
    """Of all processes of the group."""
    lines = (Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1] for pid in group.pids.values())
    return sum(int(line.split()[0]) for line in lines) / 1024


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"n": 10**6}, "n"),
        ({"n": 2**63}, "n"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"stop": ["x" * 1000] * 5000}, "stop|body|bytes"),  # 5 MB
        ({"stop": ["y" * 5_000_000]}, "stop|body|bytes"),
        ({"stop": [f"stop {number}" for number in range(10**5)]}, "stop"),
        ({"bad_words": [f"bad {number}" for number in range(10**5)]}, "bad_words"),
        ({"logit_bias": dict.fromkeys(range(40_000), 1.0)}, "logit_bias"),
        ({"allowed_token_ids": [VOCAB_SIZE] * 500_000}, "allowed_token_ids"),
        ({"stop_token_ids": [5] * 500_000}, "stop_token_ids"),
        ({"logprobs": 10**9}, "logprobs"),
        ({"prompt_logprobs": 10**9}, "prompt_logprobs"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value.split("|")[0],
)
def test_val_05_huge_values_are_refused_at_once(
    fields: dict[str, Any], named: str, group: RunningGroup, canary: None
) -> None:
    neighbour = group.client.stream(P2.text, greedy(12))
    next(neighbour)
    before_mb = resident_mb(group)
    took_s = []
    for at in range(3):
        started_s = time.monotonic()
        if named != "stop|body|bytes":  # the client itself sends no message that is too large
            with RawClient(group.client._group.endpoint) as raw:
                raw.submit(f"huge {at}", body(P1.text, **fields))
                assert named in raw.rejection(f"huge {at}").message
        with pytest.raises(ProcengineError, match=named):
            group.client.generate(P1.text, greedy(1) if not fields else SamplingParams(**fields))
        with pytest.raises(ProcengineError, match=named):
            stream(group, P1.text, SamplingParams(**fields))
        took_s.append(time.monotonic() - started_s)
    assert min(took_s) < 1.0  # all three of them; other work on the machine may hold up some
    assert resident_mb(group) - before_mb < 50
    assert joined(list(neighbour))[2] == "length"
