"""`AsyncPrefillVerbs`: what an asyncio client can ask that generates nothing; see `client_verbs` for what it means.

Owns: those methods. Never does: send or wait; whoever inherits them does.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from procengine.client_bodies import Body, Prompt, prefill_body
from procengine.client_core import Pending
from procengine.messages import Embedding, Welcome
from procengine.outputs import EmbeddingOutput, collect_embedding
from procengine.scores import (
    ClassificationOutput,
    HiddenStatesOutput,
    MultiVectorOutput,
    RerankResult,
    ScoreOutput,
    SparseEmbeddingOutput,
    TextScoreOutput,
    TokenClassificationOutput,
    collect_classification,
    collect_hidden_states,
    collect_multi,
    collect_score,
    collect_sparse,
    collect_text_score,
    collect_token_classification,
    collect_token_scores,
    rank,
    text_pairs,
)

__all__ = ["AsyncPrefillVerbs"]


class AsyncPrefillVerbs(ABC):
    """One prompt a call; cancelling the task aborts the request. Errors are raised as `generate` does."""

    @property
    @abstractmethod
    def welcome(self) -> Welcome:
        """What the group said about itself."""

    @abstractmethod
    async def _run(self, workflow: str, body: Body, request_id: str | None, traceparent: str = "") -> Pending:
        """Submit, and wait for the end."""

    async def embed(
        self,
        prompt: Prompt,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> EmbeddingOutput:
        """The vector of a text or a list of token ids."""
        body = prefill_body(
            prompt,
            timeout_s,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        ended = await self._run("embed", body, None, traceparent)
        return collect_embedding(ended.answer(Embedding), ended.delivered_ns, ended.arrived_ns)

    async def embed_sparse(
        self,
        prompt: Prompt,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> SparseEmbeddingOutput:
        """How much each token of the text counts (bge-m3's lexical weights)."""
        options = {"prompt_name": prompt_name, "truncate_prompt_tokens": truncate_prompt_tokens}
        ended = await self._run("embed_sparse", prefill_body(prompt, timeout_s, **options), None)
        return collect_sparse(ended.answer(Embedding), ended.delivered_ns, ended.arrived_ns)

    async def embed_multi(
        self,
        prompt: Prompt,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> MultiVectorOutput:
        """A vector for each token of the text but the first (ColBERT's)."""
        options = {"prompt_name": prompt_name, "truncate_prompt_tokens": truncate_prompt_tokens}
        ended = await self._run("embed_multi", prefill_body(prompt, timeout_s, **options), None)
        return collect_multi(ended.answer(Embedding), ended.delivered_ns, ended.arrived_ns)

    async def classify(
        self,
        prompt: Prompt,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> ClassificationOutput:
        """The scores of the model's labels; logits without `use_activation`."""
        body = prefill_body(
            prompt, timeout_s, use_activation=use_activation, truncate_prompt_tokens=truncate_prompt_tokens
        )
        ended = await self._run("classify", body, None)
        return collect_classification(
            ended.answer(Embedding), self.welcome.labels, ended.delivered_ns, ended.arrived_ns
        )

    async def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[ScoreOutput]:
        """How well texts go together: one with one or many, or as many with as many."""
        options = {"instruction": instruction, "truncate_prompt_tokens": truncate_prompt_tokens}
        return await asyncio.gather(
            *(
                self._number("score", one, timeout_s, text_pair=other, **options)
                for one, other in text_pairs(text_1, text_2)
            )
        )

    async def rerank(
        self, query: str, documents: Sequence[str], *, top_n: int | None = None, **options: Any
    ) -> list[RerankResult]:
        """Documents by how well they go with a query, the best first; options are those of `score`."""
        scored = await self.score(query, documents, **options)
        return rank(documents, [one.score for one in scored], top_n)

    async def reward(
        self, prompt: Prompt, *, truncate_prompt_tokens: int | None = None, timeout_s: float | None = None
    ) -> ScoreOutput:
        """The number that a reward model gives the text, or each of its tokens."""
        collect = collect_token_scores if "token_classify" in self.welcome.workflows else collect_score
        body = prefill_body(prompt, timeout_s, truncate_prompt_tokens=truncate_prompt_tokens)
        ended = await self._run("reward", body, None)
        return collect(ended.answer(Embedding), ended.delivered_ns, ended.arrived_ns)

    async def token_classify(
        self,
        prompt: Prompt,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> TokenClassificationOutput:
        """The scores of the model's labels for each token; logits without `use_activation`."""
        options = {"use_activation": use_activation, "truncate_prompt_tokens": truncate_prompt_tokens}
        ended = await self._run("token_classify", prefill_body(prompt, timeout_s, **options), None)
        return collect_token_classification(
            ended.answer(Embedding), self.welcome.labels, ended.delivered_ns, ended.arrived_ns
        )

    async def score_text(
        self, prompt: Prompt, *, truncate_prompt_tokens: int | None = None, timeout_s: float | None = None
    ) -> TextScoreOutput:
        """How likely a language model finds the text: log probabilities of its tokens, and its perplexity."""
        body = prefill_body(prompt, timeout_s, truncate_prompt_tokens=truncate_prompt_tokens)
        ended = await self._run("score_text", body, None)
        return collect_text_score(ended.answer(Embedding), ended.delivered_ns, ended.arrived_ns)

    perplexity = score_text

    async def hidden_states(
        self,
        prompt: Prompt,
        *,
        layer: int = -1,
        tokens: Literal["all", "last", "first"] = "all",
        timeout_s: float | None = None,
    ) -> HiddenStatesOutput:
        """What a layer made of the text's tokens."""
        body = prefill_body(prompt, timeout_s, layer=layer, tokens=tokens)
        ended = await self._run("hidden_states", body, None)
        return collect_hidden_states(ended.answer(Embedding), ended.delivered_ns, ended.arrived_ns)

    async def _number(self, workflow: str, prompt: Prompt, timeout_s: float | None, **options: Any) -> ScoreOutput:
        ended = await self._run(workflow, prefill_body(prompt, timeout_s, **options), None)
        return collect_score(ended.answer(Embedding), ended.delivered_ns, ended.arrived_ns)
