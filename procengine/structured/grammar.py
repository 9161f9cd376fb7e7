"""`Grammar`: where one text stands in its grammar, and which tokens may come next.

Owns: that state. Never does: sample, or know where the mask goes. For one thread at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from procengine.errors import RequestFailedError

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["Grammar"]


class Grammar:
    """The state of one text; made by `GrammarCompiler.compile`, at the start of the text.

    The model's end tokens are allowed exactly where the text so far is complete.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def copy(self) -> Grammar:
        """Another text at the same place, for little of what the compilation took. They share nothing that changes."""
        return Grammar(self._matcher.deep_copy(), self._vocab_size, self._eos_token_ids)

    @property
    def num_mask_words(self) -> int:
        """How many int32 a mask takes: one bit for each token of the tokenizer."""
        return (self._vocab_size + 31) // 32

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete and only an end token can follow, or one was taken."""
        return self._matcher.is_stopped()

    def fill_mask(self, row: NDArray[np.int32]) -> None:
        """Write into `row`, int32 [num_mask_words], contiguous: bit i of word w, from the lowest, allows token 32w + i.

        About 10 us. Raises RequestFailedError when the grammar has become too complex for the limits.
        """
        assert row.dtype == np.int32 and row.shape == (self.num_mask_words,) and row.flags.c_contiguous
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()  # what is in the row after an error allows the end tokens, as if the text were complete

    def consume(self, token_id: int) -> None:
        """Go on by one token. After an end token more of them may come, and change nothing.

        Raises RequestFailedError when the grammar has become too complex, or refuses the token: its mask did not allow
        it, so the request's other rules (bad words, allowed tokens) left the sampler nothing that all of them allow.
        """
        assert token_id >= 0, f"token {token_id} does not exist"
        self._check()
        if token_id in self._eos_token_ids and self._matcher.is_stopped():
            return
        # A padded vocabulary has ids that the tokenizer does not know; the matcher must not see them.
        accepted = token_id < self._vocab_size and self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        if not accepted:
            raise RequestFailedError("structured_outputs: no token is left that the grammar and all other rules allow")

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().split("\n", 1)[0]
            raise RequestFailedError(f"structured_outputs: the grammar became too complex: {reason}")
