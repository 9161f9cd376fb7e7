"""The style of a model from its chat template, in the words of real ones, and from its special tokens."""

from __future__ import annotations

import pytest

from procengine.tool_calls import STYLES
from procengine.tool_calls.detect import detect_style, mentions_tools

QWEN = """{%- if tools %}{{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- "</tools>\\n\\nFor each call, return a json object within <tool_call></tool_call> XML tags" }}{%- endif %}"""
MISTRAL = """{%- if tools is not none and message == user_messages[-1] %}{{- "[AVAILABLE_TOOLS] [" }}{%- endif %}
{%- if message.tool_calls is defined %}{{- "[TOOL_CALLS] [" }}{%- endif %}"""
LLAMA_31 = """{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{{- "<|python_tag|>" + tool_call.name + ".call(" }}"""
LLAMA_32 = """{%- if tools is not none %}{{- 'Respond with {"name": function name, "parameters": dictionary}.' }}
{%- endif %}{{- "<|start_header_id|>user<|end_header_id|>\\n\\n" }}{{- '"parameters": ' }}"""
QWEN_CODER = """{%- if tools %}{{- "<tool_call>\\n<function=example_function_name>\\n<parameter=a>" }}{%- endif %}"""
CHATML = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + message['content'] }}{% endfor %}"
BARE = "{{ tools | tojson }}{{ messages | tojson }}"


@pytest.mark.parametrize(
    ("template", "special_tokens", "style"),
    [
        (QWEN, set(), "hermes"),
        (MISTRAL, set(), "mistral"),
        (LLAMA_31, set(), "llama3"),
        (LLAMA_32, set(), "llama3"),
        (LLAMA_32, {"<tool_call>"}, "hermes"),
        (BARE, {"<tool_call>", "</tool_call>", "<|im_end|>"}, "hermes"),
        (BARE, {"[TOOL_CALLS]", "</s>"}, "mistral"),
        (BARE, {"<|python_tag|>"}, "llama3"),
        (BARE, {"<|im_end|>"}, None),
        (QWEN, {"[TOOL_CALLS]"}, "hermes"),  # what the template writes counts for more
        (QWEN_CODER, {"<tool_call>"}, None),  # calls of another form within the same tags
        (CHATML, {"<tool_call>"}, None),  # the model never sees the tools
        (CHATML + "{# toolset #}", {"<tool_call>"}, None),
        (None, {"<tool_call>"}, None),
        ("", {"<tool_call>"}, None),
    ],
)
def test_style(template: str | None, special_tokens: set[str], style: str | None) -> None:
    assert detect_style(template, special_tokens) == style
    assert style is None or style in STYLES
    assert style is None or mentions_tools(template)
