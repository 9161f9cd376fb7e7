"""`Route` and `RouteTable`: which function answers which path. Pure.

Owns: finding it. Never does: authorize, or answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import Struct

from procengine.api.errors import ApiError
from procengine.api.exchange import EVENT_STREAM_KIND, JSON, Exchange, HttpRequest
from procengine.api.service import Service

__all__ = ["Call", "Handler", "Route", "RouteTable"]


@dataclass(frozen=True, slots=True)
class Call:
    """One request on its way to its answer. `tail` is what its path has behind the route's own."""

    service: Service
    request: HttpRequest
    exchange: Exchange
    request_id: str
    tail: str
    traceparent: str


# Answers now, or later through the exchange; or is awaited. What it raises is answered.
Handler: TypeAlias = Callable[[Call], Awaitable[None] | None]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path. A path that ends in "/" stands for all below it.

    Attributes:
        is_public: it is answered without a key.
        is_anthropic: its errors have Anthropic's shape.
        body: what its body is decoded as; None: it takes none.
        tail: what its path has behind its own, if it stands for all below it.
        kind: what its answer is, if that is not a stream.
    """

    method: str
    path: str
    handler: Handler
    is_public: bool = False
    is_anthropic: bool = False
    body: type[Struct] | None = None
    tail: str | None = None
    kind: str = JSON

    @property
    def streams(self) -> bool:
        """Whether its answer may be a stream of events."""
        return self.kind == EVENT_STREAM_KIND or (self.body is not None and "stream" in self.body.__struct_fields__)


class RouteTable:
    """All routes of a server."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = tuple(routes)
        self._by_path: dict[str, dict[str, Route]] = {}
        for route in routes:
            self._by_path.setdefault(route.path, {})[route.method] = route

    def routes_at(self, path: str) -> tuple[dict[str, Route], str]:
        """What there is at a path, by method, and the path's tail; nothing if there is nothing."""
        known = self._by_path.get(path)
        if known is not None:
            return known, ""
        parent, slash, tail = path.rpartition("/")
        while parent:  # names of models have slashes in them
            known = self._by_path.get(parent + slash)
            if known is not None and tail:
                return known, tail
            parent, slash, rest = parent.rpartition("/")
            tail = f"{rest}/{tail}"
        return {}, ""

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """The route, and the path's tail.

        Raises:
            ApiError: 404 or 405.
        """
        known, tail = self.routes_at(path)
        if not known:
            raise ApiError(404, f"there is nothing at {path}", code="not_found")
        route = known.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(self.methods(known))
            headers = (("Allow", allowed),)
            raise ApiError(405, f"{path} takes {allowed}, not {method}", code="method_not_allowed", headers=headers)
        return route, tail

    @staticmethod
    def methods(known: dict[str, Route]) -> list[str]:
        """The methods that a path takes."""
        return [*known, *(["HEAD"] if "GET" in known else []), "OPTIONS"]
