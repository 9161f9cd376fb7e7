"""Which peers there are, what each needs, and which of them are installed.

Owns: the list, and where things lie below PEERS_HOME (docs/PERFORMANCE.md, *Peers*, says how they get there). Never
does: install or start one.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from procengine.bench.peers.loads import WORKLOADS
from procengine.bench.peers.results import EngineSpec
from procengine.errors import ConfigError

SCRIPTS = Path(__file__).resolve().parent
OFFLINE = frozenset({"w1", "w2", "w3", "w4"})
ALL = frozenset(WORKLOADS)


@dataclass(frozen=True, slots=True)
class Peer:
    """A peer.

    Attributes:
        venv: folder below PEERS_HOME.
        module: what the venv must hold.
        model: file or folder below PEERS_HOME; "" is the GGUF file that procengine runs.
        arguments: of its script, after the model.
    """

    name: str
    weights: str
    venv: str
    module: str
    model: str
    workloads: frozenset[str]
    arguments: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        """How it is driven."""
        return SCRIPTS / f"{self.module.removesuffix('_genai')}_engine.py"

    def python(self, home: Path) -> Path:
        """Its interpreter; ours, if it has no environment of its own and ours holds it."""
        own = home / self.venv / "bin" / "python"
        return own if own.exists() or importlib.util.find_spec(self.module) is None else Path(sys.executable)

    def missing(self, home: Path) -> str | None:
        """What there is not; None if it can run."""
        python = self.python(home)
        if not python.exists():
            return f"there is no {python}"
        if python != Path(sys.executable) and not any(
            python.parents[1].glob(f"lib/python*/site-packages/{self.module}")
        ):
            return f"{python} has no {self.module}"
        return None if (home / self.model).exists() else f"there is no {home / self.model}"

    def spec(self, home: Path, gguf: Path) -> EngineSpec:
        """How to run it."""
        model = home / self.model if self.model else gguf
        command = [str(self.python(home)), str(self.script), str(model), *self.arguments]
        return EngineSpec(self.name, self.weights, command, self.workloads)


# It shares no prefix between sequences: w4 would be w2 with longer prompts, for a minute.
_NO_PREFIX = ALL - {"w4"}
PEERS = (
    Peer("openvino-int8", "8-bit", "ov", "openvino_genai", "ov-int8", ALL, ("int8",)),
    Peer("openvino-bf16", "bf16", "ov", "openvino_genai", "ov-fp16", ALL, ("bf16",)),
    Peer("llama-cpp-q4_1", "4-bit", "lcp", "llama_cpp", "", _NO_PREFIX, ("Q4_1",)),
    Peer("llama-cpp-q4_k", "4-bit", "lcp", "llama_cpp", "gguf/q4_k.gguf", _NO_PREFIX, ("Q4_K",)),
    Peer("llama-cpp-q8_0", "8-bit", "lcp", "llama_cpp", "gguf/q8_0.gguf", _NO_PREFIX, ("Q8_0",)),
    Peer("llama-cpp-bf16", "bf16", "lcp", "llama_cpp", "gguf/bf16.gguf", _NO_PREFIX, ("bf16",)),
    Peer("vllm-bf16", "bf16", "vllm", "vllm", "smollm2", ALL),
    Peer("transformers-bf16", "bf16", "hf", "transformers", "smollm2", OFFLINE),
)


def choose(names: Iterable[str] | None) -> list[Peer]:
    """Peers by name; all of them if none is named.

    Raises:
        ConfigError: there is none of that name.
    """
    peer_by_name = {peer.name: peer for peer in PEERS}
    for name in names or ():
        if name not in peer_by_name:
            raise ConfigError(f"--peers: {name!r} is none of {', '.join(peer_by_name)}")
    return [peer_by_name[name] for name in names] if names is not None else list(PEERS)
