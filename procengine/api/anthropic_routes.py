"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`: from a body to an answer.

Owns: nothing but the order of steps.
"""

from __future__ import annotations

from functools import partial

from procengine.api.anthropic_answer import MessagesStream, messages_answer
from procengine.api.anthropic_request import (
    COUNT_DECODER,
    MESSAGES_DECODER,
    messages_request_body,
    openai_messages,
    openai_tools,
)
from procengine.api.exchange import Response
from procengine.api.jobs import StreamJob, WholeJob
from procengine.api.json_body import decode_body, json_bytes
from procengine.api.routes import Call
from procengine.api.stream_routes import way_back
from procengine.client_bodies import with_adapter

__all__ = ["count_tokens", "create_message"]


def create_message(call: Call) -> None:
    """`POST /v1/messages`: a conversation goes on, in Anthropic's shape."""
    request = decode_body(MESSAGES_DECODER, call.request.body)
    service = call.service
    adapter = service.check_for_generation(request.model)
    service.check_workflow("generate")
    body, offer = messages_request_body(request, service.welcome.tool_call_parser)
    body = with_adapter(body, adapter)
    facts = service.answer_facts(f"msg_{call.request_id}", adapter)
    exchange = way_back(call, streams=bool(request.stream))
    if request.stream:
        renderer = MessagesStream(request, facts, offer.style)
        StreamJob(service.link, exchange, renderer).start("generate", [body], call.traceparent)
    else:
        render = partial(messages_answer, request, facts, offer.style)
        WholeJob(service.link, exchange, render, is_anthropic=True).start("generate", [body], call.traceparent)


async def count_tokens(call: Call) -> None:
    """`POST /v1/messages/count_tokens`: how long a conversation is."""
    request = decode_body(COUNT_DECODER, call.request.body)
    service = call.service
    service.check_for_generation(request.model)
    messages, tools = openai_messages(request), openai_tools(request)
    ids = await service.in_thread(lambda: service.tokenizer.encode(service.render(messages, tools), False))
    call.exchange.send(Response(200, json_bytes({"input_tokens": len(ids)})))
