"""What `procengine top` shows, drawn without a terminal."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console, RenderableType

from procengine.cli.top_view import draw, draw_waiting, sparkline
from procengine.profiling.group_frame import Frame, ProcessLine, WorkerLoad
from procengine.profiling.window import Percentiles, WindowFigures, WorkerShare

NOTHING = Percentiles()
WINDOW = WindowFigures(
    seconds=5.0,
    output_tokens=12345.6,
    prompt_tokens=789.0,
    requests=3.25,
    steps=456.0,
    rows=11.7,
    ttft_ms=Percentiles(12.34, 250.4, 0.05),
    itl_ms=NOTHING,
    e2e_ms=Percentiles(1.0, 2.0, 3.0),
    queue_ms=Percentiles(4.0, 5.0, 6.0),
    prefix_hit_rate=0.25,
    hops_ms={"to worker": Percentiles(0.071, 0.1, 1.25), "to output": NOTHING},
    workers=[WorkerShare(0, 0.75, 0.2, {"result hop": 0.15, "build": 0.05}), WorkerShare(1, 0.5, 0.0, {})],
)
FRAME = Frame(
    group="demo",
    model="some-model",
    uptime_s=3725.0,
    window=WINDOW,
    workers=[WorkerLoad(0, 14, 3, 2, 0.36), WorkerLoad(1, 2, 0, 1, 0.99)],
    processes=[
        ProcessLine("supervisor", 100, "ready", 0.01, 40 << 20, 3725.0, 0, 0, 0.5),
        ProcessLine("worker-0", 101, "silent", None, 2 << 30, 3725.0, 2, 1, 12.0),
    ],
    totals={"requests": {"stop": 10, "length": 2, "abort": 1, "error": 0}, "preemptions": 7},
    num_lost_records=0,
)


def text_of(picture: RenderableType, width: int = 100) -> str:
    file = io.StringIO()
    Console(width=width, file=file, no_color=True).print(picture)
    return file.getvalue()


def test_all_figures_are_there() -> None:
    text = " ".join(text_of(draw(FRAME, [1.0, 2.0], 120, is_live=True), 120).split())
    for part in (
        "demo some-model up 1h02m",
        "12,346 tok/s",
        "prefix hits 25%",
        "3.2 /s 13 ended, 1 abort, 7 preempted",
        "11.7 rows each",
        "16 3 waiting",
        "first token 12.3 250 0.050",
        "next token - - -",
        "75% busy 20% bubble 2 in flight KV 36%",
        "50% busy 0% bubble 1 in flight KV 99%",
        "bubbles wait for result hop 75% build 25%",
        "to worker 71/1,250 to output -/-",
        "silent 12 s",
        "2,048 MB",
        "q quit",
    ):
        assert part in text, part


def test_nothing_is_wider_than_the_terminal_and_it_fits_an_old_one() -> None:
    for width in (40, 60, 80, 100, 200):
        lines = text_of(draw(FRAME, [5.0] * 100, width, is_live=True), width).splitlines()
        assert max(map(len, lines)) <= width
        if width == 80:
            assert len(lines) <= 24


def test_what_is_wrong_is_said_at_the_top() -> None:
    supervisor = msgspec.structs.replace(FRAME.processes[0], heartbeat_age_s=9.0)
    frame = msgspec.structs.replace(FRAME, num_lost_records=5, processes=[supervisor])
    first = text_of(draw(frame, (), 120, is_live=False), 120).splitlines()[0]
    assert "5 records lost" in first and "supervisor silent for 9 s" in first and "q quit" not in first


def test_no_cause_is_named_where_there_is_no_bubble() -> None:
    window = msgspec.structs.replace(WINDOW, workers=[WorkerShare(0, 0.9, 0.004, {"build": 0.004}), WINDOW.workers[1]])
    assert "wait for" not in text_of(draw(msgspec.structs.replace(FRAME, window=window), (), 100, is_live=True))


def test_before_the_first_status_there_are_no_processes() -> None:
    assert "demo" in text_of(draw(msgspec.structs.replace(FRAME, processes=[]), (), 100, is_live=True))


@pytest.mark.parametrize(
    ("values", "line"), [([], ""), ([0, 0], "▁▁"), ([0, 5, 10], "▁▅█"), ([7], "█"), ([1, 100], "▁█")]
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


def test_waiting_says_for_what() -> None:
    text = text_of(draw_waiting("no group is running", "demo"))
    assert "group demo has ended" in text and "waiting for group" in text and "no group is running" in text
    assert "has ended" not in text_of(draw_waiting("x", None))
