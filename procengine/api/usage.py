"""`UsageCounter`: how many tokens a request took. Pure.

Owns: counting each prompt once and each output token once. Never does: know a shape, but for OpenAI's `usage`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from procengine.messages import Delta

__all__ = ["UsageCounter"]


class UsageCounter:
    """Feed it every delta of every prompt."""

    __slots__ = ("_seen_prompts", "num_cached_tokens", "num_output_tokens", "num_prompt_tokens")

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self._seen_prompts: dict[int, int] = {}  # prompt -> most cached tokens of its choices

    def add(self, prompt: int, delta: Delta) -> None:
        """Count one."""
        self.num_output_tokens += len(delta.token_ids)
        if delta.prompt_token_ids is not None and prompt not in self._seen_prompts:
            self._seen_prompts[prompt] = 0
            self.num_prompt_tokens += len(delta.prompt_token_ids)
        # The other choices find the blocks of the first: what was in the cache before is what that one found.
        if delta.num_cached_tokens is not None and delta.index == 0:
            self.num_cached_tokens += delta.num_cached_tokens - self._seen_prompts.get(prompt, 0)
            self._seen_prompts[prompt] = delta.num_cached_tokens

    def add_all(self, prompt: int, deltas: Iterable[Delta]) -> None:
        """Count all of a prompt."""
        for delta in deltas:
            self.add(prompt, delta)

    def openai(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
