"""Clients that people have, unmodified, each at a real task with SmolLM2 over HTTP. `scripts/clients` installs them.

Their scripts are in examples/clients: each is told where the server is by OPENAI_BASE_URL, and prints one JSON value.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from procengine.engine_args import EngineArgs
from procengine.launch import launch_group
from procengine.resolve import resolve
from tests.client_homes import python_of, script_of

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "clients"
MODEL = "smollm2"
CAPITAL = "The capital of France is Paris."
QUESTION = "What is the capital of France?"
LADY = "Ada Lovelace is 36 years old. Who is she?"


@pytest.fixture(scope="module")
def url(smollm2_gguf: Path) -> Iterator[str]:
    """Where a server of the model is, which has everything as the defaults have it."""
    options: dict[str, Any] = {"served_model_name": (MODEL,), "port": 0, "tool_call_parser": "hermes"}
    with tempfile.TemporaryDirectory(prefix="pe-", dir="/tmp") as run_dir, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", run_dir)
        with launch_group(resolve(EngineArgs(model=str(smollm2_gguf), **options))) as group:
            yield f"{group.ready['http']}/v1"


def run(url: str, *command: str | Path, **env: str) -> str:
    """What a command prints; it knows of the server, and of no other."""
    named = {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "MODEL": MODEL, "NO_PROXY": "127.0.0.1", **env}
    done = subprocess.run(
        command, check=False, env={**os.environ, **named}, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def last_line(url: str, *command: str | Path, **env: str) -> Any:
    """The value that a script prints."""
    return json.loads(run(url, *command, **env).splitlines()[-1])


def expect_person(person: dict[str, Any]) -> None:
    """Of the class's form. The age is what a small model makes of it."""
    assert set(person) == {"name", "age"} and "Lovelace" in person["name"] and type(person["age"]) is int, person


def test_anthropic(url: str) -> None:
    with anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        question: Any = [{"role": "user", "content": QUESTION}]
        fields: Any = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
        with client.messages.stream(messages=question, **fields) as stream:
            assert "".join(stream.text_stream) == CAPITAL
        properties = {"city": {"type": "string"}}
        schema: Any = {"type": "object", "properties": properties, "required": ["city"]}
        answer = client.messages.create(
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[{"name": "get_weather", "description": "Weather of a city", "input_schema": schema}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            **fields,
        )
    (block,) = answer.content
    assert block.type == "tool_use" and (block.name, block.input) == ("get_weather", {"city": "Paris"})
    assert answer.stop_reason == "tool_use"


def test_llm(url: str, tmp_path: Path) -> None:
    """Simon Willison's command line: models of its extra-openai-models.yaml, streamed, and by a schema."""
    llm = script_of("llm", "llm")
    place = {"model_id": "here", "model_name": MODEL, "api_base": url, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([place]))  # JSON is YAML
    ask = (llm, "-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "60")
    assert run(url, *ask, QUESTION, LLM_USER_PATH=str(tmp_path)).strip() == CAPITAL
    expect_person(json.loads(run(url, *ask, "--schema", "name, age int", LADY, LLM_USER_PATH=str(tmp_path))))


def test_langchain_openai(url: str) -> None:
    said = last_line(url, python_of("langchain-openai"), EXAMPLES / "langchain_tools.py")
    assert said["text"] == CAPITAL and said["pieces"] > 5
    expect_person(said["person"])
    assert [(call["name"], call["args"]) for call in said["calls"]] == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize(
    ("client", "script"), [("instructor", "instructor_person.py"), ("pydantic-ai", "pydantic_ai_person.py")]
)
def test_classes_of_pydantic(url: str, client: str, script: str) -> None:
    people = last_line(url, python_of(client), EXAMPLES / script)
    assert len(people) == 2
    for person in people.values():
        expect_person(person)


def test_litellm(url: str) -> None:
    script = EXAMPLES / "litellm_chat.py"
    said = last_line(url, python_of("litellm"), script, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert said == {"text": CAPITAL, "streamed": CAPITAL}


def test_openai_agents(url: str) -> None:
    said = last_line(url, python_of("openai-agents"), EXAMPLES / "openai_agents_tool.py")
    assert said["cities"] == ["Paris"] * 2 and set(said["answers"].values()) == {"It is sunny in Paris."}


def test_smolagents(url: str) -> None:
    said = last_line(url, python_of("smolagents"), EXAMPLES / "smolagents_chat.py")
    assert said == {"text": CAPITAL, "streamed": CAPITAL, "tool": "get_weather"}
