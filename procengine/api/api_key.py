"""The key that a request brings, wherever it says it. Pure."""

from __future__ import annotations

from procengine.api.exchange import HttpRequest

__all__ = ["given_key"]


def given_key(request: HttpRequest) -> str:
    """`Authorization: Bearer KEY`, or `X-Api-Key: KEY`; "" for none."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
