"""Beam search: the likeliest continuations of a prompt, found with requests for one token and its alternatives.

Owns: which sequences live on, which are complete, and how they compare. Never does: talk to a group; `search` is handed
a function that runs requests. The prefix cache makes a step cheap: all of a sequence but its last tokens is cached.

Names and shapes are vLLM's. A score is `cum_logprob / num_new_tokens ** length_penalty`, as in transformers (the end
token counts, the prompt does not).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from procengine.client_bodies import Body, generate_body, prompt_body
from procengine.config import EngineConfig
from procengine.errors import InvalidRequestError
from procengine.outputs import Logprob, RequestOutput
from procengine.sampling_params import SamplingParams

__all__ = ["BeamSearch", "BeamSearchOutput", "BeamSearchParams", "BeamSearchSequence", "search"]

_Logprobs = Mapping[int, Logprob]


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one search.

    Attributes:
        beam_width: sequences that are kept, and that come out.
        max_tokens: most new tokens.
        ignore_eos: go on past the model's end tokens.
        temperature: above 0, a token drawn with it joins each step's candidates, as in vLLM; scores do not change.
        length_penalty: above 0 longer sequences are favoured, below 0 shorter ones; 0 compares sums.

    Raises:
        InvalidRequestError: a value is out of range (names the field, the value and the range).
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field in ("beam_width", "max_tokens"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequestError(f"{field}: must be an integer of at least 1, got {value!r}")
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not -10 <= penalty <= 10:
            raise InvalidRequestError(f"length_penalty: must be a number between -10 and 10, got {penalty!r}")
        self.token_params(0)  # checks the temperature

    def token_params(self, num_eos: int) -> SamplingParams:
        """What a sequence's next token is asked for with: enough alternatives that end tokens crowd no other out."""
        return SamplingParams(
            max_tokens=1,
            logprobs=self.beam_width + max(self.beam_width, num_eos),
            temperature=self.temperature,
            ignore_eos=True,
            detokenize=False,
        )

    def score(self, cum_logprob: float, num_new_tokens: int) -> float:
        """What sequences are compared by; more is better."""
        return cum_logprob / num_new_tokens**self.length_penalty if num_new_tokens else cum_logprob


