"""`Choice`: all that came of one choice, for answers that are sent whole. Pure.

Owns: putting messages of the group together. Their output kind is "final", so there is one a choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from procengine.messages import Delta, Embedding, TokenLogprobs
from procengine.tool_calls.calls import ToolCall
from procengine.tool_calls.registry import parse

__all__ = ["Choice", "choices_of", "prompt_ids_of", "prompt_logprobs_of"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice, whole."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None

    def with_calls(self, style: str | None, seed: str, parallel: bool | None) -> tuple[str, list[ToolCall], str | None]:
        """Its text without calls, its calls, and why it ended."""
        if style is None:
            return self.text, [], self.finish_reason
        content, calls = parse(style, self.text, f"{seed}:{self.index}")
        if parallel is False:
            calls = calls[:1]
        return content, calls, "tool_calls" if calls and self.finish_reason == "stop" else self.finish_reason


def choices_of(items: Sequence[Delta | Embedding]) -> list[Choice]:
    """The choices of one prompt, in order."""
    deltas_by_index: dict[int, list[Delta]] = {}
    for delta in _deltas(items):
        deltas_by_index.setdefault(delta.index, []).append(delta)
    return [_joined(index, deltas) for index, deltas in sorted(deltas_by_index.items())]


def prompt_ids_of(items: Sequence[Delta | Embedding]) -> list[int]:
    """The tokens of the prompt."""
    return next((one.prompt_token_ids for one in items if one.prompt_token_ids is not None), [])


def prompt_logprobs_of(items: Sequence[Delta | Embedding]) -> list[TokenLogprobs | None] | None:
    """Those of the prompt, where they were asked for."""
    return next((delta.prompt_logprobs for delta in _deltas(items) if delta.prompt_logprobs is not None), None)


def _deltas(items: Sequence[Delta | Embedding]) -> list[Delta]:
    return [item for item in items if isinstance(item, Delta)]


def _joined(index: int, deltas: Sequence[Delta]) -> Choice:
    logprobs: list[Any] = [at for delta in deltas for at in delta.logprobs or ()]
    return Choice(
        index=index,
        text="".join([delta.text for delta in deltas]),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        finish_reason=deltas[-1].finish_reason,
        stop_reason=deltas[-1].stop_reason,
        logprobs=logprobs or None,
    )
