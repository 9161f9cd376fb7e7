"""`SchedulerLimits`: what one worker may have running."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerLimits"]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one worker may have running."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    is_priority_policy: bool = False
    decode_steps: int = 1
    max_mixed_tokens: int | None = None  # of a step whose decode rows wait for its prompts; None: as of any other
    num_speculative_tokens: int = 0  # most proposed tokens a row tries in a step; 0 is no speculation

    @property
    def pool_tokens(self) -> int:
        """Most tokens one request can ever hold."""
        return self.num_blocks * self.block_size

    def prompt_tokens_beside(self, num_decode_rows: int) -> int:
        """Most prompt tokens of a step with so many decode rows. However many they are, they leave half of
        `max_mixed_tokens` to prompts, or new requests would wait for old ones to end. Whole prompts know no such limit.
        """
        left = self.max_num_batched_tokens - num_decode_rows
        if not num_decode_rows or self.max_mixed_tokens is None or not self.enable_chunked_prefill:
            return left
        return min(left, max(self.max_mixed_tokens - num_decode_rows, self.max_mixed_tokens // 2))
