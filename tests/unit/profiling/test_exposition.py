"""The text of metrics, read back by Prometheus' own client."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families

from procengine.profiling.exposition import Family, render
from procengine.profiling.histogram import Histogram

AWKWARD = 'a "quoted" \\ back\nslash, {curly}=é'


def parse(text: str) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Samples by family."""
    return {
        family.name: [(sample.name, sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def test_counters_and_gauges_with_labels_and_large_numbers() -> None:
    counter = Family("procengine:tokens_total", "counter", "Help with \\ and\na line.").add(2**53 + 1, reason=AWKWARD)
    gauge = Family("procengine:share", "gauge", "A share.").add(0.1).add(3, engine="1")
    found = parse(render([counter, gauge], {"group": "g"}))
    assert found["procengine:tokens"] == [("procengine:tokens_total", {"group": "g", "reason": AWKWARD}, 2**53 + 1)]
    assert found["procengine:share"] == [
        ("procengine:share", {"group": "g"}, 0.1),
        ("procengine:share", {"group": "g", "engine": "1"}, 3.0),
    ]
    assert str(2**53 + 1) in render([counter], {})


def test_histograms_are_cumulative_and_end_at_infinity() -> None:
    histogram = Histogram((0.005, 1, 2.5))
    histogram.observe([0.001, 0.5, 0.5, 100.0])
    text = render([Family("procengine:wait_seconds", "histogram", "A wait.").add_histogram(histogram, hop="x")], {})
    (samples,) = parse(text).values()
    buckets = {labels["le"]: value for name, labels, value in samples if name.endswith("_bucket")}
    assert buckets == {"0.005": 1, "1": 3, "2.5": 3, "+Inf": 4}
    rest = {name: value for name, labels, value in samples if "le" not in labels}
    assert rest.keys() == {"procengine:wait_seconds_sum", "procengine:wait_seconds_count"}
    assert rest["procengine:wait_seconds_count"] == 4
    assert math.isclose(rest["procengine:wait_seconds_sum"], 101.001)


def test_a_family_without_samples_is_left_out() -> None:
    assert render([Family("procengine:x", "gauge", "X.")], {}) == "\n"
