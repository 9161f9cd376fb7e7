"""`/v1/classify` and `/pooling`: the scores of a model's labels, and whatever a model gives without generating.

Owns: their shapes, which are vLLM's. Never does: compute.
"""

from __future__ import annotations

import base64
from typing import Any, Final, Literal

import msgspec

from procengine.api.embedding_routes import Items, add_options, embeddings, usage, vector
from procengine.api.exchange import Response
from procengine.api.jobs import WholeJob
from procengine.api.json_body import decode_body, json_bytes
from procengine.api.prompts import prompt_bodies
from procengine.api.routes import Call
from procengine.errors import InvalidRequestError
from procengine.messages import Embedding

__all__ = ["ClassifyRequest", "PoolingRequest", "classify", "pooling"]


_Task = Literal[
    "embed",
    "embed_sparse",
    "embed_multi",
    "token_embed",
    "classify",
    "token_classify",
    "reward",
    "hidden_states",
    "score_text",
]
_OF_VLLM: Final = {"token_embed": "embed_multi"}


class ClassifyRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields."""

    input: str | list[Any]
    model: str | None = None
    use_activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None


class PoolingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields, and which workflow is meant; None is the one that the model was made for."""

    input: str | list[Any]
    model: str | None = None
    task: _Task | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    layer: int | None = None
    tokens: Literal["all", "last", "first"] | None = None
    truncate_prompt_tokens: int | None = None
    user: str | None = None


_CLASSIFY: Final = msgspec.json.Decoder(ClassifyRequest)
_POOLING: Final = msgspec.json.Decoder(PoolingRequest)
_OPTIONS: Final = {"embed": ("dimensions",), "hidden_states": ("layer", "tokens")}


def classify(call: Call) -> None:
    """`POST /v1/classify`: how likely each label of the model is."""
    request = decode_body(_CLASSIFY, call.request.body)
    call.service.check_model(request.model)
    call.service.check_workflow("classify")
    bodies = prompt_bodies("input", request.input)
    add_options(bodies, use_activation=request.use_activation, truncate_prompt_tokens=request.truncate_prompt_tokens)
    labels = call.service.welcome.labels

    def render(items: Items) -> Response:
        data = []
        for index, one in enumerate(embeddings(items)):
            scores = vector(one).tolist()
            best = max(range(len(scores)), key=scores.__getitem__)
            data.append({"index": index, "label": labels[best], "probs": scores, "num_classes": len(scores)})
        return _answer(call, "classify", data, items)

    WholeJob(call.service.link, call.exchange, render).start("classify", bodies, call.traceparent)


def pooling(call: Call) -> None:
    """`POST /pooling`: what the model gives for texts without generating."""
    request = decode_body(_POOLING, call.request.body)
    call.service.check_model(request.model)
    workflows = call.service.welcome.workflows
    usual = next((one for one in ("classify", "token_classify") if one in workflows), "embed")
    named = request.task or usual
    task = _OF_VLLM.get(named, named)
    call.service.check_workflow(task)
    bodies = prompt_bodies("input", request.input)
    given = {name: getattr(request, name) for name in ("dimensions", "layer", "tokens")}
    own = _OPTIONS.get(task, ())
    wrong = [name for name, value in given.items() if value is not None and name not in own]
    if wrong:
        raise InvalidRequestError(f"{wrong[0]}: has no meaning for the task {task}")
    options = {name: given[name] for name in own}
    add_options(bodies, **options, truncate_prompt_tokens=request.truncate_prompt_tokens)
    is_base64 = request.encoding_format == "base64"
    values_of = _VALUES.get(task, _numbers)

    def render(items: Items) -> Response:
        data = []
        for index, one in enumerate(embeddings(items)):
            values = base64.b64encode(one.data).decode() if is_base64 else values_of(call, one)
            data.append({"index": index, "object": "pooling", "data": values})
        return _answer(call, "pool", data, items)

    WholeJob(call.service.link, call.exchange, render).start(task, bodies, call.traceparent)


def _numbers(_call: Call, one: Embedding) -> Any:
    return vector(one).tolist()


def _hidden_states(call: Call, one: Embedding) -> Any:
    return vector(one).reshape(-1, call.service.config.model.hidden_size).tolist()


def _label_scores(call: Call, one: Embedding) -> Any:
    """Of each token."""
    return vector(one).reshape(-1, len(call.service.welcome.labels)).tolist()


def _vectors(_call: Call, one: Embedding) -> Any:
    """Of all tokens but the first."""
    num_vectors = len(one.prompt_token_ids) - 1
    return vector(one).reshape(num_vectors, -1).tolist() if num_vectors else []


def _weights(_call: Call, one: Embedding) -> Any:
    """Token ids, and how much each counts."""
    pairs = vector(one).reshape(-1, 2)
    return {"indices": pairs[:, 0].astype(int).tolist(), "values": pairs[:, 1].tolist()}


_VALUES: Final = {
    "hidden_states": _hidden_states,
    "token_classify": _label_scores,
    "embed_multi": _vectors,
    "embed_sparse": _weights,
}


def _answer(call: Call, kind: str, data: list[dict[str, Any]], items: Items) -> Response:
    facts = call.service.answer_facts(f"{kind}-{call.request_id}")
    answer = {"id": facts.answer_id, "object": "list", "created": facts.created_s, "model": facts.model}
    return Response(200, json_bytes({**answer, "data": data, "usage": usage(items)}))
