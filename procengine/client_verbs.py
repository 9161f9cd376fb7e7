"""`PrefillVerbs`: what a blocking client can ask that generates nothing: embed, classify, score, rerank and the like.

Owns: those methods. Never does: send or wait; whoever inherits them does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, overload

from procengine.client_bodies import Body, Prompt, Prompts, prefill_body, prompt_list
from procengine.client_core import Pending
from procengine.errors import InvalidRequestError
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
    numbers_of,
    rank,
    text_pairs,
)

__all__ = ["PrefillVerbs"]


class PrefillVerbs(ABC):
    """Of all: `truncate_prompt_tokens` keeps the first so many tokens of a text (-1: as many as the group takes; None:
    what is too long is an error); results come in the order of the prompts; errors are raised as `generate` does."""

    @property
    @abstractmethod
    def welcome(self) -> Welcome:
        """What the group said about itself."""

    @abstractmethod
    def _run_all(
        self,
        workflow: str,
        bodies: Sequence[Body],
        request_ids: Sequence[str | None] | None,
        on_end: Callable[[], object] | None,
        traceparent: str = "",
    ) -> list[Pending]:
        """Submit all, wait for all."""

    @overload
    def embed(
        self,
        prompt: Prompt,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> EmbeddingOutput: ...

    @overload
    def embed(
        self,
        prompt: list[str] | list[list[int]] | list[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> list[EmbeddingOutput]: ...

    def embed(
        self,
        prompt: Prompts,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
        traceparent: str = "",
    ) -> EmbeddingOutput | list[EmbeddingOutput]:
        """The vector of a text or of token ids; for a list of prompts, a list of vectors.

        `dimensions` keeps the first so many numbers; `prompt_name` says which of the model's prompts goes before.
        """
        prompts, is_list = prompt_list(prompt)
        bodies = [
            prefill_body(
                one,
                timeout_s,
                dimensions=dimensions,
                prompt_name=prompt_name,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )
            for one in prompts
        ]
        results = self.embed_bodies(bodies, traceparent=traceparent)
        return results if is_list else results[0]

    def embed_sparse(
        self,
        prompts: Prompts,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[SparseEmbeddingOutput]:
        """How much each token of a text counts (bge-m3's lexical weights)."""
        each, _ = prompt_list(prompts)
        options = {"prompt_name": prompt_name, "truncate_prompt_tokens": truncate_prompt_tokens}
        ended = self._run_all("embed_sparse", [prefill_body(one, timeout_s, **options) for one in each], None, None)
        return [collect_sparse(one.answer(Embedding), one.delivered_ns, one.arrived_ns) for one in ended]

    def embed_multi(
        self,
        prompts: Prompts,
        *,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[MultiVectorOutput]:
        """A vector for each token of a text but the first (ColBERT's)."""
        each, _ = prompt_list(prompts)
        options = {"prompt_name": prompt_name, "truncate_prompt_tokens": truncate_prompt_tokens}
        ended = self._run_all("embed_multi", [prefill_body(one, timeout_s, **options) for one in each], None, None)
        return [collect_multi(one.answer(Embedding), one.delivered_ns, one.arrived_ns) for one in ended]

    def classify(
        self,
        prompts: Prompts,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[ClassificationOutput]:
        """The scores of a model's labels; logits without `use_activation`."""
        each, _ = prompt_list(prompts)
        bodies = [
            prefill_body(one, timeout_s, use_activation=use_activation, truncate_prompt_tokens=truncate_prompt_tokens)
            for one in each
        ]
        ended = self._run_all("classify", bodies, None, None)
        labels = self.welcome.labels
        return [
            collect_classification(one.answer(Embedding), labels, one.delivered_ns, one.arrived_ns) for one in ended
        ]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[ScoreOutput]:
        """How well texts go together, by a cross encoder: one with one or many, or as many with as many. A language
        model that reranks may be told by an `instruction` what counts."""
        options = {"instruction": instruction, "truncate_prompt_tokens": truncate_prompt_tokens}
        bodies = [prefill_body(one, timeout_s, text_pair=other, **options) for one, other in text_pairs(text_1, text_2)]
        ended = self._run_all("score", bodies, None, None)
        return [collect_score(one.answer(Embedding), one.delivered_ns, one.arrived_ns) for one in ended]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[RerankResult]:
        """Documents by how well they go with a query, the best first: by the model where it scores pairs, else by the
        cosine of vectors. `instruction` is that of `score`."""
        if not documents:
            raise InvalidRequestError("documents: must not be empty")
        if "score" in self.welcome.workflows:
            scored = self.score(
                query,
                documents,
                instruction=instruction,
                truncate_prompt_tokens=truncate_prompt_tokens,
                timeout_s=timeout_s,
            )
            return rank(documents, [one.score for one in scored], top_n)
        if instruction is not None:
            raise InvalidRequestError("instruction: this model compares vectors, and takes none")
        vectors = self.embed([query, *documents], truncate_prompt_tokens=truncate_prompt_tokens, timeout_s=timeout_s)
        first, *others = (one.embedding for one in vectors)
        return rank(documents, [_cosine(first, other) for other in others], top_n)

    def reward(
        self, prompts: Prompts, *, truncate_prompt_tokens: int | None = None, timeout_s: float | None = None
    ) -> list[ScoreOutput]:
        """The number that a reward model gives each text, or each of its tokens."""
        each, _ = prompt_list(prompts)
        bodies = [prefill_body(one, timeout_s, truncate_prompt_tokens=truncate_prompt_tokens) for one in each]
        collect = collect_token_scores if "token_classify" in self.welcome.workflows else collect_score
        ended = self._run_all("reward", bodies, None, None)
        return [collect(one.answer(Embedding), one.delivered_ns, one.arrived_ns) for one in ended]

    def token_classify(
        self,
        prompts: Prompts,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> list[TokenClassificationOutput]:
        """The scores of a model's labels for each token; logits without `use_activation`."""
        each, _ = prompt_list(prompts)
        options = {"use_activation": use_activation, "truncate_prompt_tokens": truncate_prompt_tokens}
        ended = self._run_all("token_classify", [prefill_body(one, timeout_s, **options) for one in each], None, None)
        labels = self.welcome.labels
        return [
            collect_token_classification(one.answer(Embedding), labels, one.delivered_ns, one.arrived_ns)
            for one in ended
        ]

    def score_text(
        self, prompts: Prompts, *, truncate_prompt_tokens: int | None = None, timeout_s: float | None = None
    ) -> list[TextScoreOutput]:
        """How likely a language model finds each text: log probabilities of its tokens, and its perplexity."""
        each, _ = prompt_list(prompts)
        bodies = [prefill_body(one, timeout_s, truncate_prompt_tokens=truncate_prompt_tokens) for one in each]
        ended = self._run_all("score_text", bodies, None, None)
        return [collect_text_score(one.answer(Embedding), one.delivered_ns, one.arrived_ns) for one in ended]

    perplexity = score_text

    def hidden_states(
        self,
        prompts: Prompts,
        *,
        layer: int = -1,
        tokens: Literal["all", "last", "first"] = "all",
        timeout_s: float | None = None,
    ) -> list[HiddenStatesOutput]:
        """What a layer made of each text's tokens: 0 is what goes into the first layer, -1 what the model gives."""
        each, _ = prompt_list(prompts)
        bodies = [prefill_body(one, timeout_s, layer=layer, tokens=tokens) for one in each]
        ended = self._run_all("hidden_states", bodies, None, None)
        return [collect_hidden_states(one.answer(Embedding), one.delivered_ns, one.arrived_ns) for one in ended]

    def ask(self, workflow: str, bodies: Sequence[Body]) -> list[list[float]]:
        """The numbers that a workflow gives for each body: of one that a package of your own brings, say."""
        return [numbers_of(one.answer(Embedding)) for one in self._run_all(workflow, bodies, None, None)]

    def embed_bodies(
        self, bodies: Sequence[Body], on_end: Callable[[], object] | None = None, traceparent: str = ""
    ) -> list[EmbeddingOutput]:
        """Run bodies of `embed` requests together; results in their order."""
        ended = self._run_all("embed", bodies, None, on_end, traceparent)
        return [collect_embedding(one.answer(Embedding), one.delivered_ns, one.arrived_ns) for one in ended]


def _cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """0 for a vector without a direction."""
    dot = sum(a * b for a, b in zip(one, other, strict=True))
    length = (sum(a * a for a in one) * sum(b * b for b in other)) ** 0.5
    return dot / length if length else 0.0
