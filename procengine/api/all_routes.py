"""The table of all routes: the one place to see what the server answers."""

from __future__ import annotations

from procengine.api.anthropic_routes import count_tokens, create_message
from procengine.api.classify_routes import classify, pooling
from procengine.api.embedding_routes import embed, rerank, score
from procengine.api.generation_routes import chat, complete, respond
from procengine.api.routes import Route, RouteTable
from procengine.api.server_routes import health, list_models, live, metrics, ready, show_model, version
from procengine.api.token_routes import detokenize, tokenize

__all__ = ["all_routes"]


def all_routes() -> RouteTable:
    """Every route."""
    return RouteTable(
        [
            Route("GET", "/live", live, is_public=True),
            Route("GET", "/health", health, is_public=True),
            Route("GET", "/ready", ready),
            Route("GET", "/version", version),
            Route("GET", "/metrics", metrics),
            Route("POST", "/tokenize", tokenize),
            Route("POST", "/detokenize", detokenize),
            Route("GET", "/v1/models", list_models),
            Route("GET", "/v1/models/", show_model),
            Route("POST", "/v1/chat/completions", chat),
            Route("POST", "/v1/completions", complete),
            Route("POST", "/v1/responses", respond),
            Route("POST", "/v1/messages", create_message, is_anthropic=True),
            Route("POST", "/v1/messages/count_tokens", count_tokens, is_anthropic=True),
            Route("POST", "/v1/embeddings", embed),
            Route("POST", "/v1/score", score),
            Route("POST", "/v1/rerank", rerank),
            Route("POST", "/v1/classify", classify),
            Route("POST", "/classify", classify),
            Route("POST", "/pooling", pooling),
        ]
    )
