"""Random texts under a grammar: what a model of no opinion would say."""

from __future__ import annotations

import random

import numpy as np

from procengine.structured.grammar import Grammar
from procengine.tokenizer import Tokenizer

__all__ = ["allowed_tokens", "walk"]

# Once a text is long enough: what brings it to its end, best first; and what gets patterns there that need more.
_CLOSERS = '"}],:'
_FILLERS = "0a@."


def allowed_tokens(grammar: Grammar) -> list[int]:
    """Ids that the mask allows, ascending."""
    row = np.full(grammar.num_mask_words, 0x55555555, np.int32)  # what was there before must not shine through
    grammar.fill_mask(row)
    return [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


def walk(grammar: Grammar, tokenizer: Tokenizer, eos_token_ids: set[int], seed: int, length: int = 40) -> str:
    """A text that ends with an end token: random for `length` tokens, then as short as may be."""
    draw = random.Random(seed)
    closers, fillers = _ids_of(tokenizer, _CLOSERS), _ids_of(tokenizer, _FILLERS)
    ids: list[int] = []
    while True:
        allowed = allowed_tokens(grammar)
        assert allowed, "a text that can neither go on nor end"
        token_id = draw.choice(allowed)
        if len(ids) >= length:
            ends = [i for i in (*sorted(eos_token_ids), *closers) if i in allowed]
            on_the_way = [i for i in fillers if i in allowed]
            token_id = draw.choice([ends[:1], on_the_way, []][draw.randrange(3)] or ends[:1] or allowed)
        grammar.consume(token_id)
        if token_id in eos_token_ids:
            assert grammar.is_finished
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(token_id)
        assert len(ids) < 50 * length


def _ids_of(tokenizer: Tokenizer, chars: str) -> list[int]:
    """The tokens that are one of `chars`, in their order, as bytes or spelt out."""
    spellings = [spelling for char in chars for spelling in (char, f"<0x{ord(char):02X}>")]
    return [token_id for spelling in spellings if (token_id := tokenizer.token_to_id(spelling)) is not None]
