"""`Scheduler`: decides what the next step of one worker computes, and takes in what a step yielded.

Owns: the waiting queue, the running rows and the blocks of one worker. Never does: read a clock, encode a message, know
a socket or a model.

One rule, no phases: let `num_computed` catch up with each request's tokens within a token budget. Decodes go first,
then prompts, those that have begun and those that wait in one order. Where steps of both are kept short, and few
prompts wait, these have every second step for themselves. A step is planned before the tokens of the steps in flight
are known, assuming that each row yields one token a forward pass: an end by length is known in advance and wastes
nothing, an end by stop token wastes the row in the steps already sent, whose results are dropped.

Blocks are reused without a fence, because a worker runs its steps in order; and a block may be shared in the very step
that fills it, because a worker writes the KV entries of all rows of a layer before it reads any.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.kv_cache.block_pool import BlockPool
from procengine.kv_cache.cached_prefix import CachedPrefix
from procengine.request import NO_SLOT, Request
from procengine.scheduler.counters import SchedulerCounters
from procengine.scheduler.drafts import plan_drafts, propose_drafts
from procengine.scheduler.grammar_rows import GrammarRows
from procengine.scheduler.limits import SchedulerLimits
from procengine.scheduler.lone_suspects import LoneSuspects
from procengine.scheduler.owed_results import OwedResults
from procengine.scheduler.plan import StepPlan
from procengine.scheduler.prompt_chunk import plan_prompt_chunk
from procengine.scheduler.prompt_queue import PromptQueue
from procengine.scheduler.ready_rows import ready_rows
from procengine.scheduler.request_blocks import RequestBlocks
from procengine.scheduler.slot_table import VACANT, Slots, SlotTable
from procengine.stopping import FINISH_REASON, NOT_FINISHED, check_finish

__all__ = ["Scheduler"]

Int32s = NDArray[np.int32]


class Scheduler:
    """The pure core of one worker's queue: `add`, `schedule`, `apply`, `finish`."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        num_groups = len(limits.windows)
        self.table = SlotTable(limits.max_num_seqs, limits.max_model_len, limits.block_size, num_groups)
        self.pool = BlockPool(limits.num_blocks, enable_prefix_caching=limits.enable_prefix_caching)
        self._blocks = RequestBlocks(self.pool, self.table, limits)
        self._prompts = PromptQueue(limits.max_overtaken_tokens)
        self.waiting = self._prompts.waiting
        self._decode_slots: Slots = np.zeros(0, np.intp)
        self._row_steps: Int32s = np.zeros(0, np.int32)
        self.grammars = GrammarRows()
        self._owed = OwedResults()
        self._suspects = LoneSuspects()
        self._speculates = limits.num_speculative_tokens > 0
        self._were_prompts_alone = False  # in the step before

    # --- requests in and out

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return self.limits.max_num_seqs - self.table.num_vacant

    @property
    def would_prefill(self) -> bool:
        """Whether the next step is going to start or go on with some request's prompt.

        May say no when only a prefix hit would let the next request in: its blocks are not counted here.
        """
        if self._prompts.begun:
            return True
        request = self.waiting.peek() if self.table.num_vacant else None
        if request is None or request.num_in_flight or not self._suspects.let_in(request, self.table):
            return False
        num_blocks = self._blocks.count_needed(len(request.token_ids)) + self._num_reserved_blocks
        return num_blocks <= self.pool.num_available

    @property
    def would_take_another(self) -> bool:
        """Whether the next step is going to hold a prompt, and has room for one not yet here, behind all others."""
        if not self.would_prefill:
            return False
        num_rows = 0 if self._are_prompts_alone() else self._decode_slots.size
        return not self._prompts.hold_tokens(self.limits.prompt_tokens_beside(num_rows), self.table)

    def add(self, request: Request) -> None:
        """Queue a request whose prompt fits the pool (`SchedulerLimits.pool_tokens`)."""
        if not self.limits.is_priority_policy:
            request.priority = 0
        self._prompts.add(request)

    def count_cached_tokens(self, request: Request) -> int:
        """Tokens of a new request's prompt that are in the cache now."""
        return self._blocks.count_cached_tokens(request)

    def history(self, request: Request) -> Int32s:
        """All confirmed tokens of an unfinished request, int32 [n]."""
        if request.slot == NO_SLOT:
            return request.token_ids
        return self.table.token_ids[request.slot, : self.table.num_tokens[request.slot]]

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is, and free its blocks. Results still under way for it will be dropped."""
        assert not request.is_finished
        request.is_finished = True
        if request.slot == NO_SLOT:
            self.waiting.remove(request)
            self._owed.forget(request)
        else:
            self._leave_slot(request)

    def take_all(self, *, has_died: bool = True) -> list[Request]:
        """Take out every unfinished request, in order of service, with what it has so far. The worker is gone: nothing
        is owed any more, and prompts must be scored again, as results may have been lost. If it `has_died`, those that
        were running count a death of a worker. This scheduler is not used afterwards.
        """
        running = [request for request in self.table.requests if request is not None]
        waiting = self.waiting.pop_all()
        for request in running:
            num_computed = int(self.table.num_computed[request.slot])
            self.table.vacate(request)
            if has_died:
                request.note_worker_death(num_computed)
        for request in waiting:
            if has_died and request.num_in_flight:
                request.note_worker_death(len(request.token_ids) + request.num_in_flight - 1)
        for request in running + waiting:
            request.num_in_flight = request.num_scored_tokens = 0
            self._prompts.take_turn(request)
        return sorted(running + waiting, key=lambda request: request.order)

    # --- planning

    def schedule(self) -> StepPlan | None:
        """The next step, or None if no row can run now. Its rows count as computed from here on."""
        plan = StepPlan()
        if self.would_prefill and self._are_prompts_alone():
            self._schedule_prompts(plan, self.limits.prompt_tokens_beside(0))
        self._were_prompts_alone = bool(plan.chunks)
        if not plan.chunks:
            self._schedule_decodes(plan)
            if plan.decode_steps == 1:  # a step of several forward passes holds decode rows alone
                budget = self.limits.prompt_tokens_beside(plan.decode_slots.size)
                budget -= sum(chunk.token_ids.size for chunk in plan.chunks)
                self._schedule_prompts(plan, budget)
        if not plan.num_rows:
            return None
        if self.grammars.num_running:
            self.grammars.mask(plan, self.table)
        return plan

    def _are_prompts_alone(self) -> bool:
        """Whether the next step, if it is going to hold a prompt, is the prompts', and rows that decode wait for it.
        Where steps beside them are kept short, prompts are done sooner in steps of their own: they get every second
        one, once two hold all that wait.
        """
        if self._were_prompts_alone or not self._decode_slots.size or not self.limits.keeps_mixed_steps_short:
            return False
        num_tokens = 2 * self.limits.prompt_tokens_beside(0)
        return not self._prompts.hold_tokens(num_tokens + 1, self.table)

    def _schedule_decodes(self, plan: StepPlan) -> None:
        table = self.table
        slots, must_wait = self._decode_slots, None
        if self._speculates or self.grammars.num_running:  # a group that has no such rows pays nothing for them
            slots, must_wait = ready_rows(table, slots, speculates=self._speculates)
        if not slots.size:
            return
        decode_steps = 1 if self.limits.decode_steps == 1 or self.would_prefill else self.limits.decode_steps
        row_steps = self._equal_steps(slots.size, decode_steps)
        is_due = table.num_computed[slots] + row_steps > table.next_events[slots]
        if must_wait is not None:
            is_due |= must_wait
        if is_due.any():  # the other rows, usually most of them, only go on by so many positions
            slots, row_steps = self._decide_due_rows(plan, slots, row_steps, is_due, must_wait)
            if not slots.size:
                return
        plan.decode_slots, plan.row_steps = slots, row_steps
        plan.decode_steps = 1 if decode_steps == 1 else int(row_steps.max())
        plan.decode_positions = table.num_computed[slots]
        if self._speculates:  # the worker's own record of a row ends at its last rejected proposal
            plan.decode_token_ids = table.token_ids[slots, plan.decode_positions]
        table.num_computed[slots] = plan.decode_positions + row_steps

    def _equal_steps(self, num_rows: int, decode_steps: int) -> Int32s:
        """int32 [rows], all the same; the array of the step before if it serves."""
        if self._row_steps.size != num_rows or self._row_steps[0] != decode_steps:
            self._row_steps = np.full(num_rows, decode_steps, np.int32)
        return self._row_steps

    def _decide_due_rows(
        self,
        plan: StepPlan,
        slots: Slots,
        row_steps: Int32s,
        is_due: NDArray[np.bool_],
        must_wait: NDArray[np.bool_] | None,
    ) -> tuple[Slots, Int32s]:
        """Leave out rows that are complete, give the others blocks, and make chunks of those that try proposed tokens.

        Returns:
            The ordinary decode rows that are left, and their steps.
        """
        num_left = self.table.end_positions[slots] - self.table.num_computed[slots] - 1
        row_steps = np.minimum(row_steps, num_left)
        if must_wait is not None:
            row_steps[must_wait] = np.minimum(row_steps[must_wait], 1)
        is_going_on = num_left > 0
        if not is_going_on.all():  # else the array stays the one that the input builder knows
            slots, num_left = slots[is_going_on], num_left[is_going_on]
            row_steps, is_due = row_steps[is_going_on], is_due[is_going_on]
        drafts = propose_drafts(self.table, slots, num_left, self.limits.num_speculative_tokens)
        if not drafts:
            return self._reserve_decode_blocks(plan, slots, row_steps, is_due)
        row_steps += np.array([drafts[s].size if s in drafts else 0 for s in slots.tolist()], np.int32)
        slots, _ = self._reserve_decode_blocks(plan, slots, row_steps, is_due)
        budget = self.limits.max_num_batched_tokens // 2 - slots.size  # the other half is for prompts
        chunks, slots, row_steps = plan_drafts(self.table, slots, drafts, budget)
        plan.chunks += chunks
        self.counters.num_draft_tokens += sum(chunk.token_ids.size - 1 for chunk in chunks)
        return slots, row_steps

    def _reserve_decode_blocks(
        self, plan: StepPlan, slots: Slots, row_steps: Int32s, is_due: NDArray[np.bool_]
    ) -> tuple[Slots, Int32s]:
        """Give each row the blocks its tokens need, preempting the last in order of service while there are not enough.

        Only rows that are due may need one. One request alone always fits (`end_position` is at most `pool_tokens`), so
        this ends.
        """
        table, num_groups = self.table, self._blocks.groups.num_groups
        if self._blocks.groups.has_windows:
            self._blocks.drop_passed(slots[is_due])
        while True:
            due = slots[is_due]
            last_positions = table.num_computed[due] + row_steps[is_due] - 1
            # A row whose proposals were rejected has blocks to spare; what it has is no block for another one.
            num_missing = np.maximum(last_positions // table.block_size + 1 - table.num_blocks[due], 0)
            if not num_missing.any():
                return slots, row_steps
            if num_missing.sum() * num_groups <= self.pool.num_available:
                break
            self._preempt_last()
            stays = table.keys[slots] != VACANT
            slots, row_steps, is_due = slots[stays], row_steps[stays], is_due[stays]
        for round_ in range(int(num_missing.max(initial=0))):
            plan.block_updates.append(self._blocks.grow(due[num_missing > round_]))
        return slots, row_steps

    def _schedule_prompts(self, plan: StepPlan, budget: int) -> None:
        """Chunks of prompts, in order of service, until the budget is spent or one does not get all that it needs."""
        may_start = True
        while budget > 0 and (request := self._prompts.first(may_start=may_start)):
            if request.slot != NO_SLOT or self._start_first(plan, request, budget):
                budget = self._schedule_chunk(plan, request, budget)
            else:
                may_start = False  # nor may those that wait behind it

    def _start_first(self, plan: StepPlan, request: Request, budget: int) -> bool:
        """Give the first of those that wait a slot and blocks, if that can be now."""
        if not self.table.num_vacant or request.num_in_flight:
            return False  # or its newest tokens are still under way; they come with a step already sent
        if not self._suspects.let_in(request, self.table):
            return False
        prefix = self._blocks.match(request)
        num_cached = prefix.num_blocks * self.limits.block_size
        if not self.limits.enable_chunked_prefill and len(request.token_ids) - num_cached > budget:
            return False
        blocks = self._blocks.take(request, prefix, self._num_reserved_blocks)
        if blocks is None:
            return False
        self._start(plan, request, blocks, prefix)
        return True

    @property
    def _num_reserved_blocks(self) -> int:
        """What the running rows will need soon stays free: admitting a request only to preempt it is waste."""
        per_group = self._decode_slots.size // self.limits.block_size + 1 if self.num_running else 0
        return per_group * self._blocks.groups.num_groups

    def _start(self, plan: StepPlan, request: Request, blocks: Int32s, prefix: CachedPrefix) -> None:
        slot = self.table.place(request)
        plan.block_updates += self._blocks.enter(slot, blocks, prefix)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = int(self.table.num_computed[slot])
            self.counters.prompt_tokens += len(request.prompt_token_ids)
            self.counters.prefix_hit_tokens += request.num_cached_tokens
        self._prompts.start()
        self.grammars.enter(request)
        self._suspects.enter(request)
        plan.admitted.append(request)

    def _schedule_chunk(self, plan: StepPlan, request: Request, budget: int) -> int:
        """Plan the next known tokens of a running request.

        Returns:
            What is left of the budget for those behind it: nothing until its prompt is done, so that they do not take
            what it lacks, be it blocks or room for a whole prompt.
        """
        slot, table = request.slot, self.table
        start, num_tokens = int(table.num_computed[slot]), int(table.num_tokens[slot])
        length = num_tokens - start
        if length > budget:
            if not self.limits.enable_chunked_prefill:
                return 0
            length = budget
        if self._blocks.groups.has_windows:
            length = self._blocks.reserve_chunk(slot, start, length, plan.block_updates)
            if not length:
                return 0
        plan.chunks.append(plan_prompt_chunk(table, request, length))
        self._blocks.publish_prompt(request, slot, start, start + length)
        if start + length < num_tokens:
            return 0
        self._prompts.begun.remove(request)
        self._decode_slots = np.append(self._decode_slots, np.intp(slot))
        return budget - length

    # --- results

    def apply(
        self,
        slots: Slots,
        keys: NDArray[np.int64],
        positions: Int32s,
        token_ids: Int32s,
        is_row_done: NDArray[np.bool_] | None = None,
    ) -> list[tuple[Request, str]]:
        """Take in the tokens of one forward pass.

        Args:
            slots: intp [n], where the rows were when their step was planned, no slot twice.
            keys: int64 [n], whose tokens they are; rows whose slot has another holder now are dropped or, for a
                preempted request, kept with it.
            positions: int32 [n], the next one of each row.
            token_ids: int32 [n].
            is_row_done: bool [n], false where more tokens of the row follow in the same result; None: all are done.

        Returns:
            Requests that ended here, with their finish reason.
        """
        table = self.table
        is_live = table.keys[slots] == keys
        finished: list[tuple[Request, str]] = []
        if not is_live.all():
            gone = ~is_live
            done = gone[gone] if is_row_done is None else is_row_done[gone]
            for request, token_id, code in self._owed.take(keys[gone], positions[gone], token_ids[gone], done):
                self.counters.output_tokens += 1
                self.grammars.consume(request, token_id)
                finished += self._finish_by_code(request, code)
            slots, positions, token_ids = slots[is_live], positions[is_live], token_ids[is_live]
        assert (positions == table.num_tokens[slots]).all(), "a worker skipped or repeated a token"
        table.append_tokens(slots, positions, token_ids)
        self.counters.output_tokens += slots.size
        if self.grammars.num_running:
            self.grammars.advance(table, slots, token_ids)
        codes = check_finish(token_ids, positions, table.finish_limits, slots)
        for row in np.flatnonzero(codes):
            request = table.requests[slots[row]]
            assert request is not None
            finished += self._finish_by_code(request, int(codes[row]))
        return finished

    def _finish_by_code(self, request: Request, code: int) -> list[tuple[Request, str]]:
        if code == NOT_FINISHED:
            return []
        self.finish(request)
        return [(request, FINISH_REASON[code])]

    # --- leaving a slot

    def _preempt_last(self) -> Request:
        victim = max((r for r in self.table.requests if r is not None), key=lambda r: r.order)
        self._leave_slot(victim)
        victim.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._owed.add(victim)
        self.waiting.push(victim)
        return victim

    def _leave_slot(self, request: Request) -> None:
        slot, table = request.slot, self.table
        self.grammars.leave(request)
        if request in self._prompts.begun:
            self._prompts.begun.remove(request)
            request.num_in_flight = 0
        else:
            self._decode_slots = self._decode_slots[self._decode_slots != slot]
            request.num_in_flight = table.num_results_in_flight(slot)
        confirmed = table.token_ids[slot, : table.num_cacheable(slot)]
        self._blocks.release(request, slot, confirmed)
        table.vacate(request)

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, slots and rows agree. For tests."""
        running = [r for r in self.table.requests if r is not None]
        held = np.zeros(self.limits.num_blocks, np.int64)
        for request in running:
            for blocks in self.table.held_blocks(request.slot):
                np.add.at(held, blocks, 1)
        self.pool.check_integrity(held)
        rows = set(self._decode_slots.tolist()) | {r.slot for r in self._prompts.begun}
        assert rows == {r.slot for r in running}, "a running request is in no list, or in two"
        self._blocks.check_integrity([r.slot for r in running])
        decoding = self._decode_slots
        assert (self.table.num_computed[decoding] + 1 >= self.table.num_tokens[decoding]).all()
