"""Embedding beside other engines: the same texts, by turns. `scripts/bench embed --peers-python PATH` (see --help).

Owns: the texts, the turns and the table. Never does: know an engine (`scripts/peers/embedders.py`).
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from procengine.client import Client
from procengine.engine_args import EngineArgs
from procengine.groups import find_group
from procengine.launch import launch_group
from procengine.profiling.capture import Joined, join_capture
from procengine.profiling.recording import Recording
from procengine.resolve import resolve
from procengine.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_PEERS = ("sentence-transformers", "onnxruntime", "openvino")
_MIN_TOKENS, _MAX_TOKENS = 16, 256


class Run(NamedTuple):
    """One engine's turn. `idle` is the share of the time in which our worker had nothing to run, by cause."""

    seconds: float
    vectors: NDArray[np.float32]
    idle: dict[str, float]


class Ours:
    """A group of our own and a client on it."""

    def __init__(self, model: str, threads: int, exits: contextlib.ExitStack) -> None:
        self.config = resolve(EngineArgs(model=model, threads=threads, name=f"compare-embedders-{os.getpid()}"))
        group = exits.enter_context(launch_group(self.config))
        self._group = find_group(group.endpoint)
        self._client = exits.enter_context(Client(group.endpoint))

    def run(self, texts: list[str]) -> Run:
        recording = Recording(self._group)
        began_ns = time.monotonic_ns()
        outputs = self._client.embed(texts, truncate_prompt_tokens=-1)  # as the others do
        ended_ns = time.monotonic_ns()
        joined = join_capture(recording.stop())
        vectors = np.array([output.embedding for output in outputs], np.float32)
        return Run((ended_ns - began_ns) / 1e9, vectors, idle_shares(joined, began_ns, ended_ns))


def idle_shares(joined: Joined, began_ns: int, ended_ns: int) -> dict[str, float]:
    """Of the time of a call, by what the worker waited for; with what is before its first pass and after its last."""
    found = joined.bubbles.ns_by_cause
    found["before the first pass"] = int(joined.passes["started_ns"].min()) - began_ns
    found["after the last pass"] = ended_ns - int(joined.passes["done_ns"].max())
    return {cause: ns / (ended_ns - began_ns) for cause, ns in found.items() if ns}


class Peer:
    """Another engine in its own environment."""

    def __init__(self, python: str, name: str, folder: str, threads: int) -> None:
        command = [python, str(_ROOT / "scripts/peers/embedders.py"), name, folder, str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = self._answer()["version"]

    def run(self, texts: list[str]) -> Run:
        assert self._process.stdin is not None
        print(json.dumps({"texts": texts}), file=self._process.stdin, flush=True)
        answer = self._answer()
        vectors = np.frombuffer(base64.b64decode(answer["vectors"]), "<f4").reshape(len(texts), -1)
        return Run(answer["seconds"], vectors, {})

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{' '.join(self._process.args)} ended with {self._process.wait()}")  # type: ignore[arg-type]
        answer: dict[str, Any] = json.loads(line)
        return answer


def make_texts(tokenizer: Tokenizer, count: int, seed: int) -> list[str]:
    """Pieces of the repository's documents of 16 to 256 tokens, uniformly."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((_ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(source, add_special_tokens=False)
    draw = np.random.default_rng(seed)
    sizes = draw.integers(_MIN_TOKENS - 2, _MAX_TOKENS - 1, count)
    starts = draw.integers(0, len(ids) - _MAX_TOKENS, count)
    return [tokenizer.decode(ids[at : at + size]) for at, size in zip(starts.tolist(), sizes.tolist(), strict=True)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Embedding texts of 16..256 tokens beside other engines, by turns.")
    parser.add_argument("--model", default="minilm-l6-v2", help="an encoder's folder or alias [minilm-l6-v2]")
    parser.add_argument("--num-texts", type=int, default=2000, help="texts of a run [2000]")
    parser.add_argument("--runs", type=int, default=3, help="runs of each engine [3]")
    parser.add_argument("--threads", type=int, default=2, help="of each engine [2]")
    parser.add_argument("--peers-python", help="the interpreter of an environment with the peers; none: ours alone")
    parser.add_argument("--peers", default=",".join(_PEERS), help=f"which of them [{','.join(_PEERS)}]")
    args = parser.parse_args()
    with contextlib.ExitStack() as exits:
        ours = Ours(args.model, args.threads, exits)
        engines: dict[str, Ours | Peer] = {"procengine": ours}
        for name in args.peers.split(",") if args.peers_python else ():
            peer = Peer(args.peers_python, name, ours.config.model.path, args.threads)
            exits.callback(peer.close)
            engines[f"{name} {peer.version}"] = peer
        tokenizer = Tokenizer.load(ours.config.model.tokenizer_path)
        for engine in engines.values():
            engine.run(make_texts(tokenizer, 64, seed=999))
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for number in range(args.runs):
            texts = make_texts(tokenizer, args.num_texts, seed=number)
            for name in [*engines] if number % 2 == 0 else [*engines][::-1]:
                runs[name].append(engines[name].run(texts))
                print(f"run {number + 1}, {name}: {args.num_texts / runs[name][-1].seconds:,.1f} texts/s", flush=True)
    report(runs, args.num_texts)


def report(runs: dict[str, list[Run]], num_texts: int) -> None:
    """Medians, ratios of neighbouring runs with their range, how far vectors turn, and what our worker waited for."""
    own = runs["procengine"]
    for name, theirs in runs.items():
        ratios = [other.seconds / one.seconds for one, other in zip(own, theirs, strict=True)]
        turned = max(float((1 - _cosines(one, other)).max()) for one, other in zip(own, theirs, strict=True))
        rate = num_texts / median(run.seconds for run in theirs)
        print(f"{name:32} {rate:8,.1f} texts/s, ours {median(ratios):.2f} times as many", end="")
        print(f" ({min(ratios):.2f}-{max(ratios):.2f}), 1 - cosine {turned:.1e} at most")
    idle = [sum(run.idle.values()) for run in own]
    causes = {cause: median(run.idle.get(cause, 0.0) for run in own) for run in own for cause in run.idle}
    listed = ", ".join(f"{cause} {share:.2%}" for cause, share in sorted(causes.items(), key=lambda item: -item[1]))
    print(f"worker idle {median(idle):.2%} (at most {max(idle):.2%}): {listed}")


def _cosines(one: Run, other: Run) -> Any:
    a, b = one.vectors.astype(np.float64), other.vectors.astype(np.float64)
    return (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


if __name__ == "__main__":
    main()
