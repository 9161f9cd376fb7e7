"""What the APIs of conversations have in common: a body for the group, and deltas with the calls taken out. Pure.

Owns: putting an offer of tools, parameters and messages together. Never does: know the shape of a request or an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from procengine.client_bodies import Body, generate_body, messages_body
from procengine.messages import Delta
from procengine.outputs import stream_delta
from procengine.sampling_params import SamplingParams
from procengine.tool_calls.calls import ToolCallDelta
from procengine.tool_calls.offer import ToolOffer, make_offer
from procengine.tool_calls.reading import CallStream

__all__ = ["ContentStream", "conversation_body"]


def conversation_body(
    messages: Sequence[Mapping[str, Any]],
    params: SamplingParams,
    tools: Sequence[Mapping[str, Any]] | None,
    tool_choice: Any,
    tool_call_parser: str,
    priority: int | None = None,
    cache_salt: str | None = None,
    *,
    parallel: bool = True,
) -> tuple[Body, ToolOffer]:
    """What is sent to the group, and how calls are read from the answer.

    Raises:
        InvalidRequestError: names the field.
    """
    # Clients that always send both, with nothing to offer, mean nothing by it.
    choice = None if not tools and tool_choice in ("auto", "none") else tool_choice
    offer = make_offer(tools or None, choice, tool_call_parser, parallel=parallel)
    params = offer.params(params) if params.output_kind == "final" else offer.stream_params(params)
    return generate_body(messages_body(messages, offer.tools), params, priority or 0, cache_salt or ""), offer


class ContentStream:
    """Deltas of one request as text, calls, and why it ended. Without a style all is text."""

    def __init__(self, style: str | None, call_seed: str, *, parallel: bool = True) -> None:
        self._calls = None if style is None else CallStream(style, call_seed)
        self._parallel = parallel

    def read(self, delta: Delta) -> tuple[str, list[ToolCallDelta], str | None]:
        """What is new. The text comes before the calls."""
        if self._calls is None:
            return delta.text, [], delta.finish_reason
        shown = self._calls.read(stream_delta(delta))
        calls = shown.tool_calls or []
        return shown.text, calls if self._parallel else [one for one in calls if one.index == 0], shown.finish_reason
