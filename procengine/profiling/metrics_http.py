"""The pages of the metrics endpoint, over HTTP.

Owns: HTTP. Never does: know what is on a page. An unknown path is 404, a method other than GET and HEAD
501.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, NamedTuple

__all__ = ["Page", "serve_pages"]

_IDLE_TIMEOUT_S: Final = 30.0


class Page(NamedTuple):
    """What is answered."""

    status: HTTPStatus
    content_type: str
    text: str


_NOT_FOUND: Final = Page(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", "there are /metrics, /health and /top\n")


class _Server(ThreadingHTTPServer):
    """A thread a connection."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who hangs up in the middle of an answer is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def serve_pages(listen_fd: int, pages: Mapping[str, Callable[[], Page]]) -> ThreadingHTTPServer:
    """Answer on a listening socket, from threads of its own. `pages` are made anew for each request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _IDLE_TIMEOUT_S

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def _answer(self, *, has_body: bool) -> None:
            make = pages.get(self.path.partition("?")[0])
            page = make() if make else _NOT_FOUND
            data = page.text.encode()
            self.send_response(page.status)
            self.send_header("Content-Type", page.content_type)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if has_body:
                self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """A line for every scrape is no log."""

    listener = socket.socket(fileno=listen_fd)
    server = _Server(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()  # the one it made for itself
    server.socket = listener
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return server
