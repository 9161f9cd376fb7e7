"""Runs the requests of a crash record again on a group, and compares their tokens with the recorded ones.

Owns: what a recorded request becomes as a request, when it is sent, and what "the same" means. Never does: launch a
group, or print.

A request that had ended by itself must yield the same tokens; one that was running, or was ended from outside, must
begin with those that it had.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from procengine.async_client import AsyncClient
from procengine.config import EngineConfig
from procengine.crash.record import CrashRecord, RecordedRequest
from procengine.errors import ConfigError, ProcengineError
from procengine.sampling_params import SamplingParams

__all__ = ["Comparison", "recorded_config", "replay"]

_BY_ITSELF: Final = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One choice of a request, then and now. `is_equal` None: there is nothing to compare."""

    request_id: str
    index: int
    is_equal: bool | None
    text: str


def recorded_config(record: CrashRecord, name: str, run_dir: str) -> EngineConfig:
    """The configuration of the recorded group, for one that is called `name` and serves nobody else.

    Raises:
        ConfigError: another version of procengine wrote it.
    """
    changed = {"metrics": {}, "listen": None, "crash": {"dir": "", "seconds": 0.0}}
    group = {**record.config.get("group", {}), "name": name, "run_dir": run_dir}
    try:
        return msgspec.convert({**record.config, **changed, "group": group}, EngineConfig)
    except msgspec.ValidationError as error:
        wrote = record.versions.get("procengine", "?")
        raise ConfigError(
            f"the recorded configuration (of procengine {wrote}) is none of this version: {error}"
        ) from error


async def replay(record: CrashRecord, endpoint: str, *, keeps_times: bool) -> list[Comparison]:
    """Send all requests, at the recorded distances in time or at once, and compare.

    Raises:
        ConfigError: the record was redacted.
    """
    submissions = list(_submissions(record.requests))
    async with AsyncClient(endpoint) as client:
        started_ns = min((choices[0].received_ns for choices in submissions), default=0)
        pending = []
        for choices in submissions:
            wait_s = (choices[0].received_ns - started_ns) / 1e9 if keeps_times else 0.0
            pending.append(asyncio.ensure_future(_run(client, choices, wait_s)))
        return list(itertools.chain.from_iterable(await asyncio.gather(*pending)))


def _submissions(requests: Sequence[RecordedRequest]) -> Iterator[list[RecordedRequest]]:
    """Choices of one request together, in the order in which they were accepted."""
    ordered = sorted(requests, key=lambda one: one.key)
    for _, choices in itertools.groupby(ordered, key=lambda one: one.key - one.index):
        yield list(choices)


async def _run(client: AsyncClient, choices: list[RecordedRequest], wait_s: float) -> list[Comparison]:
    first = choices[0]
    if first.workflow != "generate":
        return [Comparison(first.request_id, 0, None, f"{first.workflow} yields no tokens")]
    prompt = {"prompt_token_ids": first.prompt.to_list()}
    body = first.body
    await asyncio.sleep(wait_s)
    try:
        output = await client.generate(
            prompt,
            _params(first),
            priority=body.get("priority", 0),
            cache_salt=body.get("cache_salt", ""),
            lora_name=body.get("lora_name", ""),
        )
    except ProcengineError as error:
        return [Comparison(one.request_id, one.index, one.ended == "error", f"failed: {error}") for one in choices]
    tokens = {choice.index: list(choice.token_ids) for choice in output.outputs}
    return [_compare(one, tokens.get(one.index, [])) for one in choices]


def _params(request: RecordedRequest) -> SamplingParams:
    """As they were, with the seed that was drawn; the prompt has been cut already."""
    fields: dict[str, Any] = dict(request.body.get("sampling_params", {}))
    if fields.get("seed") is None:
        fields["seed"] = request.seed
    fields |= {"output_kind": "delta", "stream_interval": 1, "truncate_prompt_tokens": None}
    return msgspec.convert(fields, SamplingParams)


def _compare(request: RecordedRequest, now: list[int]) -> Comparison:
    then = request.output.to_list()
    ended = request.ended or "running"
    same = next((at for at, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), min(len(then), len(now)))
    is_equal = same == len(then) and (len(now) == len(then) or request.ended not in _BY_ITSELF)
    if is_equal:
        return Comparison(request.request_id, request.index, True, f"{len(then)} tokens are the same ({ended})")
    was, is_now = (tokens[same] if same < len(tokens) else "none" for tokens in (then, now))
    return Comparison(request.request_id, request.index, False, f"token {same} was {was}, is {is_now} ({ended})")
