"""The report in a browser: it draws, complains of nothing, and asks for nothing from outside."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from procengine.profiling.capture import Capture, GroupFacts, Joined, join_capture
from procengine.profiling.figures import draw_figures
from procengine.profiling.html_report import html_report
from procengine.profiling.records import RecordKind
from procengine.profiling.report_data import report_data
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.summary import summarize
from tests.unit.profiling.synthetic import Recorder, random_run

NASTY_ID = "</script><script>console.error('escaped')</script>"


def browser() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def capture_of(tables: SpanTables) -> Joined:
    pids = {"supervisor": 1, "worker-0": 2, "worker-1": 3, "frontend": 4, "output": 5}
    return join_capture(Capture(GroupFacts("g", "m", pids, 100), 0, 10**9, tables, dict.fromkeys(pids, 0.1)))


def busy_capture() -> Joined:
    recorder = Recorder()
    for key, request_id in enumerate((NASTY_ID, "plain")):
        recorder.accept(key, request_id, received_ns=10, prepared_ns=20, accepted_ns=30)
        bounds = {"received_ns": 10, "prepared_ns": 20, "admitted_ns": 40, "first_token_ns": 10**6}
        ends = {"last_token_ns": 10**8, "detokenized_ns": 10**8 + 50, "delivered_ns": 10**8 + 90 - key}
        recorder.add(RecordKind.REQUEST_DONE, key, **bounds, **ends, num_output_tokens=5, finish_code=1)
    return capture_of(random_run(5).joined(recorder.tables()))


def page_of(joined: Joined) -> str:
    return html_report(report_data(joined, summarize(joined)))


def render(page: str, folder: Path, scheme: str = "light") -> tuple[str, list[str], Path]:
    """The document after its scripts ran, what they said on the console, and a picture."""
    path = browser()
    if path is None:
        pytest.skip("no Chromium or Chrome on the PATH to render the report with (Debian: apt install chromium)")
    (folder / "report.html").write_text(page, encoding="utf-8")
    picture = folder / "report.png"
    done = subprocess.run(
        [
            path,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
            *("--enable-logging=stderr", "--window-size=1240,3400", f"--user-data-dir={folder / 'browser'}"),
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            f"--screenshot={picture}",
            "--dump-dom",
            (folder / "report.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line], picture


def size_of(png: Path) -> tuple[int, int]:
    data = png.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_a_report_draws_everything_and_complains_of_nothing(tmp_path: Path) -> None:
    dom, console, picture = render(page_of(busy_capture()), tmp_path)
    assert console == []
    assert size_of(picture) == (1240, 3400) and picture.stat().st_size > 50_000  # a blank page has 15 kB
    for place in ("workers", "timeline", "requests", "waterfall", "cpu"):
        drawn = re.search(rf'<div class="panel" id="{place}"><svg.*?</svg>', dom, re.DOTALL)
        assert drawn and "<rect" in drawn[0], place
    assert dom.count('<path d="M') >= 6  # lines over time
    assert "worker: forward" in dom and "NaN" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)
    assert "&lt;/script&gt;" in dom  # the nasty id is text


def test_a_report_of_nothing_is_a_page_too(tmp_path: Path) -> None:
    dom, console, _ = render(page_of(capture_of(SpanTables.of([]))), tmp_path, "dark")
    assert console == []
    assert "No forward pass in this time" in dom


def test_the_console_is_heard(tmp_path: Path) -> None:
    """The check above can fail."""
    broken = page_of(busy_capture()).replace('"use strict";', '"use strict"; null.x;', 1)
    _, console, _ = render(broken, tmp_path)
    assert any("TypeError" in line for line in console)


def test_a_report_refers_to_nothing_outside() -> None:
    page = page_of(busy_capture())
    without_data = re.sub(r'<script type="application/json".*?</script>', "", page, flags=re.DOTALL)
    assert set(re.findall(r"\w+://[^\"'` ]*", without_data)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"\b(src|href)=|@import|url\(|fetch\(|XMLHttpRequest|import\(", without_data)
    assert page.count("</script>") == 2


def test_figures_are_pngs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="PNGs need the extra `plot`")
    joined = busy_capture()
    written = draw_figures(report_data(joined, summarize(joined)), tmp_path)
    assert [path.name for path in written] == [
        *("workers.png", "steps.png", "requests.png", "latency.png", "over_time.png")
    ]
    assert all(min(size_of(path)) > 200 for path in written)
    empty = capture_of(SpanTables.of([]))
    assert draw_figures(report_data(empty, summarize(empty)), tmp_path) == []
