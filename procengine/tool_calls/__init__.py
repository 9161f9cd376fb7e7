"""Tool calls in the text of a generation, found while it streams. Pure.

Owns: what callers may use. Never does: decide whether tools were offered, or run one.
"""

from __future__ import annotations

from procengine.tool_calls.calls import (
    FunctionCall,
    FunctionCallDelta,
    ParsedDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallParser,
)
from procengine.tool_calls.registry import STYLES, parse, tool_call_parser

__all__ = [
    "STYLES",
    "FunctionCall",
    "FunctionCallDelta",
    "ParsedDelta",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "parse",
    "tool_call_parser",
]
