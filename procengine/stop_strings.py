"""Cuts a stream of text at the first stop string, and holds back what may yet become one. Pure.

Policy: the match that is complete first in the text wins (smallest end; among those the longest), which is what feeding
one character at a time would find. So the result depends on the text alone, never on how it was cut into deltas.
"""

from __future__ import annotations

from procengine.errors import InvalidRequestError

__all__ = ["StopBuffer"]


class StopBuffer:
    """The state of one stream. Not reusable after a match or `flush`.

    With `include_in_output` the text ends with the matched string, otherwise just before it.
    Raises InvalidRequestError for an empty stop string.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool = False) -> None:
        if "" in stops:
            raise InvalidRequestError("stop: a stop string must not be empty")
        self._stops = stops
        self._include = include_in_output
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take the next piece of text: `(text that may be shown now, stop string that ended the stream or None)`.

        After a match nothing more is shown.
        """
        if not self._stops:
            return text, None
        if self._matched is not None:
            return "", None
        text = self._held + text
        match = self._find(text)
        if match is None:
            keep = len(text) - self._longest_stop_prefix_at_end(text)
            self._held = text[keep:]
            return text[:keep], None
        start, self._matched = match
        self._held = ""
        return text[: start + len(self._matched) if self._include else start], self._matched

    def flush(self) -> str:
        """The end of the stream: the text that was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int, str] | None = None  # (end, start, stop): tuples compare by our policy
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else best[1:]

    def _longest_stop_prefix_at_end(self, text: str) -> int:
        longest = 0
        for stop in self._stops:
            longest = max(longest, _overlap(text, stop, longest))
        return longest


def _overlap(text: str, stop: str, at_least: int) -> int:
    """Length of the longest proper prefix of `stop` that ends `text`, or 0 when it is not above `at_least`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while 0 <= start < len(text) - at_least:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
