"""`TextOutputs`: from the tokens of steps to the deltas of clients. The pure core of the output process for `generate`.

Owns: per request, the text state, the stop strings, how many tokens were taken in. Never does: touch a socket.

Results are taken in one by one and come out together (`take_items`), so that a process that fell behind merges what it
missed into one delta a request. A position seen twice is dropped; a gap is reported once, for the frontend to replay. A
result that overtakes what it builds on (its request's Register, or a Replay: they come over other sockets) is kept
until that is here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.choice import Choice
from procengine.detokenizer import Detokenizer
from procengine.messages import Register, StepResult, TokenLogprobs
from procengine.output_table import OutputTable
from procengine.postprocessor import EndedRequest, Item, TakenItems
from procengine.step_payload import RESULT_SECTIONS, cut_sections, iter_rounds, join_int64
from procengine.stopping import check_finish
from procengine.tokenizer import Tokenizer

__all__ = ["TextOutputs"]

Int32s = NDArray[np.int32]


class TextOutputs:
    """All running `generate` requests of the group."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._choices: dict[int, Choice] = {}
        self._table = OutputTable()
        self._touched: dict[int, Choice] = {}
        self._newest_key = -1
        self._early: list[tuple[StepResult, Int32s]] = []
        self._awaiting_replay: set[int] = set()
        self._ended: list[EndedRequest] = []

    @property
    def num_unfinished(self) -> int:
        """Requests registered and not ended."""
        return len(self._choices)

    def register(self, message: Register) -> None:
        """Take up a new request."""
        row = self._table.add(
            len(message.prompt_token_ids), message.end_position, message.stop_token_ids, message.min_position
        )
        choice = Choice(message, row, self._detokenizer)
        self._choices[message.key] = choice
        self._newest_key = max(self._newest_key, message.key)
        self._take_early_again()

    def admit(self, key: int, num_cached_tokens: int, sent_ns: int = 0) -> None:
        """A request got a slot; say in its first delta how much of the prompt was cached."""
        choice = self._choices.get(key)
        if choice is not None:
            choice.admit(num_cached_tokens, sent_ns)

    def take_result(self, header: StepResult, payload: Int32s) -> list[tuple[int, int]]:
        """Take in one forward pass's tokens. Returns (key, position) of each gap found."""
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"])
        is_early = self._is_early(keys) or self._is_early(_span_keys(sections))
        gaps: list[tuple[int, int]] = []
        positions, token_ids = sections["positions"], sections["token_ids"]
        if keys.size == np.unique(keys).size:
            gaps = self.take_tokens(keys, positions, token_ids)
        else:  # proposals were accepted: some rows have several tokens
            for rows, _ in iter_rounds(keys):
                gaps += self.take_tokens(keys[rows], positions[rows], token_ids[rows])
        if sections["logprob_rows"].size:
            self._take_logprobs(keys, sections)
        if sections["prompt_spans"].size:
            self._take_prompt_logprobs(sections)
        if is_early or gaps:
            self._early.append((header, payload))
        new_gaps = [(key, position) for key, position in gaps if key not in self._awaiting_replay]
        self._awaiting_replay.update(key for key, _ in new_gaps)
        return new_gaps

    def _take_early_again(self) -> list[tuple[int, int]]:
        """Rows that were taken in already are dropped by their positions."""
        early, self._early = self._early, []
        return [gap for header, payload in early for gap in self.take_result(header, payload)]

    def _is_early(self, keys: NDArray[np.int64]) -> bool:
        return bool(keys.size) and bool(keys.max() > self._newest_key)

    def take_tokens(self, keys: NDArray[np.int64], positions: Int32s, token_ids: Int32s) -> list[tuple[int, int]]:
        """Take in tokens: int64/int32 arrays [n], no key twice. Returns (key, position) of each gap found."""
        known = [self._choices.get(key) for key in keys.tolist()]
        rows = np.array([-1 if c is None else c.row for c in known], np.intp)
        table = self._table
        expected = table.next_positions[rows]
        takes = (rows >= 0) & (positions == expected)
        gaps = [(int(keys[i]), int(expected[i])) for i in np.flatnonzero((rows >= 0) & (positions > expected))]
        if not takes.all():
            known = [c for c, taken in zip(known, takes.tolist(), strict=True) if taken]
            rows, positions, token_ids = rows[takes], positions[takes], token_ids[takes]
        codes = check_finish(token_ids, positions, table.limits, rows)
        table.next_positions[rows] = positions + 1
        touched = self._touched
        for choice, token_id, code in zip(known, token_ids.tolist(), codes.tolist(), strict=True):
            assert choice is not None
            choice.take_token(token_id, code)
            touched[choice.register.key] = choice
            if code:
                table.close(choice.row)
        return gaps

    def replay(self, key: int, position: int, token_ids: list[int]) -> list[tuple[int, int]]:
        """Take in tokens that were missing, from `position` on; those already known are dropped.

        Returns (key, position) of each gap that is still there: the frontend did not have all of them itself.
        """
        for at, token_id in enumerate(token_ids, position):
            self.take_tokens(np.array([key]), np.array([at], np.int32), np.array([token_id], np.int32))
        self._awaiting_replay.discard(key)
        return self._take_early_again()

    def take_items(self, received_ns: int = 0) -> TakenItems:
        """Everything that is new since the last call, as messages; the newest result came at `received_ns`."""
        taken = TakenItems()
        touched, self._touched = self._touched, {}
        for key, choice in touched.items():
            choice.advance(received_ns)
            if not choice.is_due:
                continue
            if choice.end is not None:
                if isinstance(choice.end[1], str):
                    taken.text_stopped_keys.append(key)
                self._forget(key)
            taken.add(choice.register.client, choice.make_delta())
        taken.ended, self._ended = self._ended, []
        return taken

    def finish(self, key: int, finish_reason: str, error: str | None = None) -> tuple[bytes, list[Item]] | None:
        """End a request from outside (abort, error): its client and last delta; None if it has ended already.

        Tokens that were taken in still count: if they complete the request, that is how it ended.
        """
        choice = self._choices.get(key)
        if choice is None:
            return None
        self._touched.pop(key, None)
        choice.advance()
        is_over = choice.end is not None
        choice.end_from_outside(finish_reason)
        self._forget(key)
        return choice.register.client, [choice.make_delta(None if is_over else error)]

    def keys_of_client(self, client: bytes) -> list[int]:
        """Running requests of one client."""
        return [key for key, choice in self._choices.items() if choice.register.client == client]

    def all_keys(self) -> list[int]:
        """Running requests."""
        return list(self._choices)

    def _take_logprobs(self, keys: NDArray[np.int64], sections: dict[str, Int32s]) -> None:
        rows = sections["logprob_rows"]
        ids = sections["logprob_token_ids"].reshape(rows.size, -1).tolist()
        logprobs = sections["logprobs"].copy().view(np.float32).reshape(rows.size, -1).tolist()
        ranks = sections["logprob_ranks"].reshape(rows.size, -1).tolist()
        for at, row in enumerate(rows.tolist()):
            choice = self._choices.get(int(keys[row]))
            if choice is None:
                continue
            width = choice.register.num_logprobs + 1
            choice.take_logprobs(
                TokenLogprobs(tuple(ids[at][:width]), tuple(logprobs[at][:width]), tuple(ranks[at][:width]))
            )

    def _take_prompt_logprobs(self, sections: dict[str, Int32s]) -> None:
        spans = sections["prompt_spans"].reshape(-1, 4)
        total = int(spans[:, 3].sum())
        ids = sections["prompt_logprob_token_ids"].reshape(total, -1).tolist()
        logprobs = sections["prompt_logprobs"].copy().view(np.float32).reshape(total, -1).tolist()
        ranks = sections["prompt_logprob_ranks"].reshape(total, -1).tolist()
        at = 0
        for key, (_, _, first, count) in zip(_span_keys(sections).tolist(), spans.tolist(), strict=True):
            choice = self._choices.get(key)
            if choice is not None:
                width = choice.register.num_prompt_logprobs + 1
                choice.take_prompt_logprobs(
                    first,
                    [
                        TokenLogprobs(tuple(ids[i][:width]), tuple(logprobs[i][:width]), tuple(ranks[i][:width]))
                        for i in range(at, at + count)
                    ],
                )
            at += count

    def _forget(self, key: int) -> None:
        choice = self._choices.pop(key)
        self._awaiting_replay.discard(key)
        self._table.remove(choice.row)
        assert choice.end is not None
        self._ended.append(
            EndedRequest(
                key,
                choice.end[0],
                choice.times,
                len(choice.register.prompt_token_ids),
                choice.num_cached_tokens or 0,
                choice.num_output_tokens,
            )
        )


def _span_keys(sections: dict[str, Int32s]) -> NDArray[np.int64]:
    """int64 [prompts]: whose prompts the prompt logprobs of a result belong to."""
    return join_int64(sections["prompt_spans"].reshape(-1, 4)[:, :2].ravel())
