"""`CrashRecord`: the requests and the steps of a group at one moment, as a value. MessagePack, never pickle.

Owns: the shape of the file, and what is left of a text that is not to be shown. Pure: no clock, no file, no socket.
Token ids are little-endian int32 bytes, times CLOCK_MONOTONIC nanoseconds of the group's host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from procengine.errors import ConfigError

__all__ = [
    "MAX_REQUEST_BYTES",
    "CrashRecord",
    "RecordedRequest",
    "RecordedTokens",
    "StepTable",
    "decode_record",
    "encode_requests",
    "recorded_body",
    "redacted",
]

RECORD_VERSION: Final = 1
MAX_REQUEST_BYTES: Final = 32 << 20
_PROMPT_FIELDS: Final = ("prompt", "prompt_token_ids", "messages", "tools")  # it is recorded as tokens
# Fields of a body and of its sampling parameters that say something about texts.
_TEXT_FIELDS: Final = (
    "stop", "bad_words", "structured_outputs", "cache_salt", "stop_token_ids", "allowed_token_ids", "logit_bias",
)  # fmt: skip
_DIGEST_BYTES: Final = 8


class RecordedTokens(msgspec.Struct, frozen=True):
    """A sequence of tokens, or only how many there are and a digest that is the same for the same tokens."""

    count: int
    ids: bytes | None = None
    digest: str = ""

    @classmethod
    def of(cls, token_ids: NDArray[np.int32]) -> RecordedTokens:
        """int32 [n]."""
        return cls(token_ids.size, token_ids.astype("<i4", copy=False).tobytes())

    def to_list(self) -> list[int]:
        """The ids. Raises ConfigError when they were redacted."""
        if self.ids is None:
            raise ConfigError("the record was written with --redact-prompts: there are no tokens in it to run again")
        token_ids: list[int] = np.frombuffer(self.ids, "<i4").tolist()
        return token_ids


class RecordedRequest(msgspec.Struct, frozen=True):
    """One choice of a request, as the frontend knew it.

    Attributes:
        body: what the client asked for, as accepted, without its prompt.
        seed: drawn for it by the frontend; counts where the body has none.
        ended: its finish reason; "" while it runs.
    """

    key: int
    index: int
    request_id: str
    workflow: str
    body: dict[str, Any]
    seed: int
    received_ns: int
    prompt: RecordedTokens
    output: RecordedTokens
    ended: str = ""
    error: str | None = None


class StepTable(msgspec.Struct, frozen=True):
    """Span records of one kind: int64 rows, `columns` names their values (`procengine.profiling.records`)."""

    columns: list[str]
    rows: bytes

    def to_rows(self) -> NDArray[np.int64]:
        """int64 [n, columns]."""
        return np.frombuffer(self.rows, "<i8").reshape(-1, len(self.columns))


class CrashRecord(msgspec.Struct, frozen=True):
    """The whole file."""

    version: int
    reason: str
    written_at: str  # wall clock, ISO 8601
    written_ns: int
    seconds: float  # of steps
    is_redacted: bool
    versions: dict[str, str]
    config: dict[str, Any]
    requests: list[RecordedRequest]
    steps: dict[str, StepTable]  # by the kind of record


_decode = msgspec.msgpack.Decoder(CrashRecord).decode


def decode_record(data: bytes, name: str) -> CrashRecord:
    """A file called `name` in errors.

    Raises:
        ConfigError: it is none, or of another version.
    """
    try:
        record = _decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: not a crash record: {error}") from error
    if record.version != RECORD_VERSION:
        raise ConfigError(f"{name}: a crash record of version {record.version}, this reads {RECORD_VERSION}")
    return record


def recorded_body(body: Any) -> dict[str, Any]:
    """A body as a map, without its prompt."""
    fields: dict[str, Any] = msgspec.to_builtins(body)
    return {name: value for name, value in fields.items() if name not in _PROMPT_FIELDS}


def encode_requests(
    requests: Iterable[RecordedRequest], redaction_key: bytes | None = None, max_bytes: int = MAX_REQUEST_BYTES
) -> bytes:
    """The newest requests, oldest first, in at most `max_bytes`; redacted if there is a key for it."""
    encode = msgspec.msgpack.Encoder().encode
    parts: list[bytes] = []
    size = 0
    for request in sorted(requests, key=lambda one: -one.key):
        part = encode(request if redaction_key is None else redacted(request, redaction_key))
        size += len(part)
        if size > max_bytes:
            break
        parts.append(part)
    return encode([msgspec.Raw(part) for part in reversed(parts)])


def redacted(request: RecordedRequest, key: bytes) -> RecordedRequest:
    """The same without text and tokens. Digests are keyed: equal ones are equal in this record, and mean nothing
    outside it."""
    return msgspec.structs.replace(
        request,
        body=dict(_redacted_fields(request.body, key)),
        prompt=_digested(request.prompt, key),
        output=_digested(request.output, key),
    )


def _redacted_fields(fields: dict[str, Any], key: bytes) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and name not in _TEXT_FIELDS:
            yield name, dict(_redacted_fields(value, key))
        elif name in _TEXT_FIELDS and value:
            data = msgspec.msgpack.encode(value)
            yield name, f"redacted: {len(data)} bytes, {_digest(data, key)}"
        else:
            yield name, value


def _digested(tokens: RecordedTokens, key: bytes) -> RecordedTokens:
    return RecordedTokens(tokens.count, None, _digest(tokens.ids or b"", key))


def _digest(data: bytes, key: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=key).hexdigest()
