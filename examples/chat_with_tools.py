"""A model that asks for a function to be called. `python examples/chat_with_tools.py [GROUP]`.

It takes a model whose chat template knows tools: `procengine serve Qwen/Qwen3-0.6B`, for instance.
"""

import json
import sys
from typing import Any

from procengine import Client, SamplingParams

GROUP = sys.argv[1] if len(sys.argv) > 1 else None
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 30}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def get_weather(city: str) -> str:
    """Stands for a real one."""
    return f"18 degrees and sunny in {city}"


if __name__ == "__main__":
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    params = SamplingParams(temperature=0, max_tokens=200)
    with Client(GROUP) as client:
        # "required": it is a call in any case. With "auto", the model may answer by itself.
        answer = client.chat(messages, params, tools=TOOLS, tool_choice="required").outputs[0]
        calls = answer.tool_calls or []
        messages.append(
            {
                "role": "assistant",
                "content": answer.text,
                "tool_calls": [
                    {
                        "id": call.id,
                        "type": "function",
                        "function": {"name": call.function.name, "arguments": call.function.arguments},
                    }
                    for call in calls
                ],
            }
        )
        for call in calls:
            result = get_weather(**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(client.chat(messages, params, tools=TOOLS, tool_choice="none").outputs[0].text)
