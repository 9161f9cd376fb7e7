"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, in vLLM's shape.

Owns: their bodies and answers. Never does: load one.
"""

from __future__ import annotations

from typing import Final

import msgspec

from procengine.api.errors import ApiError
from procengine.api.exchange import Response
from procengine.api.json_body import decode_body
from procengine.api.lora_link import LoraLink
from procengine.api.routes import Call
from procengine.errors import ConfigError, InvalidRequestError, ModelError, error_from_code
from procengine.messages import LoraChanged

__all__ = ["LoadLoraRequest", "UnloadLoraRequest", "load_lora_adapter", "unload_lora_adapter"]


class LoadLoraRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to load."""

    lora_name: str
    lora_path: str  # a folder on the server
    load_inplace: bool | None = None


class UnloadLoraRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to unload."""

    lora_name: str
    lora_int_id: int | None = None  # taken, without effect: the name says it


_LOAD: Final = msgspec.json.Decoder(LoadLoraRequest)
_UNLOAD: Final = msgspec.json.Decoder(UnloadLoraRequest)


async def load_lora_adapter(call: Call) -> None:
    """`POST /v1/load_lora_adapter`: an adapter that requests may name from then on."""
    request = decode_body(_LOAD, call.request.body)
    for field in ("lora_name", "lora_path"):
        if not getattr(request, field):
            raise InvalidRequestError(f"{field}: must not be empty")
    if request.load_inplace:
        raise InvalidRequestError("load_inplace: is not supported; unload the adapter first")
    changed = await _link(call).load(request.lora_name, request.lora_path)
    if not changed.code:  # the supervisor says so too, over another socket: perhaps a moment later
        known = call.service.adapters
        call.service.adapters = known | {request.lora_name: known.get(request.lora_name, request.lora_path)}
    _answer(call, changed, f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_lora_adapter(call: Call) -> None:
    """`POST /v1/unload_lora_adapter`: requests name it no more; answered when those that do have ended."""
    request = decode_body(_UNLOAD, call.request.body)
    changed = await _link(call).unload(request.lora_name)
    if not changed.code:
        call.service.adapters = {name: one for name, one in call.service.adapters.items() if name != request.lora_name}
    _answer(call, changed, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


def _link(call: Call) -> LoraLink:
    link = call.service.lora
    if link is None or not call.service.config.lora.allows_http:
        text = "adapters are not loaded over HTTP here; it takes --enable-lora and --allow-runtime-lora-updating"
        raise ApiError(403, text, code="forbidden")
    return link


def _answer(call: Call, changed: LoraChanged, success: str) -> None:
    if changed.code in (ConfigError.code, ModelError.code):  # of the caller, not of the server
        raise InvalidRequestError(changed.error)
    if changed.code:
        raise error_from_code(changed.code, changed.error)
    call.exchange.send(Response(200, success.encode(), "text/plain; charset=utf-8"))
