"""Prometheus' text format, version 0.0.4: metric families as values, and as text.

Owns: the format (https://prometheus.io/docs/instrumenting/exposition_formats/). Never does: know a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from procengine.profiling.histogram import Histogram

__all__ = ["CONTENT_TYPE", "Family", "render"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Labels = Mapping[str, str]


@dataclass(slots=True)
class Family:
    """A metric with all its label values. The name of a counter ends in `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: list[tuple[str, Labels, float]] = field(default_factory=list)  # suffix of the name, labels, value

    def add(self, value: float, **labels: str) -> Family:
        """One more value."""
        self.samples.append(("", labels, value))
        return self

    def add_histogram(self, histogram: Histogram, **labels: str) -> Family:
        """One more distribution."""
        total = 0
        bounds = [*map(_number, histogram.bounds.tolist()), "+Inf"]
        for bound, count in zip(bounds, histogram.counts.tolist(), strict=True):
            total += count
            self.samples.append(("_bucket", {**labels, "le": bound}, total))
        self.samples.append(("_sum", labels, histogram.sum))
        self.samples.append(("_count", labels, total))
        return self


def render(families: Iterable[Family], constant: Labels) -> str:
    """The families as text, with `constant` labels on every sample. A family without samples is left out."""
    lines = []
    for family in families:
        if family.samples:
            lines.append(f"# HELP {family.name} {_escape_help(family.help)}")
            lines.append(f"# TYPE {family.name} {family.kind}")
            for suffix, labels, value in family.samples:
                lines.append(f"{family.name}{suffix}{_labels({**constant, **labels})} {_number(value)}")
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escape(text: str) -> str:
    return _escape_help(text).replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    """Whole numbers without a point or an exponent, however large: counters are exact."""
    return str(int(value)) if float(value).is_integer() else repr(float(value))
