"""What the verbs without generation return, and how it is read from a message: scores, labels, rankings.

Owns: these values. Never does: know a socket.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Sequence

import msgspec

from procengine.errors import InvalidRequestError
from procengine.messages import Embedding
from procengine.outputs import RequestMetrics, request_metrics

__all__ = [
    "ClassificationOutput",
    "HiddenStatesOutput",
    "MultiVectorOutput",
    "RerankResult",
    "ScoreOutput",
    "SparseEmbeddingOutput",
    "TextScoreOutput",
    "TokenClassificationOutput",
    "collect_classification",
    "collect_hidden_states",
    "collect_multi",
    "collect_score",
    "collect_sparse",
    "collect_text_score",
    "collect_token_classification",
    "collect_token_scores",
    "numbers_of",
    "perplexity",
    "rank",
    "text_pairs",
]


class ClassificationOutput(msgspec.Struct, frozen=True):
    """The result of one `classify` request: a score for each label of the model, and the label of the best one."""

    request_id: str
    scores: list[float]
    labels: tuple[str, ...]
    label: str
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None


class ScoreOutput(msgspec.Struct, frozen=True):
    """The result of one `score` or `reward` request. Of a model that rewards each token, `score` is the last one's."""

    request_id: str
    score: float
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None
    token_scores: list[float] = []  # of each token, where the model gives them


class TokenClassificationOutput(msgspec.Struct, frozen=True):
    """The result of one `token_classify` request: for each token a score for each label, and its best label."""

    request_id: str
    scores: list[list[float]]
    labels: tuple[str, ...]
    token_labels: list[str]
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None


class TextScoreOutput(msgspec.Struct, frozen=True):
    """The result of one `score_text` request: natural logarithms of how likely each token was, given those before it.
    The first token has none, so they are one fewer than the text has tokens. `perplexity` is
    exp(-logprob / num_tokens), and None for a text of one token."""

    request_id: str
    logprobs: list[float]
    logprob: float  # their sum
    num_tokens: int
    perplexity: float | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None


class HiddenStatesOutput(msgspec.Struct, frozen=True):
    """The result of one `hidden_states` request: float32 numbers as bytes, `hidden_size` of them for each token that
    was asked for; `numpy.frombuffer(data, "<f4").reshape(-1, hidden_size)` is the array."""

    request_id: str
    data: bytes
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None


class SparseEmbeddingOutput(msgspec.Struct, frozen=True):
    """The result of one `embed_sparse` request: how much each token counts, by its id, special tokens left out."""

    request_id: str
    weights: dict[int, float]
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None


class MultiVectorOutput(msgspec.Struct, frozen=True):
    """The result of one `embed_multi` request: a vector of length 1 for each token but the first, as float32 bytes;
    `numpy.frombuffer(data, "<f4").reshape(num_vectors, -1)` is the array, `vectors()` the same as lists."""

    request_id: str
    data: bytes
    num_vectors: int
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None

    def vectors(self) -> list[list[float]]:
        """One for each token but the first."""
        numbers = _floats(self.data)
        width = len(numbers) // max(self.num_vectors, 1)
        return [numbers[at * width : (at + 1) * width] for at in range(self.num_vectors)]


class RerankResult(msgspec.Struct, frozen=True):
    """One document of a ranking."""

    index: int  # among the documents that were given
    score: float
    document: str


def numbers_of(message: Embedding) -> list[float]:
    """Its little-endian float32 numbers."""
    return _floats(message.data)


def collect_classification(
    message: Embedding, labels: tuple[str, ...], delivered_ns: int = 0, arrived_ns: int = 0
) -> ClassificationOutput:
    """What a finished `classify` request brought."""
    scores = numbers_of(message)
    best = max(range(len(scores)), key=scores.__getitem__)
    name = labels[best] if best < len(labels) else f"LABEL_{best}"
    metrics = _metrics(message, delivered_ns, arrived_ns)
    return ClassificationOutput(message.request_id, scores, labels, name, message.prompt_token_ids, metrics)


def collect_score(message: Embedding, delivered_ns: int = 0, arrived_ns: int = 0) -> ScoreOutput:
    """What a finished `score` or `reward` request brought."""
    metrics = _metrics(message, delivered_ns, arrived_ns)
    return ScoreOutput(message.request_id, numbers_of(message)[-1], message.prompt_token_ids, metrics)


