"""`Choice`: one registered request in the output process: tokens in, text and deltas out.

Owns: the text state of one sequence: detokenizer, stop strings, what is not sent yet. Never does: know another request.
"""

from __future__ import annotations

from collections.abc import Sequence

from procengine.detokenizer import Detokenizer
from procengine.messages import Delta, Register, RequestTimes, TokenLogprobs
from procengine.stop_strings import StopBuffer
from procengine.stopping import FINISH_REASON, NOT_FINISHED, STOP

__all__ = ["Choice"]

_PROMPT_TAIL = 8  # tokens of context that decoders with a special first token want to see
_UNKNOWN_LOGPROBS = TokenLogprobs((), (), ())  # they were lost with a process, the token was not


class Choice:
    """The life of one choice: `take_token`s, `advance`, and `make_delta` when `is_due`."""

    def __init__(self, register: Register, row: int, detokenizer: Detokenizer) -> None:
        self.register = register
        self.row = row  # in the OutputTable
        self.end: tuple[str, int | str | None] | None = None  # finish reason and stop reason
        self._stream = detokenizer.stream(register.prompt_token_ids[-_PROMPT_TAIL:], register.skip_special_tokens)
        self._stops = StopBuffer(register.stop, register.include_stop_str_in_output)
        self._new_token_ids: list[int] = []
        self._new_logprobs: list[TokenLogprobs] = []
        self._finish_code = NOT_FINISHED
        self._num_tokens = len(register.prompt_token_ids)
        shows_prompt = register.echo and register.detokenize
        self._text = detokenizer.text(register.prompt_token_ids, register.skip_special_tokens) if shows_prompt else ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._has_sent = False
        self._num_sent_tokens = 0
        self._num_sent_chars = 0
        self._num_unsent = 0
        self.num_cached_tokens: int | None = None
        self._unsent_cached_tokens: int | None = None
        self.is_admitted = False
        self._admitted_ns = 0
        self._num_preemptions = 0
        self._first_token_ns = 0
        self._last_token_ns = 0
        # Nothing is held back, counted or looked for: each step's tokens go out with the step (`next_delta`).
        self._is_plain = (
            register.detokenize
            and not register.stop
            and register.num_logprobs < 0
            and register.output_kind == "delta"
            and register.stream_interval == 1
        )

    @property
    def times(self) -> RequestTimes:
        """When it passed each stage, as far as it has."""
        register = self.register
        return RequestTimes(
            register.client_sent_ns,
            register.received_ns,
            register.prepared_ns,
            self._admitted_ns,
            self._first_token_ns,
            self._last_token_ns,
            self._num_preemptions,
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens behind the prompt so far."""
        return self._num_tokens - len(self.register.prompt_token_ids)

    def admit(self, num_cached_tokens: int, num_preemptions: int = 0, sent_ns: int = 0) -> None:
        """It got a slot. The first time: the next delta says how much of the prompt was cached."""
        self._num_preemptions = num_preemptions
        if self.is_admitted:
            return
        self.is_admitted = True
        self.num_cached_tokens = self._unsent_cached_tokens = num_cached_tokens
        self._admitted_ns = sent_ns

    def take_token(self, token_id: int) -> None:
        """The next token."""
        self._new_token_ids.append(token_id)

    def take_end(self, finish_code: int) -> None:
        """The token taken last ends the sequence (`stopping`)."""
        self._finish_code = finish_code

    def next_delta(self, received_ns: int) -> Delta | None:
        """What is due now that tokens were taken, which came at `received_ns`; None: nothing yet."""
        if not self._is_plain or not self._has_sent or self._finish_code or self.end is not None:
            self.advance(received_ns)
            return self.make_delta() if self.is_due else None
        # What most requests do most of the time, in few words: it runs for each row of each step.
        token_ids, self._new_token_ids = self._new_token_ids, []
        if not token_ids:
            return None
        num_cached_tokens, self._unsent_cached_tokens = self._unsent_cached_tokens, None
        text, register = self._stream.push(token_ids), self.register
        num_tokens, num_chars = self._num_sent_tokens, self._num_sent_chars
        self._last_token_ns = received_ns
        self._num_tokens += len(token_ids)
        self._num_sent_tokens = num_tokens + len(token_ids)
        self._num_sent_chars = num_chars + len(text)
        return Delta(
            register.request_id,
            register.index,
            text,
            token_ids,
            num_cached_tokens=num_cached_tokens,
            token_offset=num_tokens,
            text_offset=num_chars,
            key=register.key,
        )

    def take_logprobs(self, entry: TokenLogprobs) -> None:
        """Those of the last token taken. A repeated position brought no token, so its logprobs are dropped too."""
        if len(self._new_logprobs) < len(self._new_token_ids):
            self._new_logprobs.append(entry)

    def take_replayed(self, token_ids: list[int], finish_code: int) -> None:
        """The next tokens, of which the log probabilities are not known any more; the last one may end the sequence."""
        self._new_token_ids += token_ids
        self._finish_code = finish_code
        if self.register.num_logprobs >= 0:
            self._new_logprobs += [_UNKNOWN_LOGPROBS] * len(token_ids)

    def take_prompt_logprobs(self, first_position: int, entries: Sequence[TokenLogprobs]) -> None:
        """Those of prompt tokens from `first_position` on; positions already known are dropped."""
        num_lost = first_position - len(self._prompt_logprobs)
        if num_lost > 0:
            self._prompt_logprobs += [_UNKNOWN_LOGPROBS] * num_lost
        self._prompt_logprobs += entries[len(self._prompt_logprobs) - first_position :]

    def advance(self, received_ns: int = 0) -> None:
        """Turn the tokens taken, which came at `received_ns`, into text, up to the stop string that ends it, if any."""
        token_ids, self._new_token_ids = self._new_token_ids, []
        logprobs, self._new_logprobs = self._new_logprobs, []
        if not token_ids or self.end is not None:
            return
        self._first_token_ns = self._first_token_ns or received_ns
        self._last_token_ns = received_ns
        num_used = self._add_text(token_ids)
        self._token_ids += token_ids[:num_used]
        self._num_unsent += num_used
        self._logprobs += logprobs[:num_used]
        self._num_tokens += num_used
        if self.end is None and self._finish_code != NOT_FINISHED:
            self._end_by_token(token_ids[-1])

    @property
    def is_due(self) -> bool:
        """Whether there is something to send now."""
        register = self.register
        if self.end is not None:
            return True
        if register.output_kind == "final" or not self._num_unsent:
            return False
        return not self._has_sent or self._num_unsent >= register.stream_interval

    def end_from_outside(self, finish_reason: str) -> None:
        """It ends for a reason that is not in its tokens; what was held back is shown."""
        if self.end is None:
            tail, _ = self._stops.push(self._stream.flush())
            self._text += tail + self._stops.flush()
            self.end = (finish_reason, None)

    def make_delta(self, error: str | None = None) -> Delta:
        """What is new since the last one; with output kind "cumulative" everything so far."""
        register = self.register
        is_first, self._has_sent, self._num_unsent = not self._has_sent, True, 0
        # Once, whenever it is known: Admitted comes over another socket than the results and may be behind them.
        num_cached_tokens, self._unsent_cached_tokens = self._unsent_cached_tokens, None
        finish_reason, stop_reason = self.end or (None, None)
        wants_prompt = is_first and register.num_prompt_logprobs >= 0
        tells_offsets = register.output_kind == "delta"
        delta = Delta(
            register.request_id,
            register.index,
            self._text,
            self._token_ids,
            finish_reason,
            stop_reason,
            self._logprobs or None,
            register.prompt_token_ids if is_first else None,
            num_cached_tokens,
            error,
            self._prompt_logprobs if wants_prompt else None,
            self.times if finish_reason is not None else None,
            self._num_sent_tokens if tells_offsets else -1,
            self._num_sent_chars if tells_offsets else -1,
            register.key,
        )
        if register.output_kind == "cumulative":
            self._token_ids, self._logprobs = list(self._token_ids), list(self._logprobs)
        else:
            self._num_sent_tokens += len(self._token_ids)
            self._num_sent_chars += len(self._text)
            self._text, self._token_ids, self._logprobs = "", [], []
        return delta

    def _add_text(self, token_ids: list[int]) -> int:
        """Text of these tokens; returns how many of them count: those up to the stop string."""
        register = self.register
        if not register.detokenize:
            return len(token_ids)
        # A token that ended the sequence is not part of the text, unless the stop is to be shown.
        hides_last = self._finish_code == STOP and not register.include_stop_str_in_output
        shown = token_ids[:-1] if hides_last else token_ids
        if not register.stop:
            self._text += self._stream.push(shown)
            return len(token_ids)
        for count, token_id in enumerate(shown):
            piece = self._stream.push((token_id,))
            if self._num_tokens + count < register.min_position:  # min_tokens: no stop yet, and none begins here
                self._text += piece
                continue
            emitted, matched = self._stops.push(piece)
            self._text += emitted
            if matched is not None:
                self.end = ("stop", matched)
                return count + 1
        return len(token_ids)

    def _end_by_token(self, last: int) -> None:
        if self.register.detokenize:
            tail, matched = self._stops.push(self._stream.flush())
            self._text += tail
            if matched is not None:
                self.end = ("stop", matched)
                return
            self._text += self._stops.flush()
        is_requested = self._finish_code == STOP and last in self.register.requested_stop_token_ids
        self.end = (FINISH_REASON[self._finish_code], last if is_requested else None)
