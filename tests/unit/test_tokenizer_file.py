"""What is read from a tokenizer.json without the tokenizers library."""

from __future__ import annotations

from pathlib import Path

import pytest

from procengine.errors import ModelError
from procengine.tokenizer_file import added_tokens
from tests.tiny_tokenizers import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_added_tokens_are_those_of_the_library(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    backend = FAMILIES[family]().backend
    backend.save(str(path))
    assert added_tokens(path) == {token.content for token in backend.get_added_tokens_decoder().values()}


@pytest.mark.parametrize("content", [None, b"", b"[]", b'{"added_tokens": [{"id": 1}]}', b'{"added_tokens": ["x"]}'])
def test_what_is_no_tokenizer_is_a_model_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer\.json"):
        added_tokens(path)
