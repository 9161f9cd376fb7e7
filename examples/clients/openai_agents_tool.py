"""openai-agents: an agent that must use a tool, over chat completions and over responses.

OPENAI_BASE_URL and MODEL say where.
"""

import asyncio
import json
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

seen: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    seen.append(city)
    return f"It is sunny in {city}."


async def ask(kind: type[OpenAIChatCompletionsModel | OpenAIResponsesModel]) -> str:
    """One run: the model calls the tool, and its result is the answer."""
    agent = Agent(
        name="weather",
        instructions="Use the tool.",
        tools=[get_weather],
        tool_use_behavior="stop_on_first_tool",
        model=kind(model=os.environ["MODEL"], openai_client=AsyncOpenAI(api_key="none")),
        model_settings=ModelSettings(temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False),
    )
    return str((await Runner.run(agent, "What is the weather in Paris?")).final_output)


async def main() -> None:
    """Both."""
    set_tracing_disabled(True)
    answers = {kind.__name__: await ask(kind) for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel)}
    print(json.dumps({"answers": answers, "cities": seen}))


asyncio.run(main())
