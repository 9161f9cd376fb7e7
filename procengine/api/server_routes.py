"""Routes that tell of the server: models, version, and whether it is well.

Owns: those answers. Never does: look into another process: the supervisor is asked how they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import procengine
from procengine.api.errors import ApiError
from procengine.api.exchange import Response
from procengine.api.json_body import json_bytes
from procengine.api.metrics_page import fetch_page
from procengine.api.openapi import openapi_document
from procengine.api.routes import Call, Handler, Route
from procengine.errors import EngineDeadError, ShuttingDownError
from procengine.groups import describe
from procengine.health import group_health
from procengine.profiling.process_watch import process_name

__all__ = ["health", "list_models", "live", "metrics", "openapi", "ready", "show_model", "top", "version"]


def live(call: Call) -> None:
    """`GET /live`: this process answers."""
    call.exchange.send(Response(200, json_bytes({"status": "ok"})))


def ready(call: Call) -> None:
    """`GET /ready`: a request that comes now is taken."""
    service = call.service
    if service.error is not None:
        raise EngineDeadError(service.error)
    if service.is_draining:
        raise ShuttingDownError("the group is shutting down and takes no new requests")
    if service.link.is_attached and describe(Path(service.config.group.run_dir)) is not None:
        call.exchange.send(Response(200, json_bytes({"status": "ok"})))
    else:
        raise ApiError(503, "the group is still starting", code="starting", retry_after_s=1)


async def health(call: Call) -> None:
    """`GET /health`: the group serves and moves (`procengine.health`). Says what each process does."""
    service = call.service
    status = await service.status.ask()
    processes = {} if status is None else {process_name(one): one.state for one in status.processes}
    is_healthy = status is not None and group_health(status).is_healthy
    if service.error is not None or service.is_draining or not is_healthy:
        text = service.error or ("draining" if service.is_draining else "unwell")
        about = {"status": text, "processes": processes}
        call.exchange.send(Response(503, json_bytes(about), headers=(("Retry-After", "1"),)))
    else:
        call.exchange.send(Response(200, json_bytes({"status": "ok", "processes": processes})))


async def metrics(call: Call) -> None:
    """`GET /metrics`: for Prometheus."""
    call.exchange.send(await fetch_page(call.service.config, "/metrics"))


async def top(call: Call) -> None:
    """`GET /top`: the group in figures, as `procengine top --json` prints them."""
    call.exchange.send(await fetch_page(call.service.config, "/top"))


def version(call: Call) -> None:
    """`GET /version`: procengine's."""
    call.exchange.send(Response(200, json_bytes({"version": procengine.__version__})))


def openapi(routes: Sequence[Route]) -> Handler:
    """The route that describes these."""

    def answer(call: Call) -> None:
        wants_key = bool(call.service.config.api.api_keys)
        document = openapi_document(routes, procengine.__version__, wants_key=wants_key)
        call.exchange.send(Response(200, json_bytes(document)))

    return answer


def list_models(call: Call) -> None:
    """`GET /v1/models`: what requests may call the model, and its adapters."""
    models = [_model(call, name) for name in (*call.service.model_names, *call.service.adapters)]
    call.exchange.send(Response(200, json_bytes({"object": "list", "data": models})))


def show_model(call: Call) -> None:
    """`GET /v1/models/NAME`: one of these."""
    name = unquote(call.tail)
    call.service.check_for_generation(name)
    call.exchange.send(Response(200, json_bytes(_model(call, name))))


def _model(call: Call, name: str) -> dict[str, Any]:
    service = call.service
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "procengine",
        "root": service.adapters.get(name, service.config.model.name),
        "parent": service.model_names[0] if name in service.adapters else None,
        "max_model_len": service.config.scheduler.max_model_len,
    }