class BeamSearchSequence(msgspec.Struct, frozen=True):
    """One sequence.

    Attributes:
        tokens: the prompt's and the new ones, the end token included.
        cum_logprob: sum of the new tokens' log probabilities.
        text: the text of all `tokens`, without special tokens; "" while the search runs.
        logprobs: for each new token, the candidates it was one of.
        finish_reason: "stop" | "length"; None while the search runs.
        stop_reason: the end token, if one ended it.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str = ""
    logprobs: list[dict[int, Logprob]] = []
    finish_reason: str | None = None
    stop_reason: int | None = None


class BeamSearchOutput(msgspec.Struct, frozen=True):
    """The sequences found for one prompt, best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt. Ask the model for what follows each of `beams`, and `advance`, until `is_done`."""

    def __init__(self, prompt_token_ids: Sequence[int], params: BeamSearchParams, eos_token_ids: Sequence[int]) -> None:
        self.beams = [BeamSearchSequence(list(prompt_token_ids))]
        self._params = params
        self._eos = frozenset(() if params.ignore_eos else eos_token_ids)
        self._num_new_tokens = 0
        self._completed: list[tuple[float, BeamSearchSequence]] = []  # best first, with their scores

    @property
    def is_done(self) -> bool:
        """Whether going on cannot change the best sequences."""
        if not self.beams or self._num_new_tokens >= self._params.max_tokens:
            return True
        width = self._params.beam_width
        return len(self._completed) == width and self._completed[-1][0] >= self._best_possible()

    def advance(self, logprobs: Sequence[_Logprobs]) -> None:
        """Take in what may follow each of `beams`: log probabilities of the likeliest tokens (see `token_params`)."""
        self._num_new_tokens += 1
        candidates = [
            _extended(beam, token_id, of_beam)
            for beam, of_beam in zip(self.beams, logprobs, strict=True)
            for token_id in of_beam
        ]
        ended = [_finished(c, "stop", c.tokens[-1]) for c in candidates if c.tokens[-1] in self._eos]
        self._complete(ended)
        going = [candidate for candidate in candidates if candidate.tokens[-1] not in self._eos]
        going.sort(key=lambda candidate: -candidate.cum_logprob)  # stable; all have the same length
        self.beams = going[: self._params.beam_width]

    def best(self) -> list[BeamSearchSequence]:
        """The best `beam_width` sequences, best first, once the search is done."""
        assert self.is_done
        beams, self.beams = self.beams, []
        if self._num_new_tokens >= self._params.max_tokens:  # else nothing that runs could come among the best
            self._complete([_finished(beam, "length", None) for beam in beams])
        return [sequence for _, sequence in self._completed]

    def _complete(self, sequences: Sequence[BeamSearchSequence]) -> None:
        score = self._params.score
        scored = [*self._completed, *((score(s.cum_logprob, self._num_new_tokens), s) for s in sequences)]
        scored.sort(key=lambda pair: -pair[0])
        self._completed = scored[: self._params.beam_width]

    def _best_possible(self) -> float:
        """No descendant of a running sequence scores more: sums only fall, and length counts at its most favourable."""
        favours_long = self._params.length_penalty > 0
        num_new_tokens = self._params.max_tokens if favours_long else self._num_new_tokens + 1
        return self._params.score(self.beams[0].cum_logprob, num_new_tokens)


def search(
    prompts: Sequence[Body],
    params: BeamSearchParams,
    config: EngineConfig,
    run: Callable[[list[Body]], list[RequestOutput]],
    to_text: Callable[[list[int]], str],
) -> list[BeamSearchOutput]:
    """Search for all prompts side by side: every step is one call of `run`.

    Raises:
        InvalidRequestError: it does not fit into the group's limits; or what `run` raises.
    """
    eos_token_ids = () if params.ignore_eos else config.model.eos_token_ids
    token_params = params.token_params(len(eos_token_ids))
    _check_width(params, token_params, config.limits.max_logprobs)
    searches: list[BeamSearch] = []
    for output in run([generate_body(prompt, token_params) for prompt in prompts]):
        _check_length(len(output.prompt_token_ids), params, config.scheduler.max_model_len)
        searches.append(BeamSearch(output.prompt_token_ids, params, eos_token_ids))
        searches[-1].advance([_next_logprobs(output)])
    while running := [one for one in searches if not one.is_done]:
        beams = [beam for one in running for beam in one.beams]
        outputs = iter(run([generate_body(prompt_body(beam.tokens), token_params) for beam in beams]))
        for one in running:
            one.advance([_next_logprobs(next(outputs)) for _ in one.beams])
    return [
        BeamSearchOutput([msgspec.structs.replace(found, text=to_text(found.tokens)) for found in one.best()])
        for one in searches
    ]


def _extended(beam: BeamSearchSequence, token_id: int, logprobs: _Logprobs) -> BeamSearchSequence:
    return BeamSearchSequence(
        [*beam.tokens, token_id],
        beam.cum_logprob + logprobs[token_id].logprob,
        logprobs=[*beam.logprobs, dict(logprobs)],
    )


def _finished(sequence: BeamSearchSequence, reason: str, stop_reason: int | None) -> BeamSearchSequence:
    return msgspec.structs.replace(sequence, finish_reason=reason, stop_reason=stop_reason)


def _next_logprobs(output: RequestOutput) -> _Logprobs:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None and len(logprobs) == 1, "one token was asked for, with its logprobs"
    return logprobs[0]


def _check_width(params: BeamSearchParams, token_params: SamplingParams, limit: int) -> None:
    if (token_params.logprobs or 0) > limit:
        raise InvalidRequestError(
            f"beam_width: {params.beam_width} takes {token_params.logprobs} logprobs a token, "
            f"the limit (max_logprobs) is {limit}"
        )


def _check_length(num_prompt_tokens: int, params: BeamSearchParams, max_model_len: int) -> None:
    if num_prompt_tokens + params.max_tokens > max_model_len:
        raise InvalidRequestError(
            f"max_tokens: {params.max_tokens} new tokens after a prompt of {num_prompt_tokens} make "
            f"{num_prompt_tokens + params.max_tokens}, the context limit (max_model_len) is {max_model_len}"
        )
