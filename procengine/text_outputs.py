"""`TextOutputs`: from the tokens of steps to the deltas of clients. The pure core of the output process for `generate`.

Owns: per request, the text state, the stop strings, how many tokens were taken in. Never does: touch a socket.

Results are taken in one by one and come out together (`take_items`), so that a process that fell behind merges what it
missed into one delta a request. A position seen twice is dropped; a gap is reported, for the frontend to replay. A
result that overtakes its request's Register (they come over different sockets) is kept until the Register is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from procengine.detokenizer import Detokenizer, TextStream
from procengine.messages import Delta, Register, StepResult, TokenLogprobs
from procengine.output_table import OutputTable
from procengine.postprocessor import Item, TakenItems
from procengine.step_payload import RESULT_SECTIONS, cut_sections, join_int64
from procengine.stop_strings import StopBuffer
from procengine.stopping import FINISH_REASON, NOT_FINISHED, STOP, check_finish
from procengine.tokenizer import Tokenizer

__all__ = ["TextOutputs"]

_PROMPT_TAIL = 8  # tokens of context that decoders with a special first token want to see

Int32s = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _Choice:
    """One registered request."""

    register: Register
    row: int
    stream: TextStream
    stops: StopBuffer
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_code: int = NOT_FINISHED
    has_sent: bool = False
    num_cached_tokens: int | None = None


class TextOutputs:
    """All running `generate` requests of the group."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._choices: dict[int, _Choice] = {}
        self._table = OutputTable()
        self._touched: dict[int, _Choice] = {}
        self._newest_key = -1
        self._early: list[tuple[StepResult, Int32s]] = []

    @property
    def num_unfinished(self) -> int:
        """Requests registered and not ended."""
        return len(self._choices)

    def register(self, message: Register) -> None:
        """Take up a new request."""
        choice = _Choice(
            register=message,
            row=self._table.add(len(message.prompt_token_ids), message.end_position, message.stop_token_ids),
            stream=self._detokenizer.stream(message.prompt_token_ids[-_PROMPT_TAIL:], message.skip_special_tokens),
            stops=StopBuffer(message.stop, message.include_stop_str_in_output),
        )
        self._choices[message.key] = choice
        self._newest_key = max(self._newest_key, message.key)
        if self._early:
            early, self._early = self._early, []
            for header, payload in early:  # rows that were taken in already are dropped by their positions
                self.take_result(header, payload)

    def admit(self, key: int, num_cached_tokens: int) -> None:
        """A request started; say in its first delta how much of the prompt was cached."""
        choice = self._choices.get(key)
        if choice is not None:
            choice.num_cached_tokens = num_cached_tokens

    def take_result(self, header: StepResult, payload: Int32s) -> list[tuple[int, int]]:
        """Take in one forward pass's tokens. Returns (key, position) of each gap found."""
        sections = cut_sections(RESULT_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"])
        if keys.size and keys.max() > self._newest_key:
            self._early.append((header, payload))
        gaps = self.take_tokens(keys, sections["positions"], sections["token_ids"])
        if sections["logprob_rows"].size:
            self._take_logprobs(keys, sections)
        return gaps

    def take_tokens(self, keys: NDArray[np.int64], positions: Int32s, token_ids: Int32s) -> list[tuple[int, int]]:
        """Take in tokens: int64/int32 arrays [n], no key twice. Returns (key, position) of each gap found."""
        known = [self._choices.get(key) for key in keys.tolist()]
        rows = np.array([-1 if c is None else c.row for c in known], np.int32)
        table = self._table
        expected = table.next_positions[rows]
        takes = (rows >= 0) & (positions == expected)
        gaps = [(int(keys[i]), int(expected[i])) for i in np.flatnonzero((rows >= 0) & (positions > expected))]
        if not takes.all():
            known = [c for c, taken in zip(known, takes.tolist(), strict=True) if taken]
            rows, positions, token_ids = rows[takes], positions[takes], token_ids[takes]
        codes = check_finish(token_ids, positions, table.limits(rows))
        table.next_positions[rows] = positions + 1
        touched = self._touched
        for choice, token_id, code in zip(known, token_ids.tolist(), codes.tolist(), strict=True):
            assert choice is not None
            choice.new_token_ids.append(token_id)
            touched[choice.register.key] = choice
            if code:
                choice.finish_code = code
                table.close(choice.row)
        return gaps

    def replay(self, key: int, position: int, token_ids: list[int]) -> None:
        """Take in tokens that were missing, from `position` on; those already known are dropped."""
        for at, token_id in enumerate(token_ids, position):
            self.take_tokens(np.array([key]), np.array([at], np.int32), np.array([token_id], np.int32))

    def take_items(self) -> TakenItems:
        """Everything that is new since the last call, as messages."""
        taken = TakenItems()
        touched, self._touched = self._touched, {}
        for key, choice in touched.items():
            delta = self._make_delta(choice)
            if delta.finish_reason is not None:
                if isinstance(delta.stop_reason, str):
                    taken.text_stopped_keys.append(key)
                self._forget(key)
            taken.add(choice.register.client, delta)
        return taken

    def finish(self, key: int, finish_reason: str, error: str | None = None) -> tuple[bytes, list[Item]] | None:
        """End a request from outside (abort, error): its client and last deltas; None if it has ended already.

        Tokens that were taken in still count: if they complete the request, that is how it ended.
        """
        choice = self._choices.get(key)
        if choice is None:
            return None
        deltas: list[Item] = [self._make_delta(choice)] if self._touched.pop(key, None) else []
        if not deltas or deltas[-1].finish_reason is None:
            tail = choice.stops.push(choice.stream.flush())[0] + choice.stops.flush()
            deltas.append(self._delta(choice, tail, finish_reason, error=error))
        self._forget(key)
        return choice.register.client, deltas

    def keys_of_client(self, client: bytes) -> list[int]:
        """Running requests of one client."""
        return [key for key, choice in self._choices.items() if choice.register.client == client]

    def all_keys(self) -> list[int]:
        """Running requests."""
        return list(self._choices)

    def _make_delta(self, choice: _Choice) -> Delta:
        text, stop_text = self._new_text(choice)
        if stop_text is not None:
            return self._delta(choice, text, "stop", stop_text)
        if choice.finish_code == NOT_FINISHED:
            return self._delta(choice, text, None)
        tail, stop_text = choice.stops.push(choice.stream.flush())
        if stop_text is not None:
            return self._delta(choice, text + tail, "stop", stop_text)
        text += tail + choice.stops.flush()
        last = choice.new_token_ids[-1]
        is_requested = choice.finish_code == STOP and last in choice.register.requested_stop_token_ids
        return self._delta(choice, text, FINISH_REASON[choice.finish_code], last if is_requested else None)

    def _new_text(self, choice: _Choice) -> tuple[str, str | None]:
        """Text of the new tokens and the stop string that ended it. Tokens behind the stop are dropped."""
        token_ids = choice.new_token_ids
        # A token that ended the sequence is not part of the text, unless the stop is to be shown.
        hides_last = choice.finish_code == STOP and not choice.register.include_stop_str_in_output
        shown = token_ids[:-1] if hides_last else token_ids
        if not choice.register.stop:
            return choice.stream.push(shown), None
        text = ""
        for count, token_id in enumerate(shown, 1):
            piece, matched = choice.stops.push(choice.stream.push((token_id,)))
            text += piece
            if matched is not None:
                del token_ids[count:]
                del choice.new_logprobs[count:]
                return text, matched
        return text, None

    def _delta(
        self,
        choice: _Choice,
        text: str,
        finish_reason: str | None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> Delta:
        register = choice.register
        is_first, choice.has_sent = not choice.has_sent, True
        # Once, whenever it is known: Admitted comes over another socket than the results and may be behind them.
        num_cached_tokens, choice.num_cached_tokens = choice.num_cached_tokens, None
        delta = Delta(
            register.request_id,
            register.index,
            text,
            choice.new_token_ids,
            finish_reason,
            stop_reason,
            choice.new_logprobs or None,
            register.prompt_token_ids if is_first else None,
            num_cached_tokens,
            error,
        )
        choice.new_token_ids = []
        if choice.new_logprobs:
            choice.new_logprobs = []
        return delta

    def _take_logprobs(self, keys: NDArray[np.int64], sections: dict[str, Int32s]) -> None:
        rows = sections["logprob_rows"]
        ids = sections["logprob_token_ids"].reshape(rows.size, -1).tolist()
        logprobs = sections["logprobs"].copy().view(np.float32).reshape(rows.size, -1).tolist()
        ranks = sections["logprob_ranks"].reshape(rows.size, -1).tolist()
        for at, row in enumerate(rows.tolist()):
            choice = self._choices.get(int(keys[row]))
            if choice is None:
                continue
            # A repeated position brought no token, so it must bring no logprobs either.
            if len(choice.new_logprobs) < len(choice.new_token_ids):
                width = choice.register.num_logprobs + 1
                choice.new_logprobs.append(
                    TokenLogprobs(tuple(ids[at][:width]), tuple(logprobs[at][:width]), tuple(ranks[at][:width]))
                )

    def _forget(self, key: int) -> None:
        self._table.remove(self._choices.pop(key).row)
