"""The table of all routes: the one place to see what the server answers."""

from __future__ import annotations

from procengine.api.anthropic_request import CountRequest, MessagesRequest
from procengine.api.anthropic_routes import count_tokens, create_message
from procengine.api.chat_request import ChatRequest
from procengine.api.classify_routes import ClassifyRequest, PoolingRequest, classify, pooling
from procengine.api.completion_request import CompletionRequest
from procengine.api.embedding_routes import EmbeddingRequest, RerankRequest, ScoreRequest, embed, rerank, score
from procengine.api.exchange import EVENT_STREAM_KIND
from procengine.api.generation_routes import chat, complete, respond
from procengine.api.lora_routes import LoadLoraRequest, UnloadLoraRequest, load_lora_adapter, unload_lora_adapter
from procengine.api.page_routes import page_file
from procengine.api.responses_request import ResponsesRequest
from procengine.api.routes import Route, RouteTable
from procengine.api.server_routes import health, list_models, live, metrics, openapi, ready, show_model, top, version
from procengine.api.stream_routes import cancel_stream, resume_stream
from procengine.api.token_routes import DetokenizeRequest, TokenizeRequest, detokenize, tokenize

__all__ = ["all_routes"]


def all_routes() -> RouteTable:
    """Every route."""
    routes = [
        Route("GET", "/live", live, is_public=True),
        Route("GET", "/health", health, is_public=True),
        Route("GET", "/ready", ready),
        Route("GET", "/version", version),
        Route("GET", "/metrics", metrics, kind="text/plain"),
        Route("GET", "/top", top),
        Route("GET", "/", page_file("index.html"), is_public=True, kind="text/html"),
        Route("GET", "/page.css", page_file("page.css"), is_public=True, kind="text/css"),
        Route("GET", "/page.js", page_file("page.js"), is_public=True, kind="text/javascript"),
        Route("POST", "/tokenize", tokenize, body=TokenizeRequest),
        Route("POST", "/detokenize", detokenize, body=DetokenizeRequest),
        Route("GET", "/v1/models", list_models),
        Route("GET", "/v1/models/", show_model, tail="name"),
        Route("POST", "/v1/chat/completions", chat, body=ChatRequest),
        Route("POST", "/v1/completions", complete, body=CompletionRequest),
        Route("POST", "/v1/responses", respond, body=ResponsesRequest),
        Route("POST", "/v1/messages", create_message, body=MessagesRequest, is_anthropic=True),
        Route("POST", "/v1/messages/count_tokens", count_tokens, body=CountRequest, is_anthropic=True),
        Route("GET", "/v1/streams/", resume_stream, tail="id", kind=EVENT_STREAM_KIND),
        Route("DELETE", "/v1/streams/", cancel_stream, tail="id"),
        Route("POST", "/v1/embeddings", embed, body=EmbeddingRequest),
        Route("POST", "/v1/load_lora_adapter", load_lora_adapter, body=LoadLoraRequest, kind="text/plain"),
        Route("POST", "/v1/unload_lora_adapter", unload_lora_adapter, body=UnloadLoraRequest, kind="text/plain"),
        Route("POST", "/v1/score", score, body=ScoreRequest),
        Route("POST", "/v1/rerank", rerank, body=RerankRequest),
        Route("POST", "/v1/classify", classify, body=ClassifyRequest),
        Route("POST", "/classify", classify, body=ClassifyRequest),
        Route("POST", "/pooling", pooling, body=PoolingRequest),
    ]
    return RouteTable([*routes, Route("GET", "/openapi.json", openapi(routes))])
