"""`/v1/chat/completions`, `/v1/completions` and `/v1/responses`: from a body to a job.

Owns: nothing but the order of steps. Never does: parse or render (see the modules of each shape).
"""

from __future__ import annotations

from functools import partial

from procengine.api.chat_answer import chat_answer
from procengine.api.chat_request import CHAT_DECODER, chat_body
from procengine.api.chat_stream import ChatStream
from procengine.api.completion_answer import CompletionStream, completion_answer
from procengine.api.completion_request import COMPLETION_DECODER, completion_bodies
from procengine.api.jobs import StreamJob, WholeJob
from procengine.api.json_body import decode_body
from procengine.api.responses_answer import ResponsesStream, responses_answer
from procengine.api.responses_request import RESPONSES_DECODER, responses_body
from procengine.api.routes import Call
from procengine.api.stream_routes import way_back
from procengine.client_bodies import with_adapter

__all__ = ["chat", "complete", "respond"]


def chat(call: Call) -> None:
    """`POST /v1/chat/completions`: a conversation goes on."""
    request = decode_body(CHAT_DECODER, call.request.body)
    service = call.service
    adapter = service.check_for_generation(request.model)
    service.check_workflow("generate")
    body, offer = chat_body(request, service.welcome.tool_call_parser)
    body = with_adapter(body, adapter)
    as_ids = bool(request.return_tokens_as_token_ids)
    facts = service.answer_facts(f"chatcmpl-{call.request_id}", adapter, tokens_as_ids=as_ids)
    exchange = way_back(call, streams=bool(request.stream))
    if request.stream:
        StreamJob(service.link, exchange, ChatStream(request, facts, offer.style)).start(
            "generate", [body], call.traceparent
        )
    else:
        WholeJob(service.link, exchange, partial(chat_answer, request, facts, offer.style)).start(
            "generate", [body], call.traceparent
        )


def complete(call: Call) -> None:
    """`POST /v1/completions`: a text, or several, go on."""
    request = decode_body(COMPLETION_DECODER, call.request.body)
    service = call.service
    adapter = service.check_for_generation(request.model)
    service.check_workflow("generate")
    bodies = [with_adapter(body, adapter) for body in completion_bodies(request)]
    as_ids = bool(request.return_tokens_as_token_ids)
    facts = service.answer_facts(f"cmpl-{call.request_id}", adapter, tokens_as_ids=as_ids)
    exchange = way_back(call, streams=bool(request.stream))
    if request.stream:
        StreamJob(service.link, exchange, CompletionStream(request, facts)).start("generate", bodies, call.traceparent)
    else:
        WholeJob(service.link, exchange, partial(completion_answer, request, facts)).start(
            "generate", bodies, call.traceparent
        )


def respond(call: Call) -> None:
    """`POST /v1/responses`: a conversation goes on, in the newer shape, without state."""
    request = decode_body(RESPONSES_DECODER, call.request.body)
    service = call.service
    adapter = service.check_for_generation(request.model)
    service.check_workflow("generate")
    body, offer = responses_body(request, service.welcome.tool_call_parser)
    body = with_adapter(body, adapter)
    facts = service.answer_facts(f"resp_{call.request_id}", adapter)
    exchange = way_back(call, streams=bool(request.stream))
    if request.stream:
        StreamJob(service.link, exchange, ResponsesStream(request, facts, offer.style)).start(
            "generate", [body], call.traceparent
        )
    else:
        WholeJob(service.link, exchange, partial(responses_answer, request, facts, offer.style)).start(
            "generate", [body], call.traceparent
        )
