"""The table of all routes: the one place to see what the server answers."""

from __future__ import annotations

from procengine.api.anthropic_routes import count_tokens, create_message
from procengine.api.embedding_routes import embed, rerank, score
from procengine.api.generation_routes import chat, complete, respond
from procengine.api.page_routes import page_file
from procengine.api.routes import Route, RouteTable
from procengine.api.server_routes import health, list_models, live, metrics, ready, show_model, top, version
from procengine.api.stream_routes import cancel_stream, resume_stream
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
            Route("GET", "/top", top),
            Route("GET", "/", page_file("index.html"), is_public=True),
            Route("GET", "/page.css", page_file("page.css"), is_public=True),
            Route("GET", "/page.js", page_file("page.js"), is_public=True),
            Route("POST", "/tokenize", tokenize),
            Route("POST", "/detokenize", detokenize),
            Route("GET", "/v1/models", list_models),
            Route("GET", "/v1/models/", show_model),
            Route("POST", "/v1/chat/completions", chat),
            Route("POST", "/v1/completions", complete),
            Route("POST", "/v1/responses", respond),
            Route("POST", "/v1/messages", create_message, is_anthropic=True),
            Route("POST", "/v1/messages/count_tokens", count_tokens, is_anthropic=True),
            Route("GET", "/v1/streams/", resume_stream),
            Route("DELETE", "/v1/streams/", cancel_stream),
            Route("POST", "/v1/embeddings", embed),
            Route("POST", "/v1/score", score),
            Route("POST", "/v1/rerank", rerank),
        ]
    )
