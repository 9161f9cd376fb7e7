"""The OpenAPI document of a table of routes, made from the types that bodies are decoded with.

Owns: how routes and types are told in OpenAPI 3.1. Never does: describe a field a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from procengine.api.errors import AnthropicAnswer, ErrorAnswer
from procengine.api.exchange import EVENT_STREAM_KIND, JSON
from procengine.api.resumable_stream import WINDOW_HEADER
from procengine.api.resumable_streams import MAX_WINDOW_S
from procengine.api.routes import Route

__all__ = ["openapi_document"]

_REF: Final = "#/components/schemas/{name}"
_SCHEMES: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}
_REQUEST_ID: Final[dict[str, Any]] = {
    "name": "X-Request-Id",
    "in": "header",
    "description": "Goes back as it came and is part of the answer's id, if it has at most 128 characters.",
    "schema": {"type": "string"},
}
_WINDOW: Final[dict[str, Any]] = {
    "name": WINDOW_HEADER,
    "in": "header",
    "description": "Seconds for which a streamed answer outlives its connection; GET /v1/streams/ID goes on with it.",
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_WINDOW_S},
}
_LAST_EVENT: Final[dict[str, Any]] = {
    "name": "Last-Event-ID",
    "in": "header",
    "description": "The answer begins behind this event.",
    "schema": {"type": "integer", "minimum": 0},
}


def openapi_document(routes: Sequence[Route], version: str, *, wants_key: bool) -> dict[str, Any]:
    """The document. Routes whose handlers say nothing of themselves are pages for people, and not in it."""
    told = [route for route in routes if route.handler.__doc__]
    bodies = [route.body for route in told if route.body is not None]
    types: list[type[msgspec.Struct]] = [*bodies, ErrorAnswer, AnthropicAnswer]
    refs, components = msgspec.json.schema_components(types, ref_template=_REF)
    ref_by_type = dict(zip(types, refs, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in told:
        tail = f"{{{route.tail}}}" if route.tail else ""
        paths.setdefault(route.path + tail, {})[route.method.lower()] = _operation(route, ref_by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "procengine", "version": version},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SCHEMES},
        "security": [{name: []} for name in _SCHEMES] if wants_key else [],
    }


def _operation(route: Route, ref_by_type: dict[type[msgspec.Struct], dict[str, Any]]) -> dict[str, Any]:
    error = ref_by_type[AnthropicAnswer if route.is_anthropic else ErrorAnswer]
    operation: dict[str, Any] = {
        "operationId": f"{route.method.lower()}_{route.path.strip('/').replace('/', '_') or 'page'}",
        "summary": _summary(route),
        "parameters": _parameters(route),
        "responses": {
            "2XX": {"description": "The answer.", "content": _content(route)},
            "default": {"description": "What is wrong.", "content": {JSON: {"schema": error}}},
        },
    }
    if route.body is not None:
        schema = ref_by_type[route.body]
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if route.is_public:
        operation["security"] = []
    return operation


def _summary(route: Route) -> str:
    text = " ".join((route.handler.__doc__ or "").split())
    _, _, more = text.partition(": ")
    return more[:1].upper() + more[1:]


def _parameters(route: Route) -> list[dict[str, Any]]:
    named: list[dict[str, Any]] = []
    if route.tail:
        named.append({"name": route.tail, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}})
    if route.streams and route.body is None:
        named.append(_LAST_EVENT)
    if route.body is not None:
        named.append(_REQUEST_ID)
        if route.streams:
            named.append(_WINDOW)
    return named


def _content(route: Route) -> dict[str, Any]:
    kinds = [route.kind] + ([EVENT_STREAM_KIND] if route.streams and route.kind != EVENT_STREAM_KIND else [])
    return {kind: {"schema": {"type": "object" if kind == JSON else "string"}} for kind in kinds}
