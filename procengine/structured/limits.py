"""What a grammar may cost: llguidance's own limits, and one that it does not have.

Owns: the numbers. Never does: compile.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from procengine.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLParserLimits

__all__ = ["check_multiples", "multiples_in_grammar", "multiples_in_schema", "parser_limits"]

# An automaton for multiples of n has n states (fewer for factors 2 and 5, which the last digits tell), and llguidance
# builds it before its own limits apply: 50 ms for this many, 25 s for a hundred times as many.
_MAX_MULTIPLE = 10_000
_NUMBER_AFTER_MULTIPLE_OF = re.compile(r'"multipleOf"\s*:\s*(\d[\d.eE+-]*)')
_ASCII_ESCAPE = re.compile(r"\\u00([0-7][0-9a-fA-F])")


def parser_limits() -> LLParserLimits:
    """llguidance's defaults but for two: states, at 1-2 kB each, and symbols, of which a mask may visit all.

    What they leave: at worst 40-60 ms for one mask, before the grammar is given up.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=25_000,
        max_grammar_size=20_000,
        verbose_errors=False,
    )


def check_multiples(field: str, multiples: Iterable[int | float | str]) -> None:
    """Raise InvalidRequestError, naming `field`, when numbers to be multiples of together need too large an automaton.

    All are taken together, since a schema can demand several of one number.
    """
    together = 1
    for multiple in multiples:
        try:
            digits = Decimal(str(multiple)).as_tuple().digits
        except ArithmeticError:
            continue  # not a number, which llguidance will say
        together = math.lcm(together, _without_2_and_5(int("".join(map(str, digits)))))
        if together > _MAX_MULTIPLE:
            raise InvalidRequestError(f"{field}: multipleOf {multiple} needs an automaton of more than {_MAX_MULTIPLE}")


def multiples_in_schema(schema: Any) -> Iterator[int | float]:
    """The numbers of all `multipleOf` in a JSON schema."""
    open_values = [schema]
    while open_values:
        value = open_values.pop()
        if isinstance(value, dict):
            multiple = value.get("multipleOf")
            if isinstance(multiple, int | float):
                yield multiple
            open_values.extend(value.values())
        elif isinstance(value, list | tuple):
            open_values.extend(value)


def multiples_in_grammar(grammar: str) -> list[str]:
    """The same for the schemas that a Lark grammar may hold (`%json {...}`)."""
    plain = _ASCII_ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), grammar)
    return _NUMBER_AFTER_MULTIPLE_OF.findall(plain)


def _without_2_and_5(number: int) -> int:
    for factor in (2, 5):
        while number and number % factor == 0:
            number //= factor
    return number or 1
