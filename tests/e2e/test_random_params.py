"""Random parameters in random batches on the tiny llama: what comes out is what the request gives alone, cut naively.

Alone means: in the plain synchronous engine, with a cold cache, and without stop strings. What these would cut off is
then worked out here with `str.find`. So neither batching, nor depth, nor preemption, nor speculation may show.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer as Backend

from procengine import RequestFailedError, RequestOutput, SamplingParams
from procengine.outputs import CompletionOutput, Logprob, StreamDelta
from procengine.structured.spec import StructuredOutputs
from tests.e2e.conftest import TinyGroups
from tests.e2e.modes import Mode
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_folders import VOCAB_SIZE
from tests.e2e.tiny_prompts import TinyCase

_ALONE = Mode(1, 1, True, 1)  # the plain synchronous engine
_DEPTH2 = Mode(2, 1, False, 1)
_STEPS4 = Mode(2, 4, True, 2)
_NUM_REQUESTS = 72
_BATCH = 18
_STOPPED_EVERY = 3  # of so many requests, at least one is ended by a stop string
_TOLERANCE = 1e-3  # of a log probability between two shapes of a batch, in float32
_NUM_BEYOND = 12  # alternatives that the reference has beyond those that were asked for
_GRAMMARS = [
    StructuredOutputs(regex="[a-d]{3,9}"),
    StructuredOutputs(regex="(ab|ba)+!"),
    StructuredOutputs(choice=("yes", "no", "maybe so")),
    StructuredOutputs(json_schema={"type": "integer", "minimum": 10, "maximum": 9999}, disable_any_whitespace=True),
    StructuredOutputs(json_schema={"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}),
    StructuredOutputs(json_object=True),
]
# In each batch: rows that come to a place where their grammar and their other rules leave no token. They fail alone.
_DOOMED = [
    SamplingParams(structured_outputs=_GRAMMARS[0], allowed_token_ids=(0, 1, 2), max_tokens=9, seed=1, logprobs=3),
    SamplingParams(structured_outputs=_GRAMMARS[2], bad_words=("y", "n", "m", "ma", "no", "ye"), temperature=0.0),
]
# Rules that leave no token at all, and no grammar to say so: any token may come, but nothing breaks.
_CONTRADICTORY = [
    SamplingParams(allowed_token_ids=(97,), bad_words=("a",), seed=2, max_tokens=4, logprobs=3, top_p=0.5),
    SamplingParams(
        stop_token_ids=(97,), allowed_token_ids=(97,), min_tokens=3, temperature=0.0, max_tokens=4, logprobs=3
    ),
]


@dataclass
class Asked:
    """A request, what it gave alone without its stop strings, and what must come of that with them.

    `unstopped` has `_NUM_BEYOND` more alternatives a token than `params` ask for.
    """

    prompt: list[int]
    params: SamplingParams
    options: dict[str, Any]
    unstopped: RequestOutput = field(init=False)
    expected: list[Expected] = field(init=False)


@dataclass(frozen=True)
class Expected:
    """One choice. `text` is None where the naive cut is not defined: min_tokens ends inside a character."""

    token_ids: list[int] | None
    text: str | None
    reason: tuple[str, int | str | None] | None
    logprobs: list[dict[int, Logprob]] | None


# --- random requests


def some_ids(rnd: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rnd.randrange(VOCAB_SIZE) for _ in range(count))


def maybe(rnd: random.Random, share: float, make: Callable[[], Any], **fields: Any) -> dict[str, Any]:
    (name,) = fields
    return {name: make()} if rnd.random() < share else {}


def random_params(rnd: random.Random) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": rnd.choice([0.0, 0.0, 0.3, 0.8, 1.0, 1.5, 3.0])}
    fields["seed"] = rnd.choice([rnd.randrange(-(2**63), 2**63), rnd.randrange(10), 2**63 - 1])
    fields["max_tokens"] = rnd.choice([1, 2, 5, 9, 16, 17, 24, 32])
    fields["n"] = rnd.choice([1, 1, 1, 1, 2, 3])
    makers: dict[str, tuple[float, Callable[[], Any]]] = {
        "top_p": (0.3, lambda: rnd.uniform(0.1, 1.0)),
        "top_k": (0.3, lambda: rnd.choice([-1, 0, 1, 2, 5, 50, VOCAB_SIZE, 10**9])),
        "min_p": (0.3, lambda: rnd.choice([0.0, 0.01, 0.2, 1.0])),
        "presence_penalty": (0.25, lambda: rnd.uniform(-2, 2)),
        "frequency_penalty": (0.25, lambda: rnd.uniform(-2, 2)),
        "repetition_penalty": (0.25, lambda: rnd.choice([0.5, 0.9, 1.1, 1.3, 2.0])),
        "logprobs": (0.4, lambda: rnd.choice([0, 1, 3, 20])),
        "prompt_logprobs": (0.2, lambda: rnd.choice([0, 1, 5])),
        "truncate_prompt_tokens": (0.15, lambda: rnd.choice([-1, 1, 7, 16, 30, 1000])),
        "skip_special_tokens": (0.3, lambda: False),
        "spaces_between_special_tokens": (0.3, lambda: False),
        "include_stop_str_in_output": (0.3, lambda: True),
        "output_kind": (0.5, lambda: rnd.choice(["delta", "cumulative", "final"])),
        "stream_interval": (0.3, lambda: rnd.choice([2, 3, 7, 100])),
        "detokenize": (0.1, lambda: False),
    }
    free_only: dict[str, tuple[float, Callable[[], Any]]] = {
        "logit_bias": (0.25, lambda: {token: rnd.uniform(-100, 20) for token in some_ids(rnd, rnd.choice([1, 5, 60]))}),
        "allowed_token_ids": (0.15, lambda: some_ids(rnd, rnd.choice([40, 200]))),
        "bad_words": (0.25, lambda: tuple(rnd.choice(["a", "the", " t", "日", "e", "in g", "?"]) for _ in range(3))),
        "stop_token_ids": (0.3, lambda: some_ids(rnd, rnd.choice([1, 8, 40]))),
        "ignore_eos": (0.5, lambda: True),
        "min_tokens": (0.3, lambda: rnd.randint(0, fields["max_tokens"])),
    }
    if rnd.random() < 0.15:
        fields["structured_outputs"] = rnd.choice(_GRAMMARS)
    else:
        makers |= free_only
    fields |= {name: make() for name, (share, make) in makers.items() if rnd.random() < share}
    return SamplingParams(**fields)


def random_prompt(rnd: random.Random) -> list[int]:
    """Some repeat themselves, so that lookups for speculation find something; half of them share beginnings."""
    length = rnd.choice([1, 2, 5, 15, 16, 17, 31, 32, 33, 48, 60])
    source = random.Random(rnd.choice([1, 2, rnd.random()]))
    ids = [source.randrange(VOCAB_SIZE) for _ in range(length)]
    return (ids[: rnd.randint(2, 7)] * length)[:length] if rnd.random() < 0.3 else ids


def random_options(rnd: random.Random) -> dict[str, Any]:
    return {"priority": rnd.randint(-3, 3), "cache_salt": rnd.choice(["", "", "a"]), "echo": rnd.random() < 0.1}


def with_stops(rnd: random.Random, params: SamplingParams, texts: list[str]) -> SamplingParams:
    """Stop strings out of what the request says, and some that do not occur."""
    if not params.detokenize:
        return params
    stops = ["never said", "ab"]
    for _ in range(rnd.randint(1, 4)):
        text = rnd.choice(texts)
        start = rnd.randrange(len(text) + 1)
        stops.append(text[start : start + rnd.choice([1, 1, 2, 3, 6])])
    chosen = [stop for stop in stops if stop and "\ufffd" not in stop]
    rnd.shuffle(chosen)
    stop: Any = chosen[0] if rnd.random() < 0.2 else tuple(chosen)
    return msgspec.structs.replace(params, stop=stop)


def with_wide_logprobs(params: SamplingParams) -> SamplingParams:
    """The same request with more alternatives, so that a neighbour of the last one that was asked for is known."""
    asked = {name: getattr(params, name) for name in ("logprobs", "prompt_logprobs")}
    wide = {name: count + _NUM_BEYOND for name, count in asked.items() if count is not None}
    return msgspec.structs.replace(params, **wide)


# --- what must come out


class Decoder:
    """Token ids to text by the tokenizers library alone."""

    def __init__(self, folder: Path) -> None:
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))

    def text(self, token_ids: list[int], params: SamplingParams) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=params.skip_special_tokens))

    def shown(self, output: CompletionOutput, params: SamplingParams, eos: int) -> list[int]:
        """The tokens that are text: all but one that ended the sequence, unless stops are to be shown."""
        ends = {*params.stop_ids} | (set() if params.ignore_eos else {eos})
        is_end = output.finish_reason == "stop" and output.token_ids[-1] in ends
        hides = is_end and not params.include_stop_str_in_output
        return output.token_ids[:-1] if hides else output.token_ids


def naive_cut(output: CompletionOutput, params: SamplingParams, shown: list[int], decoder: Decoder) -> Expected:
    """Where `str.find` cuts a text: at the match that is complete first, the longest of those; see `stop_strings`."""
    reason = (output.finish_reason or "", output.stop_reason)
    whole = Expected(output.token_ids, output.text, reason, output.logprobs)
    if not params.stop_strings:
        return whole
    behind = decoder.text(shown[: params.min_tokens], params) if params.min_tokens else ""
    if behind.endswith("\ufffd"):
        return Expected(None, None, None, None)
    found = [(output.text.find(stop, len(behind)), stop) for stop in params.stop_strings]
    matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
    if not matches:
        return whole
    end, start, stop = min(matches)
    is_there = (n for n in range(1, len(shown) + 1) if decoder.text(shown[:n], params)[:end] == output.text[:end])
    count = next(is_there)
    text = output.text[: end if params.include_stop_str_in_output else start]
    logprobs = None if output.logprobs is None else output.logprobs[:count]
    return Expected(output.token_ids[:count], text, ("stop", stop), logprobs)


def make_requests(group: RunningGroup, case: TinyCase, seed: int, count: int) -> list[Asked]:
    """Random requests, each run alone first."""
    rnd = random.Random(seed)
    return [make_request(group, case, rnd, must_stop=number % _STOPPED_EVERY == 0) for number in range(count)]


def make_request(group: RunningGroup, case: TinyCase, rnd: random.Random, *, must_stop: bool) -> Asked:
    """One request. With `must_stop` it is drawn again until a stop string ends one of its choices."""
    decoder, eos = Decoder(case.folder), case.eos_token_id
    while True:
        one = Asked(random_prompt(rnd), random_params(rnd), random_options(rnd))
        wide = with_wide_logprobs(one.params)
        one.unstopped = group.generate([one.prompt], wide, cache_salt=group.new_salt())[0]
        check_alone(one, decoder, eos)
        if must_stop or rnd.random() < 0.5:
            one.params = with_stops(rnd, one.params, [output.text for output in one.unstopped.outputs])
        one.expected = [
            naive_cut(output, one.params, decoder.shown(output, one.params, eos), decoder)
            for output in one.unstopped.outputs
        ]
        is_stopped = any(choice.reason is not None and isinstance(choice.reason[1], str) for choice in one.expected)
        if is_stopped or not must_stop:
            return one


@pytest.fixture(scope="module")
def asked(tiny_groups: TinyGroups, tiny_llama: TinyCase) -> list[Asked]:
    return make_requests(tiny_groups[_ALONE], tiny_llama, seed=31, count=_NUM_REQUESTS)


def check_alone(one: Asked, decoder: Decoder, eos: int) -> None:
    params, whole = one.params, one.unstopped
    keep = params.truncate_prompt_tokens
    assert whole.prompt_token_ids == (one.prompt if keep in (None, -1) else one.prompt[-keep:])
    assert [output.index for output in whole.outputs] == list(range(params.n))
    for output in whole.outputs:
        shown = decoder.shown(output, params, eos) if params.structured_outputs is None else output.token_ids
        if params.structured_outputs is None:
            assert output.text == (decoder.text(shown, params) if params.detokenize else "")
        check_rules(output, params, eos)


def check_rules(output: CompletionOutput, params: SamplingParams, eos: int) -> None:
    """What the parameters alone say about any result."""
    ids, limit = output.token_ids, params.max_tokens or 0
    assert len(ids) == limit if output.finish_reason == "length" else 1 <= len(ids) <= limit
    ends = {*params.stop_ids} | (set() if params.ignore_eos else {eos})
    if params.structured_outputs is None:
        assert len(ids) >= min(params.min_tokens, limit)
        assert not ends & set(ids[:-1])
        assert not ends & set(ids[: params.min_tokens])
    assert params.allowed_token_ids is None or set(ids) <= set(params.allowed_token_ids)
    spec = params.structured_outputs
    shows_form = params.detokenize and not params.include_stop_str_in_output  # which shows the end token, too
    if spec is not None and spec.regex and shows_form and output.finish_reason == "stop":
        assert re.fullmatch(spec.regex, output.text)


# --- the checks of one answer


def check_logprobs(
    found: list[dict[int, Logprob]] | None, reference: list[dict[int, Logprob]] | None, num_top: int | None
) -> None:
    """`reference` has `_NUM_BEYOND` alternatives more than `found`, which has `num_top` of them."""
    assert (found is None) == (reference is None) == (num_top is None)
    for here, there in zip(found or [], reference or [], strict=True):
        check_alternatives(here, there, num_top or 0)


def check_alternatives(here: dict[int, Logprob], there: dict[int, Logprob], num_top: int) -> None:
    """The chosen token is the same; each token has its value, and each rank has its value, within the tolerance.

    So two tokens may have swapped ranks, or one may stand for another in the last, where their values are that close.
    """
    chosen = next(iter(here))
    assert chosen == next(iter(there))
    assert here.keys() <= there.keys()
    for token, entry in here.items():
        assert entry.logprob <= 0 and abs(entry.logprob - there[token].logprob) < _TOLERANCE
    top, reference_top = by_rank(here, num_top), by_rank(there, num_top)
    assert len(top) == len(reference_top) == num_top and len(here.keys() - top) <= 1
    for token, other in zip(top, reference_top, strict=True):
        assert abs(here[token].logprob - there[other].logprob) < _TOLERANCE
    likelier = sum(entry.logprob > here[chosen].logprob + _TOLERANCE for entry in there.values())
    as_likely = sum(entry.logprob > here[chosen].logprob - _TOLERANCE for entry in there.values())
    assert likelier < here[chosen].rank
    assert here[chosen].rank <= as_likely or here[chosen].rank > num_top + _NUM_BEYOND


def by_rank(entries: dict[int, Logprob], num_top: int) -> list[int]:
    """The likeliest tokens; the chosen one comes first in the map, and is not always one of them."""
    return sorted(entries, key=lambda token: entries[token].rank)[:num_top]


def check_output(one: Asked, prompt_text: str, output: CompletionOutput) -> None:
    expected, params = one.expected[output.index], one.params
    if expected.token_ids is None or expected.text is None:
        assert output.token_ids == one.unstopped.outputs[output.index].token_ids[: len(output.token_ids)]
        return
    assert output.token_ids == expected.token_ids
    assert output.text == prompt_text + expected.text
    assert (output.finish_reason, output.stop_reason) == expected.reason
    assert len(output.logprobs or []) == (len(output.token_ids) if params.logprobs is not None else 0)
    check_logprobs(output.logprobs, expected.logprobs, params.logprobs)


def check_prompt(one: Asked, entries: list[dict[int, Logprob] | None] | None) -> None:
    reference = one.unstopped.prompt_logprobs
    assert (entries is None) == (reference is None) == (one.params.prompt_logprobs is None)
    if entries is not None and reference is not None:
        assert entries[0] is None and len(entries) == len(one.unstopped.prompt_token_ids)
        mine, others = [at for at in entries if at is not None], [at for at in reference if at is not None]
        check_logprobs(mine, others, one.params.prompt_logprobs)


def from_stream(one: Asked, deltas: list[StreamDelta], index: int) -> CompletionOutput:
    """The deltas of one choice, put together as their output kind asks for."""
    mine = [delta for delta in deltas if delta.index == index]
    assert [delta.finish_reason is not None for delta in mine] == [False] * (len(mine) - 1) + [True]
    kind = one.params.output_kind
    assert kind != "final" or len(mine) == 1
    if kind == "cumulative":
        for earlier, later in itertools.pairwise(mine):
            assert later.text.startswith(earlier.text)
            assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
        mine = mine[-1:]
    elif kind == "delta":
        assert all(len(delta.token_ids) >= one.params.stream_interval for delta in mine[1:-1])
    logprobs = [at for delta in mine for at in delta.logprobs or []]
    return CompletionOutput(
        index,
        "".join(delta.text for delta in mine),
        [token for delta in mine for token in delta.token_ids],
        mine[-1].finish_reason,
        mine[-1].stop_reason,
        logprobs or None,
    )


def run_one(group: RunningGroup, one: Asked, decoder: Decoder, *, streams: bool) -> None:
    options = one.options
    prompt_ids = one.unstopped.prompt_token_ids
    shows_prompt = options["echo"] and one.params.detokenize
    prompt_text = decoder.text(prompt_ids, one.params) if shows_prompt else ""
    if streams:
        deltas = list(group.client.stream(one.prompt, one.params, **options))
        outputs = [from_stream(one, deltas, index) for index in range(one.params.n)]
        assert {delta.index for delta in deltas} == set(range(one.params.n))
        check_prompt(one, next(delta for delta in deltas if delta.index == 0).prompt_logprobs)
        assert sum(delta.prompt_logprobs is not None for delta in deltas) == (one.params.prompt_logprobs is not None)
    else:
        whole = group.client.generate(one.prompt, one.params, **options)
        assert whole.prompt_token_ids == prompt_ids and whole.finished
        outputs = whole.outputs
        check_prompt(one, whole.prompt_logprobs)
    assert [output.index for output in outputs] == list(range(one.params.n))
    for output in outputs:
        check_output(one, prompt_text, output)


def run_together(group: RunningGroup, batch: list[Asked], decoder: Decoder, rnd: random.Random) -> None:
    """All at once, a thread each; the first failure is raised here."""
    failures: list[tuple[Asked, BaseException]] = []

    def run(one: Asked, streams: bool) -> None:
        try:
            run_one(group, one, decoder, streams=streams)
        except BaseException as error:  # noqa: BLE001 - a thread's failure is raised below
            failures.append((one, error))

    def fail(params: SamplingParams) -> None:
        try:
            with pytest.raises(RequestFailedError, match=r"^structured_outputs: "):
                group.client.generate([1, 2, 3], params)
        except BaseException as error:  # noqa: BLE001 - as above
            failures.append((batch[0], error))

    def end(params: SamplingParams) -> None:
        try:
            (output,) = group.client.generate([1, 2, 3], params).outputs
            entries = [entry for at in output.logprobs or [] for entry in at.values()]
            assert entries and all(-1e30 < entry.logprob <= 0 for entry in entries)
        except BaseException as error:  # noqa: BLE001 - as above
            failures.append((batch[0], error))

    threads = [threading.Thread(target=run, args=(one, rnd.random() < 0.6)) for one in batch]
    threads += [threading.Thread(target=fail, args=(params,)) for params in _DOOMED]
    threads += [threading.Thread(target=end, args=(params,)) for params in _CONTRADICTORY]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        one, error = failures[0]
        raise AssertionError(f"{len(failures)} of {len(batch)} failed; first: {one}") from error


def check_random_batches(group: RunningGroup, asked: list[Asked], folder: Path, seed: int) -> None:
    """Every request twice, in other company each time; the group is whole and idle afterwards."""
    rnd, decoder = random.Random(seed), Decoder(folder)
    for _ in range(2):
        shuffled = rnd.sample(asked, len(asked))
        for start in range(0, len(shuffled), _BATCH):
            run_together(group, shuffled[start : start + _BATCH], decoder, rnd)
    whole_pool = [7] * (group.config.cache.num_blocks or 0) * group.config.cache.block_size
    for _ in range(group.config.worker.num_workers):
        one = group.generate([whole_pool[:-1]], SamplingParams(max_tokens=1), cache_salt=group.new_salt())
        assert len(one[0].outputs[0].token_ids) == 1


# --- the comparison of alternatives itself

_REFERENCE = dict(zip([9, 1, 2, 3, 4, 5], [-7.0, -0.5, -1.0, -2.0, -2.0001, -4.0], strict=True))  # 9 was chosen


def entries_of(values: dict[int, float]) -> dict[int, Logprob]:
    """The first is the chosen one, the others are in the order of their ranks."""
    chosen = next(iter(values))
    rank = 1 + sum(value > _REFERENCE[chosen] for value in _REFERENCE.values())
    return dict(zip(values, map(Logprob, values.values(), [rank, *range(1, len(values))]), strict=True))


@pytest.mark.parametrize(
    "values",
    [
        {9: -7.0, 1: -0.5, 2: -1.0, 3: -2.0},
        {9: -7.0, 1: -0.5, 2: -1.0, 4: -2.0},  # one of two that are as likely
        {9: -7.0004, 1: -0.5004, 2: -1.0004, 3: -1.9996},
    ],
    ids=str,
)
def test_comparison_allows_what_is_within_the_tolerance(values: dict[int, float]) -> None:
    check_alternatives(entries_of(values), entries_of(_REFERENCE), 3)


@pytest.mark.parametrize(
    "values",
    [
        {9: -7.0, 1: -0.5, 2: -1.0},  # one too few
        {9: -7.0, 1: -0.5, 2: -1.0, 5: -2.0},  # a wrong token in the last rank
        {9: -7.0, 1: -0.5, 2: -1.0, 5: -4.0},  # a token that is less likely, in the last rank
        {9: -7.0, 1: -0.5, 2: -1.0, 7: -2.0},  # a token that is not likely at all
        {9: -7.0, 2: -0.5, 1: -1.0, 3: -2.0},  # two that are not as likely, swapped
        {9: -7.0, 2: -1.0, 1: -0.5, 3: -2.0},  # the same with their own values, so out of order
        {9: -7.0, 1: -0.5, 2: -1.002, 3: -2.0},  # a wrong value
        {9: -7.002, 1: -0.5, 2: -1.0, 3: -2.0},  # a wrong value of the chosen one
        {5: -4.0, 1: -0.5, 2: -1.0, 3: -2.0},  # another one was chosen
    ],
    ids=str,
)
def test_comparison_refuses_a_wrong_alternative(values: dict[int, float]) -> None:
    with pytest.raises(AssertionError):
        check_alternatives(entries_of(values), entries_of(_REFERENCE), 3)


# --- the modes


@pytest.mark.parametrize("mode", [_ALONE, _DEPTH2, _STEPS4], ids=str)
def test_random_params_in_random_batches(
    mode: Mode, asked: list[Asked], tiny_groups: TinyGroups, tiny_llama: TinyCase
) -> None:
    check_random_batches(tiny_groups[mode], asked, tiny_llama.folder, 41)


@pytest.fixture(scope="module")
def speculating(tiny_llama: TinyCase) -> Iterator[RunningGroup]:
    with RunningGroup(tiny_llama.folder, **(_DEPTH2.options | {"speculative_tokens": 4})) as group:
        yield group


def test_random_params_with_speculation(asked: list[Asked], speculating: RunningGroup, tiny_llama: TinyCase) -> None:
    """Greedy and seeded tokens are unchanged, and some drafts are accepted."""
    check_random_batches(speculating, asked, tiny_llama.folder, 42)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_more_random_params(
    seed: int, speculating: RunningGroup, tiny_groups: TinyGroups, tiny_llama: TinyCase
) -> None:
    more = make_requests(tiny_groups[_ALONE], tiny_llama, seed, 2 * _NUM_REQUESTS)
    for group in (tiny_groups[_ALONE], tiny_groups[_DEPTH2], tiny_groups[_STEPS4], speculating):
        check_random_batches(group, more, tiny_llama.folder, seed)
