"""The `generate` workflow in the frontend: from a body to a `Request`, and from requests to steps.

Owns: the meaning of a generation request against this model, and the pairing of steps with their results.
Never does: read a clock or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from procengine.errors import InvalidRequestError
from procengine.input_builder import InputBuilder
from procengine.messages import Register, StepInput, StepResult
from procengine.pipeline import PlannedStep
from procengine.request import Request, RowSampling
from procengine.sampling_params import SamplingParams
from procengine.scheduler.plan import StepPlan
from procengine.scheduler.scheduler import Scheduler, SchedulerLimits
from procengine.step_payload import RESULT_SECTIONS, cut_sections, join_int64
from procengine.workflows.prompt import Identity, ModelFacts, PromptBody, check_prompt

__all__ = ["GenerateBody", "GeneratePlanner", "accept", "register"]

# The bits of kernels.sampling.SamplingFeatures, which this side may not import.
_RANDOM, _TOP_K, _TOP_P, _MIN_P = 1, 2, 4, 8
_MAX_PRIORITY = 2**31
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


class GenerateBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits.

    Attributes:
        priority: smaller is served first (with the priority policy).
        cache_salt: requests share cached prefixes only with the same salt.
    """

    sampling_params: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str = ""


def accept(body: GenerateBody, token_ids: list[int], facts: ModelFacts, identity: Identity) -> Request:
    """A request that can run.

    Raises:
        InvalidRequestError: it cannot; names the field, the value and the limit.
    """
    params = body.sampling_params
    prompt = check_prompt(token_ids, facts)
    if len(prompt) > facts.pool_tokens:
        raise InvalidRequestError(
            f"prompt: has {len(prompt)} tokens, the KV cache of a worker holds {facts.pool_tokens}"
        )
    _check_params(params, facts)
    if not -_MAX_PRIORITY <= body.priority <= _MAX_PRIORITY:
        raise InvalidRequestError(f"priority: must be within ±{_MAX_PRIORITY}, got {body.priority}")
    return Request(
        key=identity.key,
        client=identity.client,
        request_id=identity.request_id,
        prompt_token_ids=prompt,
        # The pool bounds a request too: one that outgrows it alone could never go on, so it ends by length.
        end_position=min(_end_position(len(prompt), params.max_tokens, facts), facts.pool_tokens),
        sampling=_row_sampling(params, identity.seed, facts.vocab_size),
        stop_token_ids=(() if params.ignore_eos else facts.eos_token_ids) + params.stop_ids,
        priority=body.priority,
        cache_salt=body.cache_salt.encode(),
    )


def register(request: Request, body: GenerateBody) -> Register:
    """What the output process needs to know about an accepted request."""
    params = body.sampling_params
    return Register(
        key=request.key,
        client=request.client,
        request_id=request.request_id,
        index=request.index,
        workflow="generate",
        prompt_token_ids=request.prompt_token_ids.tolist(),
        end_position=request.end_position,
        stop_token_ids=request.stop_token_ids,
        stop=params.stop_strings,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        requested_stop_token_ids=params.stop_ids,
        num_logprobs=request.sampling.num_logprobs,
    )


def _end_position(num_prompt_tokens: int, max_tokens: int | None, facts: ModelFacts) -> int:
    if num_prompt_tokens >= facts.max_model_len:
        raise InvalidRequestError(
            f"prompt: has {num_prompt_tokens} tokens and leaves no room for a new one; "
            f"the context limit (max_model_len) is {facts.max_model_len}"
        )
    if max_tokens is None:
        return facts.max_model_len
    if num_prompt_tokens + max_tokens > facts.max_model_len:
        raise InvalidRequestError(
            f"max_tokens: {max_tokens} new tokens after a prompt of {num_prompt_tokens} make "
            f"{num_prompt_tokens + max_tokens}, the context limit (max_model_len) is {facts.max_model_len}"
        )
    return num_prompt_tokens + max_tokens


