"""Generation and embedding on one group, the one always with more work than the device can do: the other goes on. No
test here looks at a clock; that both get the same time is `tests/unit/test_device_turns.py`'s."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from procengine import AsyncClient, SamplingParams
from tests.procs.harness import Served

_PROMPT = [5] * 200  # an embedding step each
_OUTSTANDING = 8
_Ask = Callable[[AsyncClient], Awaitable[int]]


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    return serve_module("--mock-step-ms", 1, "--max-num-batched-tokens", 256, name="mixed")


async def embed(client: AsyncClient) -> int:
    return len((await client.embed(_PROMPT)).embedding)


async def generate(client: AsyncClient) -> int:
    output = await client.generate([3, 4], SamplingParams(max_tokens=50, ignore_eos=True))
    return len(output.outputs[0].token_ids)


async def ask_until(client: AsyncClient, ask: _Ask, is_over: asyncio.Event, has_begun: asyncio.Event) -> None:
    while not is_over.is_set():
        await ask(client)
        has_begun.set()


async def answers_beside(group: Served, crowd: _Ask, ask: _Ask) -> list[int]:
    """What `ask` gives, three times, while `_OUTSTANDING` of `crowd` are under way from beginning to end."""
    async with AsyncClient(group.endpoint) as client:
        is_over, has_begun = asyncio.Event(), asyncio.Event()
        others = [asyncio.create_task(ask_until(client, crowd, is_over, has_begun)) for _ in range(_OUTSTANDING)]
        await has_begun.wait()
        answers = [await ask(client) for _ in range(3)]
        is_over.set()
        await asyncio.gather(*others)
        return answers


def test_generation_goes_on_while_there_is_always_more_to_embed(group: Served) -> None:
    assert asyncio.run(answers_beside(group, embed, generate)) == [50] * 3


def test_embedding_goes_on_while_there_is_always_more_to_generate(group: Served) -> None:
    size = asyncio.run(answers_beside(group, generate, embed))
    assert len(size) == 3 and min(size) > 0
