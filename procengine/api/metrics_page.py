"""The pages of the metrics process, fetched for whoever asks here.

Owns: one small HTTP request over a Unix socket or a port of this machine. Never does: count anything.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from procengine.api.errors import ApiError
from procengine.api.exchange import Response
from procengine.config import EngineConfig
from procengine.groups import describe

__all__ = ["fetch_page"]

_TIMEOUT_S: Final = 10.0
_REQUEST: Final = b"GET %b HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n"


async def fetch_page(config: EngineConfig, path: str) -> Response:
    """A page as it is now.

    Raises:
        ApiError: the group serves none, or its process does not answer.
    """
    if not config.metrics.is_on:
        raise ApiError(404, "metrics: come from spans, and this group keeps none (span_records is 0)", code="not_found")
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            head, body = await _fetch(config, path)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        message = f"metrics: their process does not answer: {error!r}"
        raise ApiError(503, message, code="unavailable", retry_after_s=1) from error
    if head.split(" ")[1:2] != ["200"]:
        raise ApiError(503, f"metrics: their process says: {body.decode(errors='replace').strip()}", retry_after_s=1)
    kinds = [line.partition(":")[2].strip() for line in head.splitlines() if line.lower().startswith("content-type:")]
    return Response(200, body, kinds[0] if kinds else "text/plain")


async def _fetch(config: EngineConfig, path: str) -> tuple[str, bytes]:
    reader, writer = await _connect(config)
    try:
        writer.write(_REQUEST % path.encode())
        data = await reader.read(-1)
    finally:
        writer.close()
    head, _, body = data.partition(b"\r\n\r\n")
    return head.decode("latin-1"), body


async def _connect(config: EngineConfig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if config.metrics.uds is not None:
        return await asyncio.open_unix_connection(config.metrics.uds)
    described = describe(Path(config.group.run_dir))  # its port may have been any that was free
    url = urlsplit(described.metrics if described is not None else "")
    if url.hostname is None:
        raise ConnectionError("the group is still starting")
    return await asyncio.open_connection(url.hostname, url.port)
