"""instructor: a text becomes an object, by a tool and by a JSON schema.

OPENAI_BASE_URL and MODEL say where.
"""

import json
import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def extract(mode: instructor.Mode) -> dict[str, object]:
    """The person in a sentence."""
    client = instructor.from_openai(OpenAI(api_key="none"), mode=mode)
    person = client.chat.completions.create(
        model=os.environ["MODEL"],
        messages=[{"role": "user", "content": "Ada Lovelace is 36 years old. Who is she?"}],
        response_model=Person,
        temperature=0,
        max_tokens=60,
        max_retries=0,
    )
    return dict(person.model_dump())


print(json.dumps({mode.name: extract(mode) for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)}))
