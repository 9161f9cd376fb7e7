"""`SchedulerCounters`: what a planner has done since the last reset."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerCounters"]


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the last reset."""

    num_preemptions: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def add(self, other: SchedulerCounters) -> None:
        """Go on counting where another one stopped."""
        self.num_preemptions += other.num_preemptions
        self.prefix_hit_tokens += other.prefix_hit_tokens
        self.prompt_tokens += other.prompt_tokens
        self.output_tokens += other.output_tokens
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens

    def reset(self) -> None:
        """Count from zero."""
        self.num_preemptions = self.prefix_hit_tokens = self.prompt_tokens = self.output_tokens = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
