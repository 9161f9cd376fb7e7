"""Which style of tool calls a model was trained on, from its chat template and its special tokens. Pure.

Owns: the marks of each style. Never does: read a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["detect_style", "mentions_tools"]

# A style's marker, which its templates write and its tokenizers have as one token. The first that is there decides.
_STYLE_BY_MARKER = {"[TOOL_CALLS]": "mistral", "<tool_call>": "hermes", "<|python_tag|>": "llama3"}
_OTHER_FORM = "<function="  # Qwen3-Coder writes hermes' tags, and no JSON between them
_LLAMA_HEADER = "<|start_header_id|>"  # templates of Llama 3.2 show the form of a call, and write no marker
_TOOLS = re.compile(r"\btools\b")


def mentions_tools(chat_template: str | None) -> bool:
    """Whether a template shows tools to the model at all."""
    return chat_template is not None and _TOOLS.search(chat_template) is not None


def detect_style(chat_template: str | None, special_tokens: Collection[str]) -> str | None:
    """The name of a style in the registry, or None: the template shows no tools, or is of a style that is not known.

    chat_template: Jinja source. special_tokens: texts of the tokenizer's added tokens.
    """
    if chat_template is None or not mentions_tools(chat_template) or _OTHER_FORM in chat_template:
        return None
    for place in (chat_template, special_tokens):
        for marker, style in _STYLE_BY_MARKER.items():
            if marker in place:
                return style
    is_llama = _LLAMA_HEADER in chat_template and '"parameters"' in chat_template
    return "llama3" if is_llama else None
