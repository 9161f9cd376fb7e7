"""Tokenizer: ids are those of the library, nothing is truncated or padded, and it stays small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from procengine.errors import InvalidRequestError, ModelError
from procengine.tokenizer import Tokenizer
from tests import tiny_tokenizers


@pytest.fixture
def tokenizer() -> Tokenizer:
    return tiny_tokenizers.byte_level()


def test_encode_and_decode(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(" the cat")
    assert ids == tokenizer.backend.encode(" the cat").ids
    assert tokenizer.decode(ids) == " the cat"
    assert tokenizer.encode_batch([" the cat", "", "日本"]) == [ids, [], tokenizer.encode("日本")]
    assert tokenizer.decode([]) == "" and tokenizer.decode([10**6, *ids]) == " the cat"


def test_vocabulary(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_to_id("<|end|>")
    assert end is not None and tokenizer.id_to_token(end) == "<|end|>"
    assert tokenizer.special_token_ids == {end, end + 1}
    assert tokenizer.vocab_size == end + 4  # with the two added ones that are not special
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.id_to_token(tokenizer.vocab_size) is None and tokenizer.id_to_token(-1) is None


def test_special_tokens_are_added_only_when_asked() -> None:
    spm = tiny_tokenizers.sentencepiece()
    assert spm.encode("ab")[0] == 1 and 1 not in spm.encode("ab", add_special_tokens=False)
    assert spm.encode_batch(["ab"], add_special_tokens=False) == [spm.encode("ab", add_special_tokens=False)]


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"[PAD]": 0, "a": 1}, unk_token="[PAD]"))  # no password: a token
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.enable_truncation(4)
    backend.enable_padding(length=6)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"] is not None
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    assert [len(ids) for ids in tokenizer.encode_batch(["a", "a " * 50])] == [1, 50]


@pytest.mark.parametrize("call", ["encode", "encode_batch"])
def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer, call: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"text 0.*surrogate"):
        tokenizer.encode("a\ud83d") if call == "encode" else tokenizer.encode_batch(["a\ud83d"])


def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"nope\.json: there is no such"):
        Tokenizer.load(tmp_path / "nope.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ModelError, match=r"bad\.json: not a tokenizer"):
        Tokenizer.load(tmp_path / "bad.json")


def test_text_modules_import_neither_torch_nor_transformers_nor_numpy() -> None:
    code = (
        "import sys, procengine.tokenizer, procengine.detokenizer, procengine.stop_strings, procengine.chat_template,"
        "procengine.model_source, procengine.hub;"
        "print([name for name in ('torch', 'transformers', 'numpy', 'gguf') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
