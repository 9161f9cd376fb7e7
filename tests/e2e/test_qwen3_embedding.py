"""A folder like Qwen3-Embedding's, through a whole group: a decoder that pools by its last token, the end-of-text token
that its tokenizer adds, with an instruction before queries; beside transformers, which pads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import tokenizers
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from procengine import LLM, InvalidRequestError
from procengine.gguf_tokenizer import build_tokenizer
from tests.e2e.test_encoders import write_sentence_transformer
from tests.e2e.tiny_folders import VOCAB_SIZE, build_tiny_model
from tests.tiny_tokenizers import WORDS, byte_level_metadata

_END = "<|endoftext|>"
_TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
TEXTS = ["the cat", "hello world, hello " * 9, "a", "the cat sat on the mat"]
_Side = Literal["left", "right"]
_OPTIONS: dict[str, Any] = {"threads": 1, "max_num_seqs": 8, "dtype": "float32", "kernels": "torch"}


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_model("qwen3").model


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved without a head, as sentence-transformers does; tensors have no `model.` before their names."""
    path = tmp_path_factory.mktemp("qwen3-embedding")
    model.save_pretrained(path)
    tokenizer = build_tokenizer(byte_level_metadata(WORDS), "tiny")
    tokenizer.add_special_tokens([_END])
    tokenizer.post_processor = TemplateProcessing(
        single=f"$A {_END}", pair=f"$A $B {_END}", special_tokens=[(_END, tokenizer.token_to_id(_END))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE
    write_sentence_transformer(
        *(path, "Transformer", "Pooling", "Normalize"),
        pooling={"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "include_prompt": True},
        prompts={"query": _TASK, "document": ""},
        default_prompt_name=None,
        similarity_fn_name="cosine",
    )
    (path / "sentence_bert_config.json").unlink()  # the family has none
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **_OPTIONS) as made:
        yield made


def padded_vectors(model: Any, folder: Path, texts: list[str], side: _Side) -> Tensor:
    """As the family's own example does: pad, mask, take the last token that is none of the padding, normalise."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(direction=side, pad_token=_END, pad_id=tokenizer.token_to_id(_END))
    encoded = tokenizer.encode_batch(texts)
    ids = torch.tensor([one.ids for one in encoded])
    mask = torch.tensor([one.attention_mask for one in encoded])
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))[0]
    last = torch.full((len(texts),), -1) if side == "left" else mask.sum(dim=1) - 1
    return torch.nn.functional.normalize(hidden[torch.arange(len(texts)), last], dim=-1)


def vectors(llm: LLM, texts: list[str], **options: Any) -> Tensor:
    return torch.tensor([one.embedding for one in llm.embed(texts, use_tqdm=False, **options)])


def test_its_files_say_how_it_embeds(llm: LLM, folder: Path) -> None:
    config = llm.config.model
    assert (config.architecture, config.workflows, config.pooling, config.normalize) == (
        "qwen3",
        ("embed", "hidden_states"),
        "last",
        True,
    )
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    (found,) = llm.embed(["the cat"], use_tqdm=False)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert found.prompt_token_ids[-1] == tokenizer.token_to_id(_END)


@pytest.mark.parametrize("side", ["left", "right"])
def test_vectors_are_those_of_padded_batches(
    llm: LLM, model: Any, folder: Path, side: Literal["left", "right"]
) -> None:
    torch.testing.assert_close(vectors(llm, TEXTS), padded_vectors(model, folder, TEXTS, side), atol=1e-5, rtol=0)


def test_an_instruction_goes_before_queries_and_nothing_before_documents(llm: LLM, model: Any, folder: Path) -> None:
    plain = padded_vectors(model, folder, TEXTS, "left")
    instructed = padded_vectors(model, folder, [_TASK + text for text in TEXTS], "left")
    torch.testing.assert_close(vectors(llm, TEXTS, prompt_name="query"), instructed, atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors(llm, TEXTS, prompt_name="document"), plain, atol=1e-5, rtol=0)
    own = "Instruct: Find words that rhyme\nQuery:"
    by_hand = padded_vectors(model, folder, [own + text for text in TEXTS], "left")
    torch.testing.assert_close(vectors(llm, [own + text for text in TEXTS]), by_hand, atol=1e-5, rtol=0)
    with pytest.raises(InvalidRequestError, match=r"prompt_name: 'passage' is not one of .*: document, query"):
        llm.embed("a", prompt_name="passage", use_tqdm=False)


def test_shorter_vectors_have_length_one(llm: LLM, model: Any, folder: Path) -> None:
    short = torch.nn.functional.normalize(padded_vectors(model, folder, TEXTS, "left")[:, :16], dim=-1)
    torch.testing.assert_close(vectors(llm, TEXTS, dimensions=16), short, atol=1e-5, rtol=0)


def test_a_cut_text_still_ends_with_the_token_that_is_pooled(llm: LLM, model: Any, folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(12)
    (found,) = llm.embed([TEXTS[1]], truncate_prompt_tokens=12, use_tqdm=False)
    assert found.prompt_token_ids == tokenizer.encode(TEXTS[1]).ids
    with torch.no_grad():
        last = model(torch.tensor([found.prompt_token_ids]))[0][0, -1]
    expected = torch.nn.functional.normalize(last, dim=-1)
    torch.testing.assert_close(torch.tensor(found.embedding), expected, atol=1e-5, rtol=0)


def test_native_kernels_embed_the_same_in_bfloat16(folder: Path, model: Any) -> None:
    with LLM(str(folder), **_OPTIONS | {"kernels": "native", "dtype": "bfloat16"}) as llm:
        cosines = (vectors(llm, TEXTS) * padded_vectors(model, folder, TEXTS, "right")).sum(dim=1)
    assert float(cosines.min()) >= 0.999


def test_a_model_without_a_head_does_not_generate(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="'generate' is not supported by this model"):
        llm.generate("a", use_tqdm=False)
