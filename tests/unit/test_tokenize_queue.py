"""What the queue refuses without tokenizing it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from procengine.chat_template import ChatTemplate
from procengine.errors import InvalidRequestError, ProcengineError
from procengine.profiling.span_ring import SpanArena
from procengine.sampling_params import SamplingParams
from procengine.structured.compiler import GrammarCompiler
from procengine.token_bounds import longest_token_bytes
from procengine.tokenize_queue import TokenizeQueue
from procengine.tokenizer import Tokenizer
from procengine.workflows.embed import EmbedBody
from procengine.workflows.generate import GenerateBody
from procengine.workflows.prompt import Prepared, PromptBody
from tests.tiny_tokenizers import FAMILIES

CONTEXT = 20


class Recording(Tokenizer):
    """Remembers what it was asked to tokenize."""

    def __init__(self, family: str) -> None:
        super().__init__(FAMILIES[family]().backend)
        self.texts: list[str] = []

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        self.texts += texts
        return super().encode_batch(texts, add_special_tokens)


def prepared(tokenizer: Tokenizer, *bodies: PromptBody) -> list[Prepared | ProcengineError]:
    async def run() -> list[Prepared | ProcengineError]:
        loop = asyncio.get_running_loop()
        template = ChatTemplate("{{ messages[0].content }}")
        compiler = GrammarCompiler(tokenizer.backend.to_str(), ())
        queue = TokenizeQueue(loop, tokenizer, template, compiler, 5.0, CONTEXT, SpanArena(None).writer("tokenize"))
        futures: list[asyncio.Future[Prepared | ProcengineError]] = [loop.create_future() for _ in bodies]
        for body, future in zip(bodies, futures, strict=True):
            queue.submit(body, future.set_result)
        try:
            return await asyncio.gather(*futures)
        finally:
            queue.close()

    return asyncio.run(run())


def test_a_text_that_is_certainly_too_long_is_refused_and_the_others_are_not_held_up() -> None:
    tokenizer = Recording("byte_level")
    longest = longest_token_bytes(tokenizer.backend) or 0
    too_long, at_limit = "é" * (CONTEXT * longest), "x" * (CONTEXT * longest)
    message = {"role": "user", "content": too_long}
    results = prepared(
        tokenizer,
        GenerateBody(prompt=too_long),
        GenerateBody(messages=[message]),
        EmbedBody(prompt=too_long),
        GenerateBody(prompt=at_limit),
        GenerateBody(prompt="short"),
    )
    for result, field in zip(results[:3], ["prompt", "messages", "prompt"], strict=True):
        assert isinstance(result, InvalidRequestError)
        assert str(result) == (
            f"{field}: has {2 * CONTEXT * longest} bytes, which are at least {2 * CONTEXT} tokens; "
            f"the context limit (max_model_len) is {CONTEXT}"
        )
    assert all(isinstance(result, Prepared) for result in results[3:])  # `accept` says the rest
    assert sorted(tokenizer.texts) == sorted([at_limit, "short"])


@pytest.mark.parametrize(
    ("word", "forms"),
    [
        ("the", ["the", " the"]),
        ("  the", ["the", " the"]),
        ("\t", ["\t", " \t"]),
        (" ", [" ", "  "]),
        ("日", ["日", " 日"]),
    ],
)
def test_bad_words_are_tokenized_with_and_without_a_space(word: str, forms: list[str]) -> None:
    tokenizer = Recording("byte_level")
    (result,) = prepared(tokenizer, GenerateBody(prompt="x", sampling_params=SamplingParams(bad_words=(word,))))
    assert isinstance(result, Prepared)
    assert result.word_ids == tuple(tuple(tokenizer.encode(form)) for form in forms)


@pytest.mark.parametrize("keep", [-1, 1, 7])
def test_a_long_text_that_is_truncated_is_tokenized(keep: int) -> None:
    tokenizer = Recording("byte_level")
    (result,) = prepared(
        tokenizer, GenerateBody(prompt="x" * 10_000, sampling_params=SamplingParams(truncate_prompt_tokens=keep))
    )
    assert isinstance(result, Prepared) and len(result.token_ids) > CONTEXT


def test_without_a_bound_every_text_is_tokenized() -> None:
    tokenizer = Recording("sentencepiece")
    (result,) = prepared(tokenizer, GenerateBody(prompt="x" * 10_000))
    assert isinstance(result, Prepared)
