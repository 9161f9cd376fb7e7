"""A soak run through the Python client, in which frontends die too: what they lose, clients send again by themselves.

Owns: the tasks and the checks of what they get. Never does: look below the client.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from typing import Final

from procengine import AsyncClient, SamplingParams
from procengine.errors import RequestLostError
from procengine.groups import find_group
from tests.procs.harness import Served, as_ids, children_of, key_of, tokens_of

__all__ = ["ClientSoak"]

_STUCK_S: Final = 60.0
_VICTIMS: Final = ("frontend", "frontend", "output", "worker-0", "worker-1")


class ClientSoak:
    """So many tasks, each asking one thing after the other; `counts` and `kills` say what happened."""

    def __init__(self, group: Served, seed: int, num_tasks: int = 48) -> None:
        self._group = group
        self._random = random.Random(seed)
        self._num_tasks = num_tasks
        self._is_over = False
        self._num_before = 0  # requests that had ended when somebody was killed
        self._all_have_moved = asyncio.Event()  # since then
        self.counts: Counter[str] = Counter()
        self.kills: Counter[str] = Counter()

    def run(self, duration_s: float, kill_every_s: float) -> None:
        """For so long."""
        asyncio.run(self._run(duration_s, kill_every_s))

    async def _run(self, duration_s: float, kill_every_s: float) -> None:
        loop = asyncio.get_running_loop()
        end_s = loop.time() + duration_s
        async with (
            AsyncClient(self._group.endpoint) as first,
            AsyncClient(self._group.endpoint) as second,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(self._num_tasks):
                tasks.create_task(self._ask_on_and_on(first if number % 2 else second))
            while loop.time() < end_s:
                await asyncio.sleep(kill_every_s * self._random.uniform(0.5, 1.5))
                await asyncio.wait_for(self._all_have_moved.wait(), _STUCK_S)
                self._kill_somebody()
            self._is_over = True

    async def _ask_on_and_on(self, client: AsyncClient) -> None:
        while not self._is_over:
            prompt = as_ids(self._random.randint(1, 40), self._random.randrange(64))
            params = SamplingParams(temperature=0.0, max_tokens=self._random.randint(1, 40))
            ask = self._random.choice((self._take_whole, self._take_stream))
            await asyncio.wait_for(ask(client, prompt, params), _STUCK_S)

    async def _take_whole(self, client: AsyncClient, prompt: list[int], params: SamplingParams) -> None:
        """A frontend may die of it as often as it likes: nothing of it has been seen."""
        output = (await client.generate(prompt, params)).outputs[0]
        assert output.finish_reason == "length"
        self._expect_own(output.token_ids, prompt, params.max_tokens or 0)
        self._count("whole")

    async def _take_stream(self, client: AsyncClient, prompt: list[int], params: SamplingParams) -> None:
        """It goes on over the deaths of all but the frontend; if that dies, it ends with an error, or had not begun."""
        token_ids: list[int] = []
        try:
            async for delta in client.stream(prompt, params):
                token_ids += delta.token_ids
        except RequestLostError:
            assert self.kills["frontend"], "lost, though no frontend has died"
            assert token_ids, "nothing of it had been seen"
            self._expect_own(token_ids, prompt, len(token_ids))
            self._count("lost stream")
            return
        self._expect_own(token_ids, prompt, params.max_tokens or 0)
        self._count("stream")

    @staticmethod
    def _expect_own(token_ids: list[int], prompt: list[int], count: int) -> None:
        key = key_of(token_ids[0], len(prompt))
        assert token_ids == tokens_of(key, len(prompt), count)

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1
        if self.counts.total() >= self._num_before + 2 * self._num_tasks:
            self._all_have_moved.set()

    def _kill_somebody(self) -> None:
        pids = find_group(self._group.name).pids
        victim = self._random.choice(_VICTIMS)
        if pids[victim] in children_of(self._group.pid):
            self.kills[victim] += 1
            os.kill(pids[victim], signal.SIGKILL)
        self._num_before = self.counts.total()
        self._all_have_moved.clear()
