"""Two configurations, or two source trees, run by turns.

Owns: the two sides and their runs, each a `procengine bench` of its own in JSON. Never does: statistics (`ratios`).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from procengine.bench.ratios import compare_metric, figure_at, pair_order
from procengine.errors import ConfigError, ProcengineError

__all__ = ["Side", "compare", "make_side", "table"]

_CLI: Final = "import sys; from procengine.cli.main import main; sys.exit(main())"
_WHERE: Final = "import pathlib, procengine; print(pathlib.Path(procengine.__file__).resolve().parent)"


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two.

    Attributes:
        options: added to the command line that both share; where an option is in both, the last one counts.
        path: the source tree to run; None is the installed one.
    """

    name: str
    options: tuple[str, ...]
    path: Path | None

    def environment(self) -> dict[str, str]:
        """Ours, with the source tree before everything else."""
        if self.path is None:
            return dict(os.environ)
        others = os.environ.get("PYTHONPATH", "")
        return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(self.path), others)))}


def make_side(name: str, options: str, path: Path | None) -> Side:
    """A side whose source tree, if it has one, is what Python will import.

    Raises:
        ConfigError: the options have an open quote, or the tree holds no procengine that is imported from there.
    """
    try:
        words = tuple(shlex.split(options))
    except ValueError as error:
        raise ConfigError(f"--{name.lower()}: {options!r} cannot be read as options: {error}") from error
    side = Side(name, words, path.resolve() if path is not None else None)
    if side.path is not None:
        _check_tree(side, side.path)
    return side


def compare(
    command: Sequence[str],
    sides: tuple[Side, Side],
    num_pairs: int,
    metrics: Sequence[str],
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run `procengine bench COMMAND --json` for A and B by turns; ratios of `metrics`, and all figures of all runs.

    Raises:
        ProcengineError: a run failed.
        ConfigError: a metric is not in the figures.
    """
    side_by_name = {side.name: side for side in sides}
    runs: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
    order = pair_order(num_pairs)
    for number, name in enumerate(order, 1):
        figures = _run(side_by_name[name], command)
        shown = ", ".join(f"{metric} {figure_at(figures, metric):,.3f}" for metric in metrics)
        progress(f"run {number} of {len(order)}, {name}: {shown}")
        runs[name].append(figures)
    a, b = (side.name for side in sides)
    return {
        "command": list(command),
        "sides": {side.name: {"options": side.options, "path": str(side.path or "")} for side in sides},
        "num_pairs": num_pairs,
        "metrics": {metric: compare_metric(_series(runs[a], metric), _series(runs[b], metric)) for metric in metrics},
        "runs": runs,
    }


def table(result: dict[str, Any]) -> str:
    """The comparison for people."""
    headings = ("metric", "A median", "B median", "B/A", "min", "max", "95 % interval")
    rows = [headings]
    for metric, found in result["metrics"].items():
        interval = found["ratio_ci95"]
        rows.append(
            (
                metric,
                f"{found['a_median']:,.3f}",
                f"{found['b_median']:,.3f}",
                *(_ratio(found[f"ratio_{name}"]) for name in ("median", "min", "max")),
                "-" if interval is None else " .. ".join(map(_ratio, interval)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    sides = [f"{name}: {_describe(**side)}" for name, side in result["sides"].items()]
    return "\n".join([*sides, f"{result['num_pairs']} pairs of runs, by turns", "", *lines])


def _describe(options: Sequence[str], path: str) -> str:
    return " ".join(options or ["no options of its own"]) + (f", in {path}" if path else "")


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _series(runs: Sequence[dict[str, Any]], metric: str) -> list[float]:
    return [figure_at(figures, metric) for figures in runs]


def _run(side: Side, command: Sequence[str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CLI, "bench", *command, *side.options, "--json"],
        env=side.environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n  ".join(done.stderr.strip().splitlines()[-10:]) or "it said nothing"
        raise ProcengineError(f"a run of {side.name} ended with status {done.returncode}:\n  {last}")
    try:
        figures: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        raise ProcengineError(f"a run of {side.name} printed no JSON object: {error}") from error
    return figures


def _check_tree(side: Side, path: Path) -> None:
    option = f"--{side.name.lower()}-path"
    if not (path / "procengine" / "__init__.py").is_file():
        raise ConfigError(f"{option}: there is no procengine/__init__.py in {path}")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _WHERE], env=side.environment(), capture_output=True, text=True, check=False
    )
    found = done.stdout.strip()
    if found != str(path / "procengine"):
        raise ConfigError(f"{option}: Python imports procengine from {found or 'nowhere'}, not from {path}")
