"""The `generate` workflow in the frontend: from a body to a `Request`, and from requests to steps.

Owns: the meaning of a generation request against this model, and the pairing of steps with their results.
Never does: read a clock or a socket.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from procengine.adapter_table import unknown_adapter
from procengine.config import LimitsConfig
from procengine.errors import InvalidRequestError
from procengine.input_builder import InputBuilder
from procengine.kv_cache.block_hashes import adapter_salt
from procengine.messages import Register, StepInput, StepResult
from procengine.pipeline import Gauges, PlannedStep
from procengine.request import NO_ADAPTER, Request, RowSampling
from procengine.row_features import ADAPTER
from procengine.sampling_params import SamplingParams
from procengine.scheduler.drafts import settle_drafts
from procengine.scheduler.limits import SchedulerLimits
from procengine.scheduler.plan import StepPlan
from procengine.scheduler.scheduler import Scheduler
from procengine.scheduler.slot_table import SlotTable
from procengine.step_payload import RESULT_SECTIONS, cut_sections, iter_rounds, join_int64
from procengine.structured.spec import StructuredOutputs
from procengine.workflows.prompt import Identity, ModelFacts, Prepared, PromptBody, check_prompt
from procengine.workflows.row_sampling import check_params, check_sizes, row_rules, row_sampling

__all__ = ["GenerateBody", "GeneratePlanner", "accept", "register"]

_MAX_PRIORITY = 2**31


class GenerateBody(PromptBody, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a client submits.

    Attributes:
        priority: smaller is served first (with the priority policy).
        cache_salt: requests share cached prefixes only with the same salt.
        echo: begin the text with the prompt's.
        lora_name: the LoRA adapter to use; "" is the model as it is.
    """

    sampling_params: SamplingParams = SamplingParams()
    priority: int = 0
    cache_salt: str = ""
    echo: bool = False
    lora_name: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The bad words."""
        return tuple(self.sampling_params.bad_words or ())

    @property
    def grammar_spec(self) -> StructuredOutputs | None:
        """What the text must look like."""
        return self.sampling_params.structured_outputs

    @property
    def may_be_truncated(self) -> bool:
        """Whether `truncate_prompt_tokens` was given."""
        return self.sampling_params.truncate_prompt_tokens is not None

    def check_sizes(self, limits: LimitsConfig) -> None:
        """The counts and bytes of all parameters; bad words would be tokenized one by one."""
        check_sizes(self.sampling_params, limits)


def accept(body: GenerateBody, prepared: Prepared, facts: ModelFacts, identity: Identity) -> list[Request]:
    """The requests of a body that can run: one for each choice, with consecutive keys.

    Raises:
        InvalidRequestError: it cannot; names the field, the value and the limit.
    """
    params = body.sampling_params
    check_params(params, facts)
    prompt = check_prompt(_truncated(prepared.token_ids, params, facts), facts)
    if len(prompt) > facts.pool_tokens:
        raise InvalidRequestError(
            f"prompt: has {len(prompt)} tokens, the KV cache of a worker holds {facts.pool_tokens}"
        )
    if not -_MAX_PRIORITY <= body.priority <= _MAX_PRIORITY:
        raise InvalidRequestError(f"priority: must be within ±{_MAX_PRIORITY}, got {body.priority}")
    # The pool bounds a request too: one that outgrows it alone could never go on, so it ends by length.
    end_position = min(_end_position(len(prompt), params, facts), facts.pool_tokens)
    stop_token_ids = (() if params.ignore_eos else facts.eos_token_ids) + params.stop_ids
    adapter, cache_salt = _adapter(body, facts)
    rules = row_rules(params, stop_token_ids, prepared.word_ids)
    return [
        Request(
            key=identity.key + index,
            client=identity.client,
            request_id=identity.request_id,
            index=index,
            prompt_token_ids=prompt,
            end_position=end_position,
            min_position=len(prompt) + params.min_tokens,
            sampling=_row_sampling(params, identity.seed, index, facts.vocab_size, adapter),
            rules=rules,
            grammar=prepared.make_grammar() if prepared.make_grammar else None,
            num_prompt_logprobs=params.prompt_logprobs if params.prompt_logprobs is not None and not index else -1,
            stop_token_ids=stop_token_ids,
            priority=body.priority,
            cache_salt=cache_salt,
            adapter=adapter,
        )
        for index in range(params.n)
    ]


def _adapter(body: GenerateBody, facts: ModelFacts) -> tuple[int, bytes]:
    """The place of the request's adapter, and the salt of its blocks, which are found under the same adapter only."""
    salt = body.cache_salt.encode()
    if not body.lora_name:
        return NO_ADAPTER, salt
    adapter = facts.adapters.get(body.lora_name)
    if adapter is None:
        raise unknown_adapter(body.lora_name, facts.adapters)
    return adapter.place, adapter_salt(adapter.number, salt)


def _row_sampling(params: SamplingParams, seed: int, index: int, vocab_size: int, adapter: int) -> RowSampling:
    sampling = row_sampling(params, seed, index, vocab_size)
    return sampling if adapter == NO_ADAPTER else replace(sampling, features=sampling.features | ADAPTER)


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
        min_position=request.min_position,
        num_prompt_logprobs=request.num_prompt_logprobs,
        detokenize=params.detokenize,
        echo=body.echo,
        output_kind=params.output_kind,
        stream_interval=params.stream_interval,
    )


