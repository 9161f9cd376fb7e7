"""`DeltaCursor`: how far one choice of a request has come at its client, and what of a delta is new. Pure.

Owns: the rule by which deltas that repeat what came before become a stream that does not (docs/PROTOCOL.md).
Never does: know a request, or a group.

An output process that takes the place of a dead one does not know what that one has sent, so it sends everything again.
"""

from __future__ import annotations

import msgspec

from procengine.errors import ProtocolError
from procengine.messages import Delta

__all__ = ["DeltaCursor", "EndCursor"]


class DeltaCursor:
    """One choice. `is_cumulative`: its deltas hold everything so far."""

    __slots__ = ("_is_cumulative", "_num_chars", "_num_tokens", "has_ended")

    def __init__(self, *, is_cumulative: bool = False) -> None:
        self.has_ended = False
        self._is_cumulative = is_cumulative
        self._num_tokens = 0
        self._num_chars = 0

    def take(self, delta: Delta) -> Delta | None:
        """What is new in the next delta; None if nothing is.

        Raises:
            ProtocolError: what comes before it has not come.
        """
        if delta.token_offset != self._num_tokens or delta.text_offset != self._num_chars or self.has_ended:
            return self._take_other(delta)
        self._num_tokens += len(delta.token_ids)
        self._num_chars += len(delta.text)
        if delta.finish_reason is not None:
            self.has_ended = True
        return delta

    def _take_other(self, delta: Delta) -> Delta | None:
        """One that does not begin where the last one ended."""
        if self.has_ended:
            return None
        new = self._take_whole(delta) if delta.token_offset < 0 else self._take_rest(delta)
        if delta.finish_reason is not None:
            self.has_ended = True
        return new

    def _take_whole(self, delta: Delta) -> Delta | None:
        """Each one replaces those before, unless it is older than they are; or a group that does not count sent it."""
        is_new = not self._is_cumulative or len(delta.token_ids) > self._num_tokens or delta.finish_reason is not None
        self._num_tokens = max(self._num_tokens, len(delta.token_ids))
        return delta if is_new else None

    def _take_rest(self, delta: Delta) -> Delta | None:
        num_known_tokens, num_known_chars = self._num_tokens - delta.token_offset, self._num_chars - delta.text_offset
        if num_known_tokens < 0 or num_known_chars < 0:
            raise ProtocolError(
                f"request {delta.request_id!r}, choice {delta.index}: a message begins at token {delta.token_offset}, "
                f"character {delta.text_offset}, but {self._num_tokens} and {self._num_chars} have come"
            )
        has_begun = self._num_tokens > 0
        token_ids, text = delta.token_ids[num_known_tokens:], delta.text[num_known_chars:]
        if not token_ids and not text and delta.finish_reason is None:
            return None
        self._num_tokens += len(token_ids)
        self._num_chars += len(text)
        return msgspec.structs.replace(
            delta,
            text=text,
            token_ids=token_ids,
            logprobs=delta.logprobs[num_known_tokens:] or None if delta.logprobs else None,
            prompt_token_ids=None if has_begun else delta.prompt_token_ids,
            prompt_logprobs=None if has_begun else delta.prompt_logprobs,
            token_offset=delta.token_offset + num_known_tokens,
            text_offset=delta.text_offset + num_known_chars,
        )


class EndCursor(DeltaCursor):
    """One choice, for a client that does not look at all its deltas: it ends once, and that is all there is to know."""

    __slots__ = ()

    def take(self, delta: Delta) -> Delta | None:
        """The next delta, or None behind the end."""
        if self.has_ended:
            return None
        self.has_ended = delta.finish_reason is not None
        return delta
