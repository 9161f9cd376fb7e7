"""`SchedulerLimits`: what one worker may have running."""

from __future__ import annotations

from dataclasses import dataclass

from procengine.kv_cache.block_groups import BlockGroups

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
    max_mixed_tokens: int | None = None  # of prompts in a step whose decode rows wait for them; None: as of any other
    max_overtaken_tokens: int = 0  # of prompts that come later and go first, see `PromptQueue`; 0: as they came
    num_speculative_tokens: int = 0  # most proposed tokens a row tries in a step; 0 is no speculation
    windows: tuple[int | None, ...] = (None,)  # of each group of layers, see `BlockGroups`

    @property
    def pool_tokens(self) -> int:
        """Most tokens one request can ever have."""
        groups = BlockGroups(self.windows, self.block_size)
        return groups.most_tokens(self.num_blocks, self._num_row_tokens, self.max_model_len)

    @property
    def max_chunk_tokens(self) -> int:
        """Most tokens of one prompt in a step."""
        return self.max_num_batched_tokens if self.enable_chunked_prefill else self.max_model_len

    @property
    def _num_row_tokens(self) -> int:
        """Tokens of a step that cannot be cut: chunks of prompts are as small as they have to be."""
        if not self.enable_chunked_prefill:
            return self.max_model_len
        return max(self.decode_steps, 1 + self.num_speculative_tokens)

    @property
    def _most_beside(self) -> int:
        """Prompt tokens beside rows that decode. Whole prompts do not know `max_mixed_tokens`."""
        if self.max_mixed_tokens is None or not self.enable_chunked_prefill:
            return self.max_num_batched_tokens
        return self.max_mixed_tokens

    @property
    def keeps_mixed_steps_short(self) -> bool:
        """Whether a step holds fewer tokens of prompts because of the rows that decode beside them."""
        return self._most_beside < self.max_num_batched_tokens

    def prompt_tokens_beside(self, num_decode_rows: int) -> int:
        """Most prompt tokens of a step with so many decode rows."""
        left = self.max_num_batched_tokens - num_decode_rows
        return min(left, self._most_beside) if num_decode_rows else left
