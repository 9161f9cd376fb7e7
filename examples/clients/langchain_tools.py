"""langchain-openai: a streamed answer, a structured one, and a call of a tool.

OPENAI_BASE_URL and MODEL say where.
"""

import json
import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


chat = ChatOpenAI(model=os.environ["MODEL"], temperature=0, max_tokens=60, api_key="none")

pieces = [piece.content for piece in chat.stream("What is the capital of France?")]
person = chat.with_structured_output(Person).invoke("Ada Lovelace is 36 years old. Who is she?")
calls = chat.bind_tools([get_weather], tool_choice="get_weather").invoke("What is the weather in Paris?").tool_calls

print(json.dumps({"text": "".join(pieces), "pieces": len(pieces), "person": person.model_dump(), "calls": calls}))
