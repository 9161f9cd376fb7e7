"""Tokenizers built from GGUF metadata: text splits, special tokens, SentencePiece scores."""

from __future__ import annotations

import io
import logging
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from procengine.errors import ModelError
from procengine.gguf_file import GGUFFile
from procengine.gguf_tokenizer import SUPPORTED_PRE_TOKENIZERS, build_tokenizer, end_token_ids, token_text
from procengine.tokenizer import Tokenizer
from tests import tiny_tokenizers

# Another engine than the tokenizers library has; installed along with transformers.
regex: Any = pytest.importorskip("regex")

# The regexes of the models' own tokenizer.json files.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@cache
def split_by(pre: str | None) -> tokenizers.Tokenizer:
    return build_tokenizer(tiny_tokenizers.byte_level_metadata(tiny_tokenizers.WORDS, pre=pre), "tiny")


def pieces(pre: str | None, text: str) -> list[str]:
    """How the pre-tokenizer cuts `text`, with bytes spelt back as text."""
    tokenizer = split_by(pre)
    byte_of = {char: byte for byte, char in enumerate(tiny_tokenizers.byte_alphabet())}
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.pre_tokenizer is not None
    cut = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(byte_of[char] for char in piece).decode() for piece, _ in cut]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("smollm", "a  3", ["a", "  ", "3"]),
        ("smollm", "x =    42", ["x", " =", "    ", "4", "2"]),
        ("smollm", "\n\n1. one", ["\n\n", "1", ".", " one"]),
        ("smollm", "if x:\n    1", ["if", " x", ":", "\n    ", "1"]),
        ("smollm", "½ ² ٣٤", ["½", " ", "²", " ", "٣", "٤"]),
        ("smollm", "2024 and 1999", ["2", "0", "2", "4", " and", " ", "1", "9", "9", "9"]),
        ("gpt-2", "a  3", ["a", " ", " 3"]),
        ("gpt2", "x =    42", ["x", " =", "   ", " 42"]),
        (
            "llama-bpe",
            "I'LL pay 12345 ok\r\n\r\n  x",
            ["I", "'LL", " pay", " ", "123", "45", " ok", "\r\n\r\n", " ", " x"],
        ),
        ("qwen2", "I'll pay 123", ["I", "'ll", " pay", " ", "1", "2", "3"]),
        ("tekken", "HelloWorld/1", ["Hello", "World", "/", "1"]),
        ("gpt-4o", "It's HelloWorld's 1234", ["It's", " Hello", "World's", " ", "123", "4"]),
        ("falcon", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("default", "a, 1234", ["a", ",", " ", "123", "4"]),
        ("deepseek-v3", "日本go 1234", ["日本", "go", " ", "123", "4"]),
    ],
)
def test_lod_04_text_is_split_as_the_pre_tokenizer_says(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(pre, text) == expected


MIXED = st.text("aZé日ُ٣½12 \t\n\r'/.,!sStT\u00a0\u2028ǅ👩\u200d", max_size=24)


@given(MIXED)
@pytest.mark.parametrize(
    ("pre", "pattern"), [("llama3", LLAMA3), ("tekken", TEKKEN), ("gpt-2", GPT2), ("qwen2", QWEN2)]
)
def test_split_equals_the_published_regex(pre: str, pattern: str, text: str) -> None:
    assert pieces(pre, text) == regex.findall(pattern, text)


@given(MIXED)
def test_smollm_split_is_digits_then_gpt2(text: str) -> None:
    fragments = [part for part in regex.split(r"(\p{N})", text) if part]
    assert pieces("smollm", text) == [piece for part in fragments for piece in regex.findall(GPT2, part)]


@pytest.mark.parametrize("pre", SUPPORTED_PRE_TOKENIZERS)
@settings(max_examples=10)
@given(text=MIXED)
def test_no_split_loses_text(pre: str, text: str) -> None:
    tokenizer = split_by(pre)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_qwen2_composes_characters() -> None:
    assert pieces("qwen2", "e\u0301") == ["é"]
    assert pieces("llama3", "e\u0301") == ["e", "\u0301"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pre": "smollm3000"}, "smollm3000.*supported"),
        ({"model": "rwkv"}, "rwkv.*supported"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"tokens": None}, "tokens is missing"),
        ({"merges": None}, "merges is missing"),
        ({"merges": [1, 2]}, "merges is not an array of strings"),
        ({"tokens": 7}, "tokens is not an array of strings"),
        ({"tokens": []}, "tokens is empty"),
        ({"merges": ["a b", "a qq"]}, r"merges\[0\] = 'a b'"),
        ({"merges": ["ab"]}, r"merges\[0\]"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"add_bos_token": True, "bos_token_id": 10**6}, "bos_token_id is 1000000"),
        ({"tokens": ["a", "b", "a"], "merges": [], "token_type": [1, 1, 1]}, "'a'.*twice"),
    ],
)
def test_what_cannot_be_built_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"tiny: .*{message}"):
        build_tokenizer(tiny_tokenizers.byte_level_metadata(**change), "tiny")


