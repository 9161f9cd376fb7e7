"""Metrics as they are served; the documents that name them: docs/OBSERVABILITY.md and the dashboard."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from procengine.messages import ProcessStatus, Status
from procengine.profiling.exposition import Family, render
from procengine.profiling.group_totals import GroupTotals
from procengine.profiling.metric_families import GroupFacts, families_of, used_share
from procengine.profiling.records import RecordKind
from procengine.profiling.request_ledger import WorkerGauges
from tests.unit.profiling.synthetic import Recorder, random_run

DOCS = Path(__file__).resolve().parents[3] / "docs"
FACTS = GroupFacts(64, {"block_size": "16", "device": "cpu"})
S = 10**9


def families() -> list[Family]:
    """Of a group with two workers that did some of everything."""
    totals = GroupTotals(num_workers=2)
    totals.add_tables(random_run(3))
    recorder = Recorder()
    recorder.add(RecordKind.REQUEST_DONE, 0, finish_code=1, num_output_tokens=2, delivered_ns=5)
    recorder.add(RecordKind.FLUSHED, 0, started_ns=1, detokenized_ns=2, delivered_ns=3)
    totals.add_tables(recorder.tables(num_lost=3))
    processes = [ProcessStatus("supervisor", 0, 1, "ready", 9.0, 100, 0.5, 0)]
    processes += [ProcessStatus("worker", rank, 2 + rank, "silent", 9.0, 100, 0.5, 2, 1) for rank in range(2)]
    processes += [ProcessStatus("frontend", 0, 4, "ready", 9.0, 100, 0.5, 4)]
    totals.add_status(Status("g", "m", processes), 100 * S)
    return list(families_of(totals, FACTS, 103 * S))


@cache
def values() -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels, read by Prometheus' own parser."""
    text = render(families(), {})
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples), "two samples of one name and the same labels"
    return found


def at(name: str, **labels: str) -> float:
    return values()[f"procengine:{name}", frozenset(labels.items())]


def test_every_family_is_read_back_with_its_kind() -> None:
    made = families()
    assert all(family.samples for family in made)
    assert len({family.name for family in made}) == len(made)
    read = {family.name: family.type for family in text_string_to_metric_families(render(made, {"group": "g"}))}
    assert read == {f.name.removesuffix("_total") if f.kind == "counter" else f.name: f.kind for f in made}
    for family in made:
        assert (family.kind == "counter") <= family.name.endswith("_total")
        assert family.help.endswith(".")


def test_values_are_those_of_the_group() -> None:
    assert at("process_up", process="supervisor") == 1 and at("process_up", process="worker-1") == 0
    assert at("process_heartbeat_age_seconds", process="frontend") == 3.0
    assert at("process_restarts_total", process="worker-0") == 1
    assert at("channel_depth", channel="requests") == 4 and at("channel_depth", channel="steps-1") == 2
    assert at("lost_span_records_total") == 3
    assert at("request_success_total", finished_reason="stop") == 1
    assert at("e2e_request_latency_seconds_count") == 1
    assert at("cache_config_info", block_size="16", num_gpu_blocks="64", device="cpu") == 1


def test_a_process_that_never_answered_has_no_heartbeat() -> None:
    assert ("procengine:process_heartbeat_age_seconds", frozenset({("process", "worker-0")})) not in values()


@pytest.mark.parametrize(
    ("free", "num_blocks", "share"), [(None, 8, 0.0), (8, 8, 0.0), (2, 8, 0.75), (0, 0, 0.0), (0, 8, 1.0)]
)
def test_used_share(free: int | None, num_blocks: int, share: float) -> None:
    assert used_share(WorkerGauges(1, 0, 0, free), num_blocks) == share


# --- the documents


def test_every_metric_is_in_the_document_and_no_other() -> None:
    text = (DOCS / "OBSERVABILITY.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", text, re.MULTILINE))
    assert rows == {family.name.removeprefix("procengine:"): family.kind for family in families()}


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "grafana" / "procengine.json").read_text(encoding="utf-8"))
    return found


def sample_names() -> set[str]:
    return {name for name, _ in values()}


def test_dashboard_asks_only_for_what_is_served(dashboard: dict[str, Any]) -> None:
    labels = {label for _, pairs in values() for label, _ in pairs} | {"group", "model_name"}
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    asked += [variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable]
    assert len(asked) > 20
    for expr in asked:
        names = re.findall(r"procengine:\w+", expr)
        assert names and set(names) <= sample_names(), expr
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}"), expr
        grouped = {name.strip() for inside in re.findall(r"by \(([^)]*)\)", expr) for name in inside.split(",")}
        selected = set(re.findall(r"(\w+)=~", expr))
        assert grouped | selected <= labels, expr


def test_dashboard_shows_labels_that_its_queries_keep(dashboard: dict[str, Any]) -> None:
    kept_by_all = {label for _, pairs in values() for label, _ in pairs}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= kept_by_all
            if grouped := re.search(r"sum by \(([^)]*)\)", target["expr"]):
                assert shown <= {name.strip() for name in grouped[1].split(",")}


def test_dashboard_has_the_shape_that_grafana_loads(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] >= 36 and dashboard["title"] and dashboard["uid"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["w"] > 0 and place["h"] > 0 and 0 <= place["x"] <= 24 - place["w"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, f"{panel['title']} lies over another panel"
        cells |= own
        assert panel["type"] in ("row", "stat", "timeseries")
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert panel["title"] and panel["targets"]
            refs = [target["refId"] for target in panel["targets"]]
            assert len(set(refs)) == len(refs)
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps([panel.get("targets") for panel in panels])))
    assert used <= names | {"__rate_interval"}


def test_every_family_has_a_panel_or_is_named_here(dashboard: dict[str, Any]) -> None:
    text = json.dumps(dashboard["panels"])
    unseen = {family.name for family in families() if family.name not in text}
    assert unseen == {
        "procengine:request_time_per_output_token_seconds",
        "procengine:request_inference_time_seconds",
        "procengine:process_uptime_seconds",
        "procengine:cache_config_info",
    }
