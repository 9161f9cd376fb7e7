"""The HTML report: `report.html` with its data inside, one file that opens anywhere.

Owns: how the data gets into the page. Never does: choose what is shown (`report_data`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec

__all__ = ["html_report"]

_TEMPLATE: Final = Path(__file__).with_name("report.html")
_PLACE: Final = "/*DATA*/"


def html_report(data: dict[str, Any]) -> str:
    """The page. It asks for nothing from outside."""
    # A request id is whatever a client says: it must not end the script element.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _TEMPLATE.read_text(encoding="utf-8").replace(_PLACE, encoded)
