"""The web page at `/`: three constant files.

Owns: which files these are, and what a browser lets them do. Never does: put anything of the server into them: they are
the same everywhere, so they may be had without a key, and the page asks for one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

from procengine.api.exchange import Response
from procengine.api.routes import Call

__all__ = ["page_file"]

_FOLDER: Final = Path(__file__).with_name("page")
_KINDS: Final = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
# Nothing from elsewhere, nothing inline, nobody's frame.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = (
    ("Content-Security-Policy", _POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


def page_file(name: str) -> Callable[[Call], None]:
    """A route that answers with one of the files."""

    def answer(call: Call) -> None:
        call.exchange.send(_file(name))

    return answer


@cache
def _file(name: str) -> Response:
    path = _FOLDER / name
    return Response(200, path.read_bytes(), f"{_KINDS[path.suffix]}; charset=utf-8", _HEADERS)
