"""pydantic-ai: structured output by the model's JSON schema, and by a tool.

OPENAI_BASE_URL and MODEL say where.
"""

import json
import os

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """A person."""

    name: str
    age: int


provider = OpenAIProvider(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
model = OpenAIChatModel(os.environ["MODEL"], provider=provider, settings={"temperature": 0, "max_tokens": 60})

people = {}
for name, output_type in (("native", NativeOutput(Person)), ("tool", ToolOutput(Person))):
    answer = Agent(model, output_type=output_type).run_sync("Ada Lovelace is 36 years old. Who is she?")
    people[name] = answer.output.model_dump()
print(json.dumps(people))
