"""Requests of all kinds, for long, while processes are killed: none is lost, none doubled, and nothing grows.

`scripts/soak --minutes N` runs it for longer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from procengine.detokenizer import Detokenizer
from procengine.tokenizer import Tokenizer
from tests.procs.harness import Served, wait_until
from tests.procs.soak import Soak, SoakReport
from tests.procs.soak_clients import ClientSoak
from tests.procs.soak_requests import TextOf

OPTIONS = (
    *("--workers", 2, "--max-num-seqs", 48, "--num-blocks", 500, "--mock-step-ms", 0.5),
    *("--max-restarts", 65536, "--restart-window", 0.1, "--step-timeout", 2),
)
MAX_BYTES_PER_REQUEST = 100  # of resident memory, in the second half of a run


@pytest.fixture
def text_of(model: Path) -> TextOf:
    return Detokenizer(Tokenizer.load(model / "tokenizer.json")).text


def run(group: Served, text_of: TextOf, duration_s: float, min_requests: int, kill_every_s: float) -> SoakReport:
    soak = Soak(group, text_of, seed=int(os.environ.get("SOAK_SEED", "1")))
    report = soak.run(duration_s, min_requests, kill_every_s)
    print(report)
    assert max(report.files) == report.files[0], f"files: {report.files}"
    assert max(report.children) <= 4, f"children: {report.children}"
    for role, fds in report.fds.items():
        # A dead process's and its successor's may be open side by side for a moment.
        assert max(fds[-len(fds) // 4 :]) <= max(fds[: len(fds) // 4]) + 8, f"{role}: descriptors {fds}"
    with group.client() as client:
        assert client.stats()["num_unfinished"] == 0
    assert "Traceback" not in group.log
    return report


def test_random_kills_lose_nothing(serve: Callable[..., Served], text_of: TextOf) -> None:
    report = run(serve(*OPTIONS), text_of, duration_s=3, min_requests=1200, kill_every_s=0.6)
    assert sum(report.kills.values()) >= 2


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_hundred_thousand_requests_under_random_kills(serve: Callable[..., Served], text_of: TextOf) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "0"))
    duration_s, min_requests = (60 * minutes, 0) if minutes else (0, 100_000)
    report = run(serve(*OPTIONS), text_of, duration_s, min_requests, kill_every_s=3)
    for role in report.rss:
        assert report.bytes_per_request(role) < MAX_BYTES_PER_REQUEST, f"{role}: {report.rss[role]}"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_clients_get_all_that_they_had_not_seen_though_frontends_die(serve: Callable[..., Served]) -> None:
    """Frontends, output processes and workers, in any order: a whole result comes whole, a stream comes or is lost."""
    group = serve(*OPTIONS)
    soak = ClientSoak(group, seed=int(os.environ.get("SOAK_SEED", "1")))
    soak.run(60 * float(os.environ.get("SOAK_MINUTES", "0.7")), kill_every_s=1.5)
    print(dict(soak.counts), dict(soak.kills))
    assert soak.kills["frontend"] >= 3 and soak.counts["whole"] > 1000
    with group.client() as client:
        wait_until(lambda: client.stats()["num_unfinished"] == 0, "nothing runs on", 30)
    assert "Traceback" not in group.log
