"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`, through the group's `embed` workflow.

Owns: their shapes, and likeness as the cosine of two vectors. Never does: run a cross encoder.
"""

from __future__ import annotations

import base64
from functools import partial
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from procengine.api.exchange import Response
from procengine.api.jobs import WholeJob
from procengine.api.json_body import decode_body, json_bytes
from procengine.api.prompts import MAX_PROMPTS, prompt_bodies
from procengine.api.routes import Call
from procengine.errors import InvalidRequestError
from procengine.messages import Delta, Embedding

__all__ = ["EmbeddingRequest", "RerankRequest", "ScoreRequest", "embed", "rerank", "score"]

Items = list[list[Delta | Embedding]]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields: one text against one or many, or as many against as many."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of Jina's and Cohere's API."""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None


_EMBED: Final = msgspec.json.Decoder(EmbeddingRequest)
_SCORE: Final = msgspec.json.Decoder(ScoreRequest)
_RERANK: Final = msgspec.json.Decoder(RerankRequest)


def embed(call: Call) -> None:
    """`POST /v1/embeddings`: texts as vectors."""
    request = decode_body(_EMBED, call.request.body)
    _check(call, request.model)
    if request.dimensions not in (None, call.service.config.model.hidden_size):
        raise InvalidRequestError(
            f"dimensions: must be {call.service.config.model.hidden_size}, those of the model, got {request.dimensions}"
        )
    bodies = prompt_bodies("input", request.input)
    is_base64 = request.encoding_format == "base64"

    def render(items: Items) -> Response:
        vectors = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(one.data).decode() if is_base64 else _vector(one).tolist(),
            }
            for index, one in enumerate(_embeddings(items))
        ]
        answer = {
            "object": "list",
            "data": vectors,
            "model": call.service.model_names[0],
            "usage": _usage(items),
        }
        return Response(200, json_bytes(answer))

    WholeJob(call.service.link, call.exchange, render).start("embed", bodies, call.traceparent)


def score(call: Call) -> None:
    """`POST /v1/score`: how alike texts are."""
    request = decode_body(_SCORE, call.request.body)
    _check(call, request.model)
    pairs = _pairs(request)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))

    def render(items: Items) -> Response:
        vectors = dict(zip(texts, map(_vector, _embeddings(items)), strict=True))
        scores = [
            {"index": index, "object": "score", "score": _cosine(vectors[one], vectors[other])}
            for index, (one, other) in enumerate(pairs)
        ]
        facts = call.service.answer_facts(f"score-{call.request_id}")
        answer = {"id": facts.answer_id, "object": "list", "created": facts.created_s, "model": facts.model}
        return Response(200, json_bytes({**answer, "data": scores, "usage": _usage(items)}))

    bodies = [body for text in texts for body in prompt_bodies("text_1", text)]
    WholeJob(call.service.link, call.exchange, render).start("embed", bodies, call.traceparent)


def rerank(call: Call) -> None:
    """`POST /v1/rerank`: documents by their likeness to a query."""
    request = decode_body(_RERANK, call.request.body)
    _check(call, request.model)
    documents = [_document(f"documents[{index}]", one) for index, one in enumerate(request.documents)]
    if not 0 < len(documents) < MAX_PROMPTS:
        raise InvalidRequestError(f"documents: must be 1 to {MAX_PROMPTS - 1}, got {len(documents)}")
    if request.top_n is not None and request.top_n < 1:
        raise InvalidRequestError(f"top_n: must be at least 1, got {request.top_n}")
    bodies = prompt_bodies("query", request.query)
    bodies += [body for index, text in enumerate(documents) for body in prompt_bodies(f"documents[{index}]", text)]
    render = partial(_ranking, call, request, documents)
    WholeJob(call.service.link, call.exchange, render).start("embed", bodies, call.traceparent)


def _ranking(call: Call, request: RerankRequest, documents: list[str], items: Items) -> Response:
    query, *vectors = map(_vector, _embeddings(items))
    scores = [_cosine(query, vector) for vector in vectors]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n]
    results = [
        {
            "index": index,
            **({} if request.return_documents is False else {"document": {"text": documents[index]}}),
            "relevance_score": scores[index],
        }
        for index in order
    ]
    answer = {
        "id": f"rerank-{call.request_id}",
        "model": call.service.model_names[0],
        "usage": _usage(items),
        "results": results,
    }
    return Response(200, json_bytes(answer))


def _check(call: Call, model: str | None) -> None:
    call.service.check_model(model)
    call.service.check_workflow("embed")


def _pairs(request: ScoreRequest) -> list[tuple[str, str]]:
    ones = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    others = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if not ones or not others or max(len(ones), len(others)) > MAX_PROMPTS:
        raise InvalidRequestError(f"text_1 and text_2: must hold 1 to {MAX_PROMPTS} texts")
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise InvalidRequestError(
            f"text_2: {len(others)} texts, and {len(ones)} in text_1; must be as many, or one there"
        )
    return list(zip(ones, others, strict=True))


def _document(field: str, document: str | dict[str, Any]) -> str:
    text = document if isinstance(document, str) else document.get("text")
    if not isinstance(text, str) or not text:
        raise InvalidRequestError(f"{field}: must be a text or an object with one, got {document!r}")
    return text


def _embeddings(items: Items) -> list[Embedding]:
    return [one for of_prompt in items for one in of_prompt if isinstance(one, Embedding)]


def _vector(embedding: Embedding) -> NDArray[np.float32]:
    return np.frombuffer(embedding.data, "<f4")


def _cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """0 for a vector without a direction."""
    length = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / length if length else 0.0


def _usage(items: Items) -> dict[str, int]:
    count = sum(len(one.prompt_token_ids) for one in _embeddings(items))
    return {"prompt_tokens": count, "total_tokens": count}
