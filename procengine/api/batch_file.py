"""Files of OpenAI's batch format: a request a line in, an answer a line out.

Owns: reading both, so that a run that was cut goes on where it was. Never does: run a request.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from procengine.errors import ConfigError

__all__ = [
    "BATCH_PATHS",
    "BatchError",
    "BatchLine",
    "BatchResponse",
    "BatchResult",
    "check_lines",
    "finished_ids",
    "read_lines",
]

BATCH_PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
)


class BatchLine(msgspec.Struct, frozen=True):
    """One request."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class BatchResponse(msgspec.Struct, frozen=True):
    """What was answered over HTTP, or would have been."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct, frozen=True):
    """Why there is no answer."""

    code: str
    message: str


class BatchResult(msgspec.Struct, frozen=True):
    """One line of the output."""

    id: str
    custom_id: str
    response: BatchResponse | None
    error: BatchError | None = None


class _Id(msgspec.Struct):
    custom_id: str
    response: Any = None


_LINE: Final = msgspec.json.Decoder(BatchLine)
_ID: Final = msgspec.json.Decoder(_Id)


def read_lines(path: Path) -> Iterator[BatchLine]:
    """The requests of a file, in order; empty lines are passed over.

    Raises:
        ConfigError: the file cannot be read, or a line is no request; names it.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _request(path, number, line)
    except OSError as error:
        raise ConfigError(f"-i: {path} cannot be read: {error.strerror or error}") from error


def check_lines(path: Path) -> int:
    """How many requests there are.

    Raises:
        ConfigError: as `read_lines`; or two have the same id.
    """
    seen: set[str] = set()
    for line in read_lines(path):
        if line.custom_id in seen:
            raise ConfigError(f"-i: {path}: custom_id {line.custom_id!r} is there twice")
        seen.add(line.custom_id)
    if not seen:
        raise ConfigError(f"-i: {path} has no requests")
    return len(seen)


def finished_ids(path: Path) -> set[str]:
    """Ids of the requests that an earlier run has answered. A last line that was cut is cut off.

    Raises:
        ConfigError: the file is something else, which is not overwritten.
    """
    if not path.exists():
        return set()
    ids: set[str] = set()
    try:
        data = path.read_bytes()
        whole = data.rpartition(b"\n")[0]
        for line in whole.splitlines():
            ids.add(_ID.decode(line).custom_id)
        if data and not data.endswith(b"\n"):
            with path.open("r+b") as file:
                file.truncate(len(whole) + 1 if whole else 0)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"-o: {path} is no output of an earlier run, and is not overwritten: {error}") from error
    return ids


def _request(path: Path, number: int, data: bytes) -> BatchLine:
    try:
        line = _LINE.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"-i: {path}, line {number}: {error}") from error
    if line.url not in BATCH_PATHS:
        raise ConfigError(f"-i: {path}, line {number}: url: must be one of {', '.join(BATCH_PATHS)}, got {line.url!r}")
    return line
