"""Strict JSON in: a request's body as a typed value, or an error that names the field. Pure.

Owns: what counts as JSON (RFC 8259, UTF-8: no NaN, no number a double cannot hold, no half surrogate pair, no bytes
behind the end). A key that comes twice counts as its last value, as in other parsers. Never does: judge a value.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from procengine.api.errors import ApiError, bad_request

__all__ = ["decode_body", "json_bytes"]

_T = TypeVar("_T")
_PLACE: Final = re.compile(r"^(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`$", re.DOTALL)
_UNKNOWN: Final = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?$")
_MISSING: Final = re.compile(r"^Object missing required field `(?P<name>[^`]*)`(?: - at `\$\.?(?P<path>[^`]*)`)?$")
_encoder: Final = msgspec.json.Encoder()
json_bytes: Final = _encoder.encode


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """The typed value of a body.

    Raises:
        ApiError: 400, naming the field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise bad_request(_explain(str(error))) from error
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body nests too deep", code="invalid_json") from error


def _explain(message: str) -> str:
    """msgspec's words, with the field in front as in all our errors."""
    for pattern, text in ((_UNKNOWN, "there is no such field"), (_MISSING, "must be given")):
        if found := pattern.match(message):
            path = ".".join(filter(None, (found["path"], found["name"])))
            return f"{path}: {text}"
    if found := _PLACE.match(message):
        return f"{found['path'] or 'body'}: {found['what']}"
    return message
