"""`MergedDelta`: deltas of one choice that wait for a slow reader, joined into one. Pure.

Owns: the rule by which they are joined, so that whoever reads the one sees what the many would have shown.
"""

from __future__ import annotations

from procengine.messages import Delta, Embedding, TokenLogprobs

__all__ = ["MergedDelta", "wire_bytes"]

_BYTES_PER_ITEM = 64  # names, numbers and markers; an estimate
_BYTES_PER_TOKEN = 5
_BYTES_PER_LOGPROB = 19  # token, logarithm, rank


class MergedDelta:
    """Made from the first one; `add` those that follow it, `take` what they are together."""

    __slots__ = ("_first", "_last", "_logprobs", "_num_cached_tokens", "_texts", "_token_ids", "num_bytes")

    def __init__(self, first: Delta) -> None:
        self._first = self._last = first
        self._texts = [first.text]
        self._token_ids = list(first.token_ids)
        self._logprobs = list(first.logprobs or ())
        self._num_cached_tokens = first.num_cached_tokens
        self.num_bytes = wire_bytes(first)

    @property
    def has_ended(self) -> bool:
        """Whether it is the last one of its choice."""
        return self._last.finish_reason is not None

    def add(self, delta: Delta) -> None:
        """The one that comes next."""
        if delta.token_offset < 0:  # it holds everything so far
            self._texts, self._token_ids, self._logprobs = [], [], []
            self.num_bytes = wire_bytes(self._first) if self._first.prompt_token_ids else 0
        self._last = delta
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs or ()
        if self._num_cached_tokens is None:
            self._num_cached_tokens = delta.num_cached_tokens
        self.num_bytes += wire_bytes(delta)
        if len(self._texts) > _MANY_TEXTS:
            self._texts = ["".join(self._texts)]

    def take(self) -> Delta:
        """All of them in one."""
        first, last = self._first, self._last
        return Delta(
            first.request_id,
            first.index,
            "".join(self._texts),
            self._token_ids,
            last.finish_reason,
            last.stop_reason,
            self._logprobs or None,
            first.prompt_token_ids,
            self._num_cached_tokens,
            last.error,
            first.prompt_logprobs,
            last.times,
            first.token_offset,
            first.text_offset,
            first.key,
        )


_MANY_TEXTS = 64


def wire_bytes(item: Delta | Embedding) -> int:
    """About how many bytes a message takes."""
    count = _BYTES_PER_ITEM + _BYTES_PER_TOKEN * len(item.prompt_token_ids or ())
    if isinstance(item, Embedding):
        return count + len(item.data)
    count += len(item.text.encode()) + _BYTES_PER_TOKEN * len(item.token_ids)
    if item.logprobs is not None:
        count += _logprob_bytes(item.logprobs)
    if item.prompt_logprobs is not None:
        count += _logprob_bytes(item.prompt_logprobs)
    return count


def _logprob_bytes(entries: list[TokenLogprobs] | list[TokenLogprobs | None]) -> int:
    return sum(_BYTES_PER_LOGPROB * len(entry.token_ids) for entry in entries if entry is not None)
