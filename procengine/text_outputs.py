"""`TextOutputs`: from the tokens of steps to the deltas of clients. The pure core of the output process for `generate`.

Owns: per request, the text state, the stop strings, how many tokens were taken in. Never does: touch a socket.

Results are taken in one by one and come out together (`take_items`), so that a process that fell behind merges what it
missed into one delta a request. A position seen twice is dropped; a gap is reported once, for the frontend to replay. A
result that overtakes what it builds on (its request's Register, or a Replay: they come over other sockets) is kept
until that is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from procengine.choice import Choice
from procengine.detokenizer import Detokenizer
from procengine.messages import Register, StepResult, TokenLogprobs
from procengine.output_table import OutputTable
from procengine.postprocessor import EndedRequest, Item, NoteKey, TakenItems, noting
from procengine.step_payload import RESULT_SECTIONS, cut_sections, iter_rounds, join_int64
from procengine.stopping import check_finish
from procengine.tokenizer import Tokenizer

__all__ = ["TextOutputs"]

Int32s = NDArray[np.int32]
_UNKNOWN = -1  # row of a key that is not registered, or not any more


class TextOutputs:
    """All running `generate` requests of the group."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._choices: dict[int, Choice] = {}
        self._row_by_key: dict[int, int] = {}  # in the table
        self._table = OutputTable()
        self._touched: dict[int, Choice] = {}
        self._newest_key = -1
        self._early: list[tuple[StepResult, Int32s]] = []
        self._awaiting_replay: dict[int, int] = {}  # key -> the first position that is here
        self._ended: list[EndedRequest] = []

    @property
    def num_unfinished(self) -> int:
        """Requests registered and not ended."""
        return len(self._choices)

    def register(self, message: Register) -> list[tuple[int, int]]:
        """Take up a request; one that is known already stays as it is. Returns (key, position) of each gap found."""
        if message.key in self._choices:
            return []
        row = self._table.add(
            len(message.prompt_token_ids), message.end_position, message.stop_token_ids, message.min_position
        )
        choice = Choice(message, row, self._detokenizer)
        self._choices[message.key] = choice
        self._row_by_key[message.key] = row
        self._newest_key = max(self._newest_key, message.key)
        return self._take_early_again()

    def admit(self, key: int, num_cached_tokens: int, num_preemptions: int = 0, sent_ns: int = 0) -> None:
        """A request got a slot; say in its first delta how much of the prompt was cached."""
        choice = self._choices.get(key)
        if choice is not None:
            choice.admit(num_cached_tokens, num_preemptions, sent_ns)

    def take_result(self, header: StepResult, payload: Int32s) -> list[tuple[int, int]]:
        """Take in one forward pass's tokens. Returns (key, position) of each gap found."""
        is_awaited = bool(self._early)
        gaps = self._take_one(header, payload)
        return gaps + self._take_early_again() if is_awaited else gaps  # it may be what others were waiting for

    def _take_one(self, header: StepResult, payload: Int32s) -> list[tuple[int, int]]:
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"])
        is_early = self._is_early(keys) or self._is_early(_span_keys(sections))
        gaps: list[tuple[int, int]] = []
        positions, token_ids = sections["positions"], sections["token_ids"]
        if not (keys[1:] == keys[:-1]).any():
            gaps = self.take_tokens(keys, positions, token_ids)
        else:  # proposals were accepted: some rows have several tokens, one behind the other
            for rows, _ in iter_rounds(keys):
                gaps += self.take_tokens(keys[rows], positions[rows], token_ids[rows])
        if sections["logprob_rows"].size:
            self._take_logprobs(keys, sections)
        if sections["prompt_spans"].size:
            self._take_prompt_logprobs(sections)
        if is_early or gaps:
            self._early.append((header, payload))
        new_gaps = [(key, position) for key, position in gaps if key not in self._awaiting_replay]
        for key, _ in new_gaps:
            self._awaiting_replay[key] = int(positions[keys == key].min())
        return new_gaps

    def _take_early_again(self) -> list[tuple[int, int]]:
        """Rows that were taken in already are dropped by their positions."""
        early, self._early = self._early, []
        return [gap for header, payload in early for gap in self._take_one(header, payload)]

    def _is_early(self, keys: NDArray[np.int64]) -> bool:
        return bool(keys.size) and bool(keys.max() > self._newest_key)

    def take_tokens(self, keys: NDArray[np.int64], positions: Int32s, token_ids: Int32s) -> list[tuple[int, int]]:
        """Take in tokens: int64/int32 arrays [n], no key twice. Returns (key, position) of each gap found."""
        table = self._table
        rows = np.fromiter(map(self._row_by_key.get, keys.tolist(), repeat(_UNKNOWN)), np.intp, keys.size)
        expected = table.next_positions[rows]
        takes = (rows != _UNKNOWN) & (positions == expected)
        gaps: list[tuple[int, int]] = []
        if not takes.all():
            beyond = np.flatnonzero((rows != _UNKNOWN) & (positions > expected))
            gaps = [(int(keys[i]), int(expected[i])) for i in beyond]
            keys, rows, positions, token_ids = keys[takes], rows[takes], positions[takes], token_ids[takes]
        codes = check_finish(token_ids, positions, table.limits, rows)
        table.next_positions[rows] = positions + 1
        taking = {key: self._choices[key] for key in keys.tolist()}
        self._touched |= taking
        for choice, token_id in zip(taking.values(), token_ids.tolist(), strict=True):
            choice.take_token(token_id)
        for at in np.flatnonzero(codes):
            taking[int(keys[at])].take_end(int(codes[at]))
            table.close(int(rows[at]))
        return gaps

    def replay(self, key: int, position: int, token_ids: list[int]) -> list[tuple[int, int]]:
        """Take in tokens that were missing, from `position` on; those already known are dropped, and so are those
        behind a gap: the results that showed it have their log probabilities, too.

        Returns (key, position) of each gap that is still there: the frontend did not have all of them itself.
        """
        choice = self._choices.get(key)
        end = self._awaiting_replay.pop(key, None)
        if choice is not None:
            missing = token_ids if end is None else token_ids[: max(end - position, 0)]
            self._take_replayed(choice, position, np.array(missing, np.int32))
        return self._take_early_again()

    def _take_replayed(self, choice: Choice, position: int, token_ids: Int32s) -> None:
        """Tokens of one sequence, all at once: after a restart there are many."""
        table, row = self._table, choice.row
        next_position = int(table.next_positions[row])
        token_ids = token_ids[max(next_position - position, 0) :]
        if not token_ids.size or position > next_position:
            return
        rows = np.full(token_ids.size, row, np.intp)
        positions = np.arange(next_position, next_position + token_ids.size, dtype=np.int32)
        codes = check_finish(token_ids, positions, table.limits, rows)
        ends = np.flatnonzero(codes)
        num_taken = int(ends[0]) + 1 if ends.size else token_ids.size
        choice.take_replayed(token_ids[:num_taken].tolist(), int(codes[num_taken - 1]))
        table.next_positions[row] += num_taken
        if ends.size:
            table.close(row)
        self._touched[choice.register.key] = choice

    def take_items(self, received_ns: int = 0, note_key: NoteKey | None = None) -> TakenItems:
        """Everything that is new since the last call, as messages; the newest result came at `received_ns`."""
        taken = TakenItems()
        touched, self._touched = self._touched, {}
        for key, choice in noting(touched.items(), note_key) if note_key else touched.items():
            delta = choice.next_delta(received_ns)
            if delta is None:
                continue
            if choice.end is not None:
                if isinstance(choice.end[1], str):
                    taken.text_stopped_keys.append(key)
                self._forget(key)
            taken.add(choice.register.client, delta)
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

    def clients(self) -> Iterator[tuple[bytes, bool]]:
        """The client of each running request, and whether that has had its first step."""
        return ((choice.register.client, choice.is_admitted) for choice in self._choices.values())

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
        del self._row_by_key[key]
        self._awaiting_replay.pop(key, None)
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
