"""Generation and embedding on one group: what each gets beside the other, and how fair that is. `scripts/bench mixed`.

Owns: the two loads and the figures. Never does: decide whose step goes next (`procengine.device_turns`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from dataclasses import dataclass, field

import numpy as np

from procengine import AsyncClient, SamplingParams
from procengine.engine_args import EngineArgs
from procengine.launch import launch_group
from procengine.resolve import resolve

_MAX_TOKENS = 128
_WARMUP_S = 3.0


@dataclass
class Counts:
    """What came in a phase."""

    output_tokens: int = 0
    embedded_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)  # between the messages of a stream
    seconds: float = 0.0


class Load:
    """Streams and embeddings under way, always as many; prompts are random and differ all."""

    def __init__(self, client: AsyncClient, vocab_size: int, seed: int = 0) -> None:
        self._client = client
        self._vocab_size = vocab_size
        self._draw = np.random.default_rng(seed)
        self.counts = Counts()
        self.is_over = False

    async def generate(self) -> None:
        params = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)
        while not self.is_over:
            before_s = None
            async for delta in self._client.stream(self._prompt(32), params):
                now_s = time.perf_counter()
                if before_s is not None:
                    self.counts.gaps_s.append(now_s - before_s)
                before_s = now_s
                self.counts.output_tokens += len(delta.token_ids)

    async def embed(self) -> None:
        while not self.is_over:
            prompt = self._prompt(int(self._draw.integers(16, 257)))
            await self._client.embed(prompt)
            self.counts.embedded_tokens += len(prompt)

    def _prompt(self, length: int) -> list[int]:
        return self._draw.integers(0, self._vocab_size, length).tolist()


async def measure(load: Load, num_streams: int, num_embeds: int, seconds: float) -> Counts:
    """One phase, after some seconds in which it gets going. What is under way at its end is waited for: an aborted step
    would be in the way of the next phase."""
    load.is_over = False
    tasks = [asyncio.create_task(load.generate()) for _ in range(num_streams)]
    tasks += [asyncio.create_task(load.embed()) for _ in range(num_embeds)]
    await asyncio.sleep(_WARMUP_S)
    load.counts, began_s = Counts(), time.perf_counter()
    await asyncio.sleep(seconds)
    found, load.counts = load.counts, Counts()
    found.seconds = time.perf_counter() - began_s
    load.is_over = True
    await asyncio.gather(*tasks)
    return found


def jain_index(*shares: float) -> float:
    """1: all get the same; 1/n: one gets everything (Jain, Chiu, Hawe 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share * share for share in shares))


async def run(args: argparse.Namespace) -> None:
    """Three phases, then the figures."""
    config = resolve(EngineArgs(model=args.model, threads=args.threads, name=f"bench-mixed-{os.getpid()}"))
    with launch_group(config) as group:
        async with AsyncClient(group.endpoint) as client:
            load = Load(client, config.model.vocab_size)
            alone = await measure(load, args.streams, 0, args.seconds)
            embedding = await measure(load, 0, args.embeds, args.seconds)
            both = await measure(load, args.streams, args.embeds, args.seconds)
    rows = [
        ("output tokens/s", alone.output_tokens / alone.seconds, both.output_tokens / both.seconds),
        ("embedded tokens/s", embedding.embedded_tokens / embedding.seconds, both.embedded_tokens / both.seconds),
    ]
    for name, one, beside in rows:
        print(f"{name:18} alone {one:9,.1f}   together {beside:9,.1f} ({beside / one:.0%})")
    shares = [beside / one for _, one, beside in rows]
    print(f"time between tokens, p99: alone {p99_ms(alone):.0f} ms, together {p99_ms(both):.0f} ms")
    print(f"fairness {jain_index(*shares):.3f} (Jain's index of the two shares), shares add up to {sum(shares):.2f}")


def p99_ms(counts: Counts) -> float:
    """Of the gaps in streams."""
    return float(np.percentile(counts.gaps_s, 99)) * 1e3 if counts.gaps_s else float("nan")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Generation and embedding on one group, alone and together.")
    parser.add_argument("model", help="a decoder's folder, file or alias")
    parser.add_argument("--streams", type=int, default=8, help="streams under way [8]")
    parser.add_argument("--embeds", type=int, default=16, help="texts of 16..256 tokens being embedded [16]")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase [10]")
    parser.add_argument("--threads", type=int, default=2, help="of the worker [2]")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