def test_missing_pre_tokenizer_warns_and_means_default(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        split_by.cache_clear()
        assert pieces(None, "a, 1234") == pieces("default", "a, 1234")
    assert "tokenizer.ggml.pre is missing" in caplog.text


def test_special_and_user_defined_tokens() -> None:
    tokenizer = tiny_tokenizers.byte_level()
    end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool>")
    assert end is not None and tool is not None
    assert end in tokenizer.special_token_ids and tool not in tokenizer.special_token_ids
    ids = tokenizer.encode("cat<|end|><tool><ü ok>")
    assert ids[-3:-1] == [end, tool]
    assert tokenizer.decode(ids) == "cat<tool><ü ok>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "cat<|end|><tool><ü ok>"


@pytest.mark.parametrize(
    ("pre", "keys", "prefix", "suffix"),
    [
        ("smollm", {}, [], []),
        ("smollm", {"add_bos_token": False}, [], []),
        ("smollm", {"add_bos_token": True}, ["<|start|>"], []),
        ("smollm", {"add_eos_token": True}, [], ["<|end|>"]),
        ("smollm", {"add_bos_token": True, "add_eos_token": True}, ["<|start|>"], ["<|end|>"]),
        ("llama-bpe", {}, ["<|start|>"], []),
        ("tekken", {"add_bos_token": False}, [], []),
    ],
)
def test_bos_and_eos_as_the_metadata_says(pre: str, keys: dict[str, Any], prefix: list[str], suffix: list[str]) -> None:
    backend = build_tokenizer(tiny_tokenizers.byte_level_metadata(["cat"], pre=pre, **keys), "tiny")
    assert backend.encode("cat").tokens == [*prefix, "cat", *suffix]
    assert backend.encode("cat", add_special_tokens=False).tokens == ["cat"]
    assert backend.encode("cat", "cat").tokens == [*prefix, "cat", *suffix] * 2


def test_bos_spelt_with_spaces_and_colons() -> None:
    metadata = tiny_tokenizers.byte_level_metadata(add_bos_token=True)
    metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.bos_token_id"]] = "<a: b $A>"
    assert build_tokenizer(metadata, "tiny").encode("x").tokens == ["<a: b $A>", "x"]


def test_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    for backend in (tiny_tokenizers.byte_level().backend, tiny_tokenizers.sentencepiece().backend):
        backend.save(str(tmp_path / "tokenizer.json"))
        loaded = Tokenizer.load(tmp_path / "tokenizer.json")
        text = " the 日本<|end|> ab\n\n👩"
        assert loaded.encode(text) == backend.encode(text).ids
        assert loaded.decode(loaded.encode(text)) == backend.decode(backend.encode(text).ids)


def test_end_token_ids() -> None:
    metadata = tiny_tokenizers.byte_level_metadata()
    eos = metadata["tokenizer.ggml.eos_token_id"]
    assert end_token_ids(metadata) == (eos,)  # named <|end|>, but listed once
    metadata["tokenizer.ggml.tokens"][eos + 1] = "<|eot_id|>"
    assert end_token_ids(metadata) == (eos, eos + 1)  # by name
    metadata["tokenizer.ggml.eot_token_id"] = 5
    assert end_token_ids(metadata) == (eos, 5)  # the file's word goes before a name
    assert token_text(metadata, eos) == "<|end|>"
    assert token_text(metadata, None) == token_text(metadata, -1) == token_text(metadata, 10**6) == ""


def sentencepiece_oracle(metadata: dict[str, Any], text: str, prefix: bool) -> list[str]:
    """SentencePiece's BPE, literally: join the neighbours whose union scores best, leftmost first; then bytes."""
    scores = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list(("▁" if prefix and text else "") + text.replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    spelt = [[s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [token for tokens in spelt for token in tokens]


@cache
def scored(prefix: bool) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    metadata = tiny_tokenizers.sentencepiece_metadata(tiny_tokenizers.PIECES, add_space_prefix=prefix)
    return build_tokenizer(metadata, "tiny"), metadata


@pytest.mark.parametrize("prefix", [True, False])
@given(text=st.text("abthe 日é\nz👩", max_size=20))
def test_sentencepiece_scores_pick_what_sentencepiece_picks(prefix: bool, text: str) -> None:
    backend, metadata = scored(prefix)
    assert backend.encode(text, add_special_tokens=False).tokens == sentencepiece_oracle(metadata, text, prefix)
    assert backend.decode(backend.encode(text).ids) == text


CORPUS = [
    "the cat sat on the mat",
    "the other cat  ate the hat",
    "日本 日本語 é",
    "x = y + 1;\n    return x",
    "tttt aaaa",
] * 4


@pytest.fixture(scope="module")
def trained() -> tuple[Any, tokenizers.Tokenizer]:
    """A model of the sentencepiece library itself, and ours built from its pieces and scores as a GGUF holds them."""
    sentencepiece = pytest.importorskip("sentencepiece")
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=model, model_type="bpe", vocab_size=340, byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(oracle.get_piece_size())
    kinds = {oracle.is_unknown: 2, oracle.is_control: 3, oracle.is_byte: 6}
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [oracle.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [oracle.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((kind for is_kind, kind in kinds.items() if is_kind(i)), 1) for i in ids],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return oracle, build_tokenizer(metadata, "trained")


@given(
    text=st.text("thecaosmr 日本語éx=y+1;\n👩z", max_size=24)
    | st.lists(st.sampled_from(CORPUS), max_size=3).map(" ".join)
)
def test_equals_the_sentencepiece_library(trained: tuple[Any, tokenizers.Tokenizer], text: str) -> None:
    oracle, ours = trained
    assert ours.encode(text, add_special_tokens=False).ids == oracle.encode(text)


def test_sentencepiece_adds_bos_by_default() -> None:
    assert tiny_tokenizers.sentencepiece().backend.encode("ab").tokens == ["<s>", "▁", "ab"]  # ab scores better than ▁a


@pytest.mark.parametrize(("key", "message"), [("scores", "scores is missing"), ("tokens", "byte tokens")])
def test_incomplete_sentencepiece_is_refused(key: str, message: str) -> None:
    metadata = tiny_tokenizers.sentencepiece_metadata(tiny_tokenizers.PIECES)
    if key == "scores":
        del metadata["tokenizer.ggml.scores"]
    else:
        metadata["tokenizer.ggml.tokens"][3] = "zero"
    with pytest.raises(ModelError, match=message):
        build_tokenizer(metadata, "tiny")


@pytest.mark.model
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("a  3", "a|ĠĠ|3"),
        ("x =    42", "x|Ġ=|ĠĠĠĠ|4|2"),
        ("\n\n1. one", "ĊĊ|1|.|Ġone"),
        ("if x:\n    1", "if|Ġx|:|ĊĠĠĠĠ|1"),
        ("½ ² ٣٤", "Â½|Ġ|Â²|Ġ|Ù|£|Ù|¤"),
        ("2024 and 1999", "2|0|2|4|Ġand|Ġ|1|9|9|9"),
    ],
)
def test_lod_04_on_the_real_file(smollm2_gguf: Path, text: str, tokens: str) -> None:
    backend = build_tokenizer(GGUFFile(smollm2_gguf).metadata, str(smollm2_gguf))
    assert backend.encode(text).tokens == tokens.split("|")
    assert backend.decode(backend.encode(text).ids) == text