def collect_token_scores(message: Embedding, delivered_ns: int = 0, arrived_ns: int = 0) -> ScoreOutput:
    """What a finished `reward` request of a model that rewards tokens brought."""
    output = collect_score(message, delivered_ns, arrived_ns)
    return msgspec.structs.replace(output, token_scores=numbers_of(message))


def collect_token_classification(
    message: Embedding, labels: tuple[str, ...], delivered_ns: int = 0, arrived_ns: int = 0
) -> TokenClassificationOutput:
    """What a finished `token_classify` request brought."""
    numbers, width = numbers_of(message), len(labels)
    scores = [numbers[at : at + width] for at in range(0, len(numbers), width)]
    names = [labels[max(range(width), key=of_token.__getitem__)] for of_token in scores]
    metrics = _metrics(message, delivered_ns, arrived_ns)
    return TokenClassificationOutput(message.request_id, scores, labels, names, message.prompt_token_ids, metrics)


def collect_text_score(message: Embedding, delivered_ns: int = 0, arrived_ns: int = 0) -> TextScoreOutput:
    """What a finished `score_text` request brought."""
    logprobs = numbers_of(message)
    total, count = math.fsum(logprobs), len(logprobs)
    metrics = _metrics(message, delivered_ns, arrived_ns)
    return TextScoreOutput(
        message.request_id, logprobs, total, count, perplexity(total, count), message.prompt_token_ids, metrics
    )


def perplexity(logprob: float, num_tokens: int) -> float | None:
    """Of so many tokens, whose log probabilities sum up to that; infinite where a double cannot hold it."""
    if not num_tokens:
        return None
    try:
        return math.exp(-logprob / num_tokens)
    except OverflowError:
        return math.inf


def collect_hidden_states(message: Embedding, delivered_ns: int = 0, arrived_ns: int = 0) -> HiddenStatesOutput:
    """What a finished `hidden_states` request brought."""
    metrics = _metrics(message, delivered_ns, arrived_ns)
    return HiddenStatesOutput(message.request_id, message.data, message.prompt_token_ids, metrics)


def collect_sparse(message: Embedding, delivered_ns: int = 0, arrived_ns: int = 0) -> SparseEmbeddingOutput:
    """What a finished `embed_sparse` request brought: pairs of a token id and its weight."""
    numbers = numbers_of(message)
    weights = dict(zip(map(int, numbers[::2]), numbers[1::2], strict=True))
    metrics = _metrics(message, delivered_ns, arrived_ns)
    return SparseEmbeddingOutput(message.request_id, weights, message.prompt_token_ids, metrics)


def collect_multi(message: Embedding, delivered_ns: int = 0, arrived_ns: int = 0) -> MultiVectorOutput:
    """What a finished `embed_multi` request brought."""
    token_ids, metrics = message.prompt_token_ids, _metrics(message, delivered_ns, arrived_ns)
    return MultiVectorOutput(message.request_id, message.data, len(token_ids) - 1, token_ids, metrics)


def rank(documents: Sequence[str], scores: Sequence[float], top_n: int | None = None) -> list[RerankResult]:
    """Documents by their scores, the best first; all, or `top_n`."""
    if top_n is not None and top_n < 1:
        raise InvalidRequestError(f"top_n: must be at least 1, got {top_n}")
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    return [RerankResult(index, scores[index], documents[index]) for index in order]


def text_pairs(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """One text with one or many, or as many with as many.

    Raises:
        InvalidRequestError: their numbers do not fit.
    """
    ones = [text_1] if isinstance(text_1, str) else list(text_1)
    others = [text_2] if isinstance(text_2, str) else list(text_2)
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others) or not ones:
        raise InvalidRequestError(
            f"text_2: {len(others)} texts, and {len(ones)} in text_1; must be as many, or one there"
        )
    return list(zip(ones, others, strict=True))


def _floats(data: bytes) -> list[float]:
    values = array("f")
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def _metrics(message: Embedding, delivered_ns: int, arrived_ns: int) -> RequestMetrics | None:
    return None if message.times is None else request_metrics(message.times, delivered_ns, arrived_ns)
