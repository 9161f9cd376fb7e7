"""smolagents: its model class, whole and streamed, and with a tool.

OPENAI_BASE_URL and MODEL say where.
"""

import json
import os

from smolagents import OpenAIModel, tool


@tool
def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: its name.
    """
    return f"sunny in {city}"


model = OpenAIModel(
    os.environ["MODEL"], api_base=os.environ["OPENAI_BASE_URL"], api_key="none", temperature=0, max_tokens=60
)
question = [{"role": "user", "content": "What is the capital of France?"}]
weather = [{"role": "user", "content": "What is the weather in Paris?"}]

text = model.generate(question).content
pieces = [piece.content or "" for piece in model.generate_stream(question)]
calls = model.generate(weather, tools_to_call_from=[get_weather]).tool_calls
print(json.dumps({"text": text, "streamed": "".join(pieces), "tool": calls[0].function.name}))
