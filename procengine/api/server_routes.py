"""Routes that tell of the server: models, version, and whether it is well.

Owns: those answers. Never does: look into another process: the supervisor is asked how they are.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import procengine
from procengine.api.exchange import Response
from procengine.api.json_body import json_bytes
from procengine.api.routes import Call

__all__ = ["list_models", "live", "show_model", "version"]


def live(call: Call) -> None:
    """`GET /live`: this process answers."""
    call.exchange.send(Response(200, json_bytes({"status": "ok"})))


def version(call: Call) -> None:
    """`GET /version`."""
    call.exchange.send(Response(200, json_bytes({"version": procengine.__version__})))


def list_models(call: Call) -> None:
    """`GET /v1/models`."""
    models = [_model(call, name) for name in call.service.model_names]
    call.exchange.send(Response(200, json_bytes({"object": "list", "data": models})))


def show_model(call: Call) -> None:
    """`GET /v1/models/NAME`."""
    name = unquote(call.tail)
    call.service.check_model(name)
    call.exchange.send(Response(200, json_bytes(_model(call, name))))


def _model(call: Call, name: str) -> dict[str, Any]:
    service = call.service
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "procengine",
        "root": service.config.model.name,
        "parent": None,
        "max_model_len": service.config.scheduler.max_model_len,
    }
