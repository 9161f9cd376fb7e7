"""`FrontDoor`: what every request goes through before its route, and every error after it.

Owns: request ids, keys, CORS, and the last word on what goes wrong. Never does: know what a route does.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Awaitable
from typing import Final

from procengine.api.api_key import given_key
from procengine.api.errors import ApiError, api_error, error_response
from procengine.api.exchange import JSON, Exchange, HttpRequest, Response
from procengine.api.jobs import log_failure
from procengine.api.resumable_stream import WINDOW_HEADER
from procengine.api.routes import Call, Route, RouteTable
from procengine.api.service import Service
from procengine.errors import InvalidRequestError
from procengine.trace_context import TraceContext

__all__ = ["FrontDoor"]

_MAX_REQUEST_ID: Final = 128
_PREFLIGHT_S: Final = 600
_ALLOWED_HEADERS: Final = f"Authorization, Content-Type, Last-Event-ID, X-Api-Key, X-Request-Id, {WINDOW_HEADER}"


class FrontDoor:
    """Answers requests by a table of routes."""

    def __init__(self, service: Service, table: RouteTable) -> None:
        self._service = service
        self._table = table
        self._keys = tuple(key.encode() for key in service.config.api.api_keys)
        self._origins = frozenset(service.config.api.allowed_origins)
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answer a request, now or later. Lets no exception out."""
        request_id = _request_id(request)
        exchange.headers.append(("X-Request-Id", request_id))
        is_anthropic = False
        try:
            self._add_cors(request, exchange)
            known, _ = self._table.routes_at(request.path)
            is_anthropic = any(route.is_anthropic for route in known.values())
            if request.method == "OPTIONS" and known:
                exchange.send(self._preflight(request, known))
                return
            if not any(route.is_public for route in known.values()):
                self._check_key(request)
            route, tail = self._table.find(request.method, request.path)
            _check_content_type(route, request)
            call = Call(self._service, request, exchange, request_id, tail, _traceparent(request))
            waiting = route.handler(call)
            if waiting is not None:
                self._await(waiting, exchange, is_anthropic=is_anthropic)
        except Exception as failure:  # noqa: BLE001 - per request, at the rim
            _answer_error(failure, exchange, is_anthropic=is_anthropic)

    def refusal(self, status: int, message: str) -> Response:
        """The answer to what is no request."""
        return error_response(ApiError(status, message, retry_after_s=1 if status == 503 else None))

    def _await(self, waiting: Awaitable[None], exchange: Exchange, *, is_anthropic: bool) -> None:
        async def run() -> None:
            try:
                await waiting
            except Exception as failure:  # noqa: BLE001 - per request, at the rim
                _answer_error(failure, exchange, is_anthropic=is_anthropic)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def cancel() -> None:
            task.cancel()

        exchange.on_gone = cancel

    def _check_key(self, request: HttpRequest) -> None:
        if not self._keys:
            return
        given = given_key(request)
        data = given.encode(errors="replace")
        # All are compared, whichever fits: how long it takes tells nothing.
        if not sum(hmac.compare_digest(data, key) for key in self._keys):
            message = "a key is needed: Authorization: Bearer KEY" if not given else "the key is not known here"
            headers = (("WWW-Authenticate", "Bearer"),)
            raise ApiError(401, message, code="invalid_api_key", headers=headers)

    def _add_cors(self, request: HttpRequest, exchange: Exchange) -> None:
        origin = request.headers.get("origin")
        if not self._origins or origin is None:
            return
        if "*" in self._origins or origin in self._origins:
            exchange.headers += [
                ("Access-Control-Allow-Origin", origin),
                ("Vary", "Origin"),
                ("Access-Control-Expose-Headers", f"X-Request-Id, {WINDOW_HEADER}"),
            ]

    def _preflight(self, request: HttpRequest, known: dict[str, Route]) -> Response:
        methods = ", ".join(self._table.methods(known))
        wanted = request.headers.get("access-control-request-headers", _ALLOWED_HEADERS)
        headers = (
            ("Allow", methods),
            ("Access-Control-Allow-Methods", methods),
            ("Access-Control-Allow-Headers", wanted),
            ("Access-Control-Max-Age", str(_PREFLIGHT_S)),
        )
        return Response(200, b"", "text/plain", headers if self._origins else headers[:1])


def _answer_error(failure: Exception, exchange: Exchange, *, is_anthropic: bool) -> None:
    error = api_error(failure)
    log_failure(failure, error)
    if exchange.has_begun:
        exchange.end()
    else:
        exchange.send(error_response(error, is_anthropic=is_anthropic))


def _request_id(request: HttpRequest) -> str:
    given = request.headers.get("x-request-id", "")
    is_usable = 0 < len(given) <= _MAX_REQUEST_ID and given.isascii() and given.isprintable()
    return given if is_usable else secrets.token_hex(16)


def _check_content_type(route: Route, request: HttpRequest) -> None:
    """A page of another origin may send a text or a form without being asked; JSON it may not."""
    if route.method != "POST":
        return
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(415, f"Content-Type: must be {JSON}, got {kind!r}", code="unsupported_media_type")


def _traceparent(request: HttpRequest) -> str:
    """The caller's span; one that is malformed is as good as none (W3C Trace Context, 3.2.2.4)."""
    given = request.headers.get("traceparent", "")
    try:
        TraceContext.parse(given)
    except InvalidRequestError:
        return ""
    return given
