"""Requests to a mock group whose every token is known: what a fault must not change.

Owns: the checks of streams. Never does: inject anything.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Final

from procengine.client import Client
from procengine.messages import Delta
from procengine.sampling_params import SamplingParams
from tests.procs.harness import as_ids, key_of, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body

__all__ = ["Asker", "Load"]

_WAIT_S: Final = 40.0
_NUM_ASKED: Final = 6
_NUM_ASKED_TOKENS: Final = 60
_MOVED_BY: Final = 13  # more tokens than can be in flight: depth 3, 4 tokens a step


class Load:
    """Streams of one client: prompt lengths differ, each gets `max_tokens`."""

    def __init__(self, raw: RawClient, prefix: str, prompts: Sequence[list[int]], max_tokens: int) -> None:
        self._raw = raw
        self._max_tokens = max_tokens
        self._prompts = {f"{prefix}{number}": prompt for number, prompt in enumerate(prompts)}
        for name, prompt in self._prompts.items():
            raw.submit(name, body(prompt, max_tokens=max_tokens, cache_salt=prefix))  # nothing is cached

    @property
    def names(self) -> list[str]:
        """Of the requests."""
        return list(self._prompts)

    def counts(self) -> dict[str, int]:
        """Tokens that each has."""
        return {name: len(self._raw.token_ids(name)) for name in self._prompts}

    def wait_tokens(self, count: int) -> None:
        """Until each has so many."""
        self._wait_beyond(dict.fromkeys(self._prompts, count - 1), f"{count} tokens each")

    def wait_moved(self, before: dict[str, int]) -> float:
        """Until each is further than what may have been on its way then. Seconds that this took."""
        started_s = time.monotonic()
        goal = {name: min(count + _MOVED_BY, self._max_tokens) - 1 for name, count in before.items()}
        self._wait_beyond(goal, "all streams move again")
        return time.monotonic() - started_s

    def expect_exact(self) -> None:
        """Each has its own tokens and one end."""
        self._raw.wait_ends(*self._prompts, timeout_s=_WAIT_S)
        for name, prompt in self._prompts.items():
            end = self._raw.wait_end(name)
            assert isinstance(end, Delta) and end.finish_reason == "length", end
            self._expect_own_tokens(name, prompt, self._max_tokens)
            assert self._raw.num_ends(name) == 1

    def expect_ended_or_lost(self) -> None:
        """Each has one end, at the latest with the process that knew of it; no wrong token came."""
        self._raw.wait_ends(*self._prompts, timeout_s=_WAIT_S)
        for name, prompt in self._prompts.items():
            assert self._raw.num_ends(name) == 1
            self._expect_own_tokens(name, prompt, len(self._raw.token_ids(name)))

    def expect_told(self) -> None:
        """Each has ended once, or has not and the client heard that the group is lost; no wrong token came."""

        def is_told() -> bool:
            self._raw.receive(0.02)
            is_lost = any(getattr(m, "code", "") == "engine_dead" and not m.request_id for m in self._raw.messages)  # type: ignore[union-attr]
            return is_lost or all(map(self._raw.num_ends, self._prompts))

        wait_until(is_told, "the client hears that its requests are lost", _WAIT_S)
        for name, prompt in self._prompts.items():
            assert self._raw.num_ends(name) <= 1
            self._expect_own_tokens(name, prompt, len(self._raw.token_ids(name)))

    def _expect_own_tokens(self, name: str, prompt: list[int], count: int) -> None:
        deltas = self._raw.deltas(name)
        if deltas:
            assert self._raw.token_ids(name) == tokens_of(deltas[0].key, len(prompt), count)
            assert {delta.key for delta in deltas} == {deltas[0].key}

    def _wait_beyond(self, counts: dict[str, int], what: str) -> None:
        def is_reached() -> bool:
            self._raw.receive(0.01)
            return all(count > counts[name] for name, count in self.counts().items())

        wait_until(is_reached, what, _WAIT_S)


class Asker:
    """A client that waits for whole results, in a thread of its own. What is lost it sends again by itself."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._results: list[list[int]] = []
        self._thread = threading.Thread(target=self._ask)

    def start(self) -> None:
        """Ask, unless that was done."""
        if self._thread.ident is None:
            self._thread.start()

    def expect_exact(self) -> None:
        """All results came, with their own tokens."""
        self._thread.join(_WAIT_S)
        assert len(self._results) == _NUM_ASKED
        for token_ids in self._results:
            assert token_ids == tokens_of(key_of(token_ids[0], 4), 4, _NUM_ASKED_TOKENS)

    def _ask(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=_NUM_ASKED_TOKENS)
        outputs = self._client.generate([as_ids(4, at) for at in range(_NUM_ASKED)], params)
        self._results += [output.outputs[0].token_ids for output in outputs]
