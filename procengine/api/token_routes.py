"""`/tokenize` and `/detokenize`, in vLLM's shapes.

Owns: those two. Never does: hold up the loop: a long text is tokenized on a thread.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from procengine.api.chat_messages import plain_messages
from procengine.api.exchange import Response
from procengine.api.json_body import decode_body, json_bytes
from procengine.api.routes import Call
from procengine.errors import InvalidRequestError

__all__ = ["DetokenizeRequest", "TokenizeRequest", "detokenize", "tokenize"]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # to a prompt, true by default; a chat template writes its own
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Token ids."""

    tokens: list[int]
    model: str | None = None


_TOKENIZE: Final = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(call: Call) -> None:
    """`POST /tokenize`: a text, or a conversation as the model sees it, as token ids."""
    request = decode_body(_TOKENIZE, call.request.body)
    service = call.service
    service.check_for_generation(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("prompt: exactly one of prompt and messages must be given")
    ids = await service.in_thread(lambda: _ids(call, request))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.config.scheduler.max_model_len,
        "tokens": ids,
        "token_strs": [service.tokenizer.id_to_token(one) for one in ids] if request.return_token_strs else None,
    }
    call.exchange.send(Response(200, json_bytes(answer)))


async def detokenize(call: Call) -> None:
    """`POST /detokenize`: token ids as a text."""
    request = decode_body(_DETOKENIZE, call.request.body)
    service = call.service
    service.check_for_generation(request.model)
    size = service.config.model.vocab_size
    wrong = next((one for one in request.tokens if not 0 <= one < size), None)
    if wrong is not None:
        raise InvalidRequestError(f"tokens: {wrong} is not a token of this model; ids go from 0 to {size - 1}")
    text = await service.in_thread(lambda: service.tokenizer.decode(request.tokens, skip_special_tokens=False))
    call.exchange.send(Response(200, json_bytes({"prompt": text})))


def _ids(call: Call, request: TokenizeRequest) -> list[int]:
    service = call.service
    if request.messages is None:
        return service.tokenizer.encode(request.prompt or "", request.add_special_tokens is not False)
    text = service.render(
        plain_messages(request.messages),
        request.tools,
        add_generation_prompt=request.add_generation_prompt is not False,
    )
    return service.tokenizer.encode(text, bool(request.add_special_tokens))