def _truncated(token_ids: list[int], params: SamplingParams, facts: ModelFacts) -> list[int]:
    keep = params.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == -1:
        keep = max(facts.max_model_len - (params.max_tokens or 1), 1)
    return token_ids[-keep:]


def _end_position(num_prompt_tokens: int, params: SamplingParams, facts: ModelFacts) -> int:
    if num_prompt_tokens >= facts.max_model_len:
        raise InvalidRequestError(
            f"prompt: has {num_prompt_tokens} tokens and leaves no room for a new one; "
            f"the context limit (max_model_len) is {facts.max_model_len}"
        )
    for field, num_tokens in (("max_tokens", params.max_tokens or 0), ("min_tokens", params.min_tokens)):
        if num_prompt_tokens + num_tokens > facts.max_model_len:
            raise InvalidRequestError(
                f"{field}: {num_tokens} new tokens after a prompt of {num_prompt_tokens} make "
                f"{num_prompt_tokens + num_tokens}, the context limit (max_model_len) is {facts.max_model_len}"
            )
    return facts.max_model_len if params.max_tokens is None else num_prompt_tokens + params.max_tokens


@dataclass(frozen=True, slots=True)
class _SentStep:
    """What the results of a step will be matched with."""

    slots: NDArray[np.intp]  # [samples]; with drafts: [rows that sample]
    row_steps: NDArray[np.int32]  # [samples] forward passes each row takes part in
    draft_keys: NDArray[np.int64] | None  # the keys in `slots`, if a row may yield several tokens


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
    def gauges(self) -> Gauges:
        """How full slots and blocks are."""
        scheduler = self.scheduler
        return Gauges(len(scheduler.waiting), scheduler.num_running, scheduler.pool.num_available)

    @property
    def wants_late_plan(self) -> bool:
        """TTFT guard: a step with a prompt in it is better planned late, so that prompts still arriving join it."""
        return self.scheduler.would_take_another

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.scheduler.add(request)

    def finish(self, request: Request) -> None:
        """Take a request out (abort, stop string)."""
        self.scheduler.finish(request)

    def take_failed(self) -> list[tuple[Request, str]]:
        """Requests that cannot go on, and why; to be finished by the caller."""
        return self.scheduler.grammars.take_failed()

    def take_all(self, *, has_died: bool = True) -> list[Request]:
        """Every unfinished request: the worker is gone, and so is this planner."""
        return self.scheduler.take_all(has_died=has_died)

    def plan(self) -> StepPlan | None:
        """What the next step computes, or None if nothing can run now."""
        return self.scheduler.schedule()

    def build(self, plan: StepPlan, step_id: int, epoch: int) -> PlannedStep:
        """The step of that plan."""
        header, payload = self._builder.build(plan, self.scheduler.table, step_id=step_id, epoch=epoch)
        return PlannedStep(
            header, payload, _sent_step(plan, self.scheduler.table), plan.admitted, is_steady=_is_steady(header)
        )

    def apply(self, sent: object, header: StepResult, payload: NDArray[np.int32]) -> list[tuple[Request, str]]:
        """Take in one forward pass's tokens; returns the requests that ended."""
        assert isinstance(sent, _SentStep)
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys, positions, token_ids = join_int64(sections["key_words"]), sections["positions"], sections["token_ids"]
        if sent.draft_keys is not None:
            return self._apply_drafts(sent, keys, positions, token_ids)
        slots = sent.slots if header.micro_step == 0 else sent.slots[sent.row_steps > header.micro_step]
        return self.scheduler.apply(slots, keys, positions, token_ids)

    def _apply_drafts(
        self, sent: _SentStep, keys: NDArray[np.int64], positions: NDArray[np.int32], token_ids: NDArray[np.int32]
    ) -> list[tuple[Request, str]]:
        """A row may have several tokens: take them in one position after the other."""
        assert sent.draft_keys is not None
        slot_by_key = dict(zip(sent.draft_keys.tolist(), sent.slots.tolist(), strict=True))
        slots = np.array([slot_by_key[key] for key in keys.tolist()], np.intp)
        finished: list[tuple[Request, str]] = []
        for rows, is_done in iter_rounds(keys):
            finished += self.scheduler.apply(slots[rows], keys[rows], positions[rows], token_ids[rows], is_done)
        self.scheduler.counters.num_accepted_tokens += keys.size - np.unique(keys).size
        settle_drafts(self.scheduler.table, sent.slots, sent.draft_keys)
        return finished

    def history(self, request: Request) -> NDArray[np.int32]:
        """All confirmed tokens of an unfinished request, int32 [n]."""
        return self.scheduler.history(request)

    def count_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request's prompt that this worker's cache holds now."""
        return self.scheduler.count_cached_tokens(request)


def _sent_step(plan: StepPlan, table: SlotTable) -> _SentStep:
    slots = plan.sample_slots()
    if any(chunk.num_samples > 1 for chunk in plan.chunks):
        slots = np.array(list(dict.fromkeys(slots.tolist())), np.intp)  # each once, in order
        return _SentStep(slots, np.ones(slots.size, np.int32), table.keys[slots])
    return _SentStep(slots, plan.row_steps if not plan.chunks else np.ones(slots.size, np.int32), None)


def _is_steady(header: StepInput) -> bool:
    return header.num_decode_rows == header.num_rows
