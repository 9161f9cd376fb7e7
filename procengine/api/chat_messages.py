"""Messages of OpenAI's chat API as the group takes them: one text a turn. Pure.

Owns: contents that come in parts, and names of roles that templates do not know. Never does: render, or check what the
chat template checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from procengine.errors import InvalidRequestError

__all__ = ["plain_messages"]

_TEXT_KINDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same with every content a text (parts are joined by line breaks), and `developer` as the `system` it is.

    Raises:
        InvalidRequestError: a part is no text; names it.
    """
    if not messages:
        raise InvalidRequestError("messages: must not be empty")
    return [_plain(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _plain(field: str, message: Mapping[str, Any]) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{field}.role: must be a non-empty string, got {role!r}")
    plain = dict(message)
    if role == "developer":
        plain["role"] = "system"
    _check_calls(f"{field}.tool_calls", message.get("tool_calls"))
    content = message.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_text(f"{field}.content[{at}]", part) for at, part in enumerate(content))
    elif content is None and role == "assistant" and not message.get("tool_calls"):
        plain["content"] = message.get("refusal") or ""
    elif content is None and not message.get("tool_calls"):
        raise InvalidRequestError(f"{field}.content: must be given")
    elif content is not None and not isinstance(content, str):
        raise InvalidRequestError(f"{field}.content: must be a string or a list of parts, got {content!r}")
    return plain


def _check_calls(field: str, calls: Any) -> None:
    """What calls hold is the template's business; that they are some is not, since many templates would not look."""
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
        raise InvalidRequestError(f"{field}: must be a list of objects, got {calls!r}")


def _text(field: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRequestError(f"{field}: must be an object, got {part!r}")
    kind = part.get("type")
    key = _TEXT_KINDS.get(kind) if isinstance(kind, str) else None
    if key is None:
        raise InvalidRequestError(f"{field}.type: this model reads text only, got {kind!r}")
    text = part.get(key)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{field}.{key}: must be a string, got {text!r}")
    return text
