"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`.

Owns: their shapes. Texts are scored by the model where it is a cross encoder (the `score` workflow), else by the cosine
of their vectors (`embed`), which is worked out here. Never does: compute anything else.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
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
from procengine.client_bodies import Body
from procengine.errors import InvalidRequestError
from procengine.messages import Delta, Embedding

__all__ = [
    "EmbeddingRequest",
    "Items",
    "RerankRequest",
    "ScoreRequest",
    "add_options",
    "embed",
    "embeddings",
    "rerank",
    "score",
    "usage",
    "vector",
]

Items = list[list[Delta | Embedding]]


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    prompt_name: str | None = None  # beyond OpenAI's: one of the model's own prompts
    truncate_prompt_tokens: int | None = None  # vLLM's
    user: str | None = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields: one text against one or many, or as many against as many."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    instruction: str | None = None  # beyond vLLM's: for language models that rerank
    truncate_prompt_tokens: int | None = None


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of Jina's and Cohere's API."""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    instruction: str | None = None  # beyond theirs: for language models that rerank
    truncate_prompt_tokens: int | None = None


_EMBED: Final = msgspec.json.Decoder(EmbeddingRequest)
_SCORE: Final = msgspec.json.Decoder(ScoreRequest)
_RERANK: Final = msgspec.json.Decoder(RerankRequest)


def embed(call: Call) -> None:
    """`POST /v1/embeddings`: texts as vectors."""
    request = decode_body(_EMBED, call.request.body)
    _check(call, request.model)
    bodies = prompt_bodies("input", request.input)
    add_options(
        bodies,
        dimensions=request.dimensions,
        prompt_name=request.prompt_name,
        truncate_prompt_tokens=request.truncate_prompt_tokens,
    )
    is_base64 = request.encoding_format == "base64"

    def render(items: Items) -> Response:
        vectors = [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(one.data).decode() if is_base64 else vector(one).tolist(),
            }
            for index, one in enumerate(embeddings(items))
        ]
        answer = {
            "object": "list",
            "data": vectors,
            "model": call.service.model_names[0],
            "usage": usage(items),
        }
        return Response(200, json_bytes(answer))

    WholeJob(call.service.link, call.exchange, render).start("embed", bodies, call.traceparent)


def score(call: Call) -> None:
    """`POST /v1/score`: how alike texts are."""
    request = decode_body(_SCORE, call.request.body)
    _check(call, request.model)
    pairs = _pairs(request)
    if _is_cross_encoder(call):
        _start_scoring(call, request, pairs, partial(_scored_pairs, call))
        return
    _refuse_instruction(request)
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))

    def render(items: Items) -> Response:
        vectors = dict(zip(texts, map(vector, embeddings(items)), strict=True))
        return _scores(call, [_cosine(vectors[one], vectors[other]) for one, other in pairs], items)

    bodies = [body for text in texts for body in prompt_bodies("text_1", text)]
    add_options(bodies, truncate_prompt_tokens=request.truncate_prompt_tokens)
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
    if _is_cross_encoder(call):
        pairs = [(request.query, text) for text in documents]
        scored = partial(_scored_documents, call, request, documents)
        _start_scoring(call, request, pairs, scored)
        return
    _refuse_instruction(request)
    bodies = prompt_bodies("query", request.query)
    bodies += [body for index, text in enumerate(documents) for body in prompt_bodies(f"documents[{index}]", text)]
    add_options(bodies, truncate_prompt_tokens=request.truncate_prompt_tokens)
    render = partial(_likeness, call, request, documents)
    WholeJob(call.service.link, call.exchange, render).start("embed", bodies, call.traceparent)


def add_options(bodies: Sequence[Body], **options: Any) -> None:
    """Into each body, those that are not None."""
    for body in bodies:
        body.update((name, value) for name, value in options.items() if value is not None)


def _is_cross_encoder(call: Call) -> bool:
    return "score" in call.service.welcome.workflows


def _start_scoring(
    call: Call,
    request: ScoreRequest | RerankRequest,
    pairs: list[tuple[str, str]],
    render: Callable[[Items], Response],
) -> None:
    bodies: list[Body] = [{"prompt": one, "text_pair": other} for one, other in pairs]
    add_options(bodies, instruction=request.instruction, truncate_prompt_tokens=request.truncate_prompt_tokens)
    WholeJob(call.service.link, call.exchange, render).start("score", bodies, call.traceparent)


def _refuse_instruction(request: ScoreRequest | RerankRequest) -> None:
    if request.instruction is not None:
        raise InvalidRequestError("instruction: this model compares vectors, and takes none")


def _scored_pairs(call: Call, items: Items) -> Response:
    return _scores(call, [float(vector(one)[0]) for one in embeddings(items)], items)


def _scored_documents(call: Call, request: RerankRequest, documents: list[str], items: Items) -> Response:
    return _ranking(call, request, documents, [float(vector(one)[0]) for one in embeddings(items)], items)


def _likeness(call: Call, request: RerankRequest, documents: list[str], items: Items) -> Response:
    query, *vectors = map(vector, embeddings(items))
    return _ranking(call, request, documents, [_cosine(query, one) for one in vectors], items)


def _scores(call: Call, scores: list[float], items: Items) -> Response:
    facts = call.service.answer_facts(f"score-{call.request_id}")
    answer = {"id": facts.answer_id, "object": "list", "created": facts.created_s, "model": facts.model}
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    return Response(200, json_bytes({**answer, "data": data, "usage": usage(items)}))


def _ranking(call: Call, request: RerankRequest, documents: list[str], scores: list[float], items: Items) -> Response:
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
        "usage": usage(items),
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


def embeddings(items: Items) -> list[Embedding]:
    """Of all prompts, in order."""
    return [one for of_prompt in items for one in of_prompt if isinstance(one, Embedding)]


def vector(embedding: Embedding) -> NDArray[np.float32]:
    """Its numbers."""
    return np.frombuffer(embedding.data, "<f4")


def _cosine(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """0 for a vector without a direction."""
    length = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / length if length else 0.0


def usage(items: Items) -> dict[str, int]:
    """What they cost."""
    count = sum(len(one.prompt_token_ids) for one in embeddings(items))
    return {"prompt_tokens": count, "total_tokens": count}
