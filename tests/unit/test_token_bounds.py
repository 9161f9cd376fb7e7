"""No text has fewer tokens than the bound says; where that could not be promised, there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from procengine.token_bounds import longest_token_bytes, min_num_tokens
from tests.tiny_tokenizers import FAMILIES, WORDS, byte_alphabet, spell

LONG_WORDS = ["aaaa", "é", "日本語", " the", "the the", "\n" * 12, "x" * 33, "<tool>"]
BOUNDED = [family for family in FAMILIES if longest_token_bytes(FAMILIES[family]().backend) is not None]


def test_byte_level_tokenizers_are_bounded_and_the_longest_token_is_what_it_says() -> None:
    assert "byte_level" in BOUNDED and "sentencepiece" not in BOUNDED
    backend = FAMILIES["byte_level"]().backend
    longest = longest_token_bytes(backend)
    words = [word.encode() if isinstance(word, str) else word for word in WORDS]
    assert longest == max(map(len, [*words, b"<|start|>"]))


@pytest.mark.parametrize("family", BOUNDED)
@given(text=st.lists(st.sampled_from([*LONG_WORDS, *map(str, WORDS), "<|end|>", "<ü ok>"]) | st.text()).map("".join))
def test_no_text_has_fewer_tokens(family: str, text: str) -> None:
    backend = FAMILIES[family]().backend
    longest = longest_token_bytes(backend)
    assert longest is not None
    num_bytes = len(text.encode())
    assert len(backend.encode(text, add_special_tokens=False).ids) >= min_num_tokens(num_bytes, longest)


@pytest.mark.parametrize(
    ("num_bytes", "longest", "least"), [(0, 5, 0), (1, 5, 1), (5, 5, 1), (6, 5, 2), (10**9, 1, 10**9)]
)
def test_bound_is_rounded_up(num_bytes: int, longest: int, least: int) -> None:
    assert min_num_tokens(num_bytes, longest) == least


def byte_level() -> tokenizers.Tokenizer:
    vocabulary = {char: index for index, char in enumerate((*byte_alphabet(), spell("ab")))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [(spell("a"), spell("b"))]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def normalize(backend: tokenizers.Tokenizer) -> None:
    backend.normalizer = normalizers.NFC()


def swallow_spaces(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken("<s>", lstrip=True)])


def drop_spaces(backend: tokenizers.Tokenizer) -> None:
    steps = [pre_tokenizers.Split(Regex(r"\s+"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)


def no_bytes(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = pre_tokenizers.Whitespace()


def no_cutting(backend: tokenizers.Tokenizer) -> None:
    backend.pre_tokenizer = None


def lack_a_byte(backend: tokenizers.Tokenizer) -> None:
    backend.model = models.BPE({"a": 0, "b": 1}, [])


def another_model(backend: tokenizers.Tokenizer) -> None:
    backend.model = models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")


CHANGES = [normalize, swallow_spaces, drop_spaces, no_bytes, no_cutting, lack_a_byte, another_model]


def test_the_plain_one_is_bounded_by_its_longest_token() -> None:
    backend = byte_level()
    assert longest_token_bytes(backend) == 2
    backend.add_special_tokens([AddedToken("<日>")])
    assert longest_token_bytes(backend) == 5


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_where_text_may_vanish_there_is_no_bound(change: Callable[[tokenizers.Tokenizer], None]) -> None:
    backend = byte_level()
    change(backend)
    assert longest_token_bytes(backend) is None
