"""An engine of a comparison, and what came of it. Pure values.

Owns: `EngineSpec` and `EngineResult`. Never does: run an engine (`process`, `session`) or compare (`comparison`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

__all__ = ["OTHERS", "EngineResult", "EngineSpec"]

OTHERS: Final = "others_cores"  # among the figures of a run: cores that neither the engine nor the comparison used


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine to run.

    Attributes:
        name: "openvino-int8".
        weights: class that it is compared in: "4-bit", "8-bit", "bf16" or "fp32".
        workloads: those it can run; others are left out.
        is_ours: whether it is procengine, and so compared with the others.
        environment: added to ours.
    """

    name: str
    weights: str
    command: Sequence[str]
    workloads: frozenset[str]
    is_ours: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class EngineResult:
    """What came of one engine.

    Attributes:
        idle_share: cores it used with nothing to do; `is_stopped_when_idle` if that was too much.
        runs_by_workload: figures of each run; None where it did not run.
        error: why it dropped out.
    """

    spec: EngineSpec
    version: str = ""
    precision: str = ""
    ready_s: float = 0.0
    idle_share: float = 0.0
    is_stopped_when_idle: bool = False
    peak_rss_mib: float = 0.0
    runs_by_workload: dict[str, list[dict[str, Any] | None]] = field(default_factory=dict)
    error: str | None = None