def _check_params(params: SamplingParams, facts: ModelFacts) -> None:
    limits, stops = facts.limits, params.stop_strings
    _check_limit("stop", "stop strings", len(stops), limits.max_stop_strings)
    _check_limit("stop", "bytes in all", sum(len(stop.encode()) for stop in stops), limits.max_stop_bytes)
    _check_limit("stop_token_ids", "ids", len(params.stop_ids), limits.max_stop_token_ids)
    if params.logprobs is not None:
        _check_limit("logprobs", "alternatives", params.logprobs, limits.max_logprobs)
    for token_id in params.stop_ids:
        if token_id >= facts.vocab_size:
            raise InvalidRequestError(
                f"stop_token_ids: {token_id} is not a token of this model; ids go from 0 to {facts.vocab_size - 1}"
            )


def _check_limit(field: str, unit: str, value: int, limit: int) -> None:
    if value > limit:
        raise InvalidRequestError(f"{field}: at most {limit} {unit} are allowed, got {value}")


def _row_sampling(params: SamplingParams, drawn_seed: int, vocab_size: int) -> RowSampling:
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    seed = drawn_seed if params.seed is None else params.seed
    if params.is_greedy:
        return RowSampling(seed=seed, num_logprobs=num_logprobs)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    features = _RANDOM
    features |= _TOP_K if top_k else 0
    features |= _TOP_P if params.top_p < 1.0 else 0
    features |= _MIN_P if params.min_p > 0.0 else 0
    temperature = min(params.temperature, _MAX_FLOAT32)  # the worker's are float32
    return RowSampling(seed, temperature, top_k, params.top_p, params.min_p, num_logprobs, features)


@dataclass(frozen=True, slots=True)
class _SentStep:
    """What the results of a step will be matched with."""

    slots: NDArray[np.int32]  # [samples]
    row_steps: NDArray[np.int32]  # [samples] forward passes each row takes part in


class GeneratePlanner:
    """Scheduler and input builder of one worker behind the `Planner` interface."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.scheduler = Scheduler(limits)
        self.counters = self.scheduler.counters
        self._builder = InputBuilder(limits.max_num_seqs, limits.max_num_batched_tokens)

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self.scheduler.waiting) + self.scheduler.num_running

    @property
    def wants_late_plan(self) -> bool:
        """TTFT guard: a step with a prompt in it is better planned late, so that prompts still arriving join it."""
        return self.scheduler.would_prefill

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out (abort, stop string)."""
        self.scheduler.finish(request)

    def plan_step(self, step_id: int, epoch: int) -> PlannedStep | None:
        """The next step, or None if nothing can run now."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        header, payload = self._builder.build(plan, self.scheduler.table, step_id=step_id, epoch=epoch)
        return PlannedStep(header, payload, _sent_step(plan), plan.admitted, is_steady=_is_steady(header))

    def apply(self, sent: object, header: StepResult, payload: NDArray[np.int32]) -> list[tuple[Request, str]]:
        """Take in one forward pass's tokens; returns the requests that ended."""
        assert isinstance(sent, _SentStep)
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        slots = sent.slots if header.micro_step == 0 else sent.slots[sent.row_steps > header.micro_step]
        return self.scheduler.apply(
            slots, join_int64(sections["key_words"]), sections["positions"], sections["token_ids"]
        )

    def history(self, request: Request) -> NDArray[np.int32]:
        """All confirmed tokens of an unfinished request, int32 [n]."""
        return self.scheduler.history(request)

    def count_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request's prompt that this worker's cache holds now."""
        return self.scheduler.count_cached_tokens(request)


def _sent_step(plan: StepPlan) -> _SentStep:
    slots = plan.sample_slots()
    return _SentStep(slots, plan.row_steps if not plan.chunks else np.ones(slots.size, np.int32))


def _is_steady(header: StepInput) -> bool:
    return header.num_decode_rows == header.num_rows
