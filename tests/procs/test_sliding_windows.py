"""A model of several groups of layers behind real sockets: frontend and worker agree on its block tables, and streams
outlive a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.procs.harness import Served, make_model
from tests.procs.raw_client import RawClient
from tests.procs.test_worker_death import SLOW, expect_exact, kill, submit_load, wait_restarted, wait_tokens


@pytest.fixture
def group(short_dir: Path, tmp_path: Path) -> Iterator[Served]:
    """Three groups of a layer each, two of which see 24 tokens, and a pool that 12 requests do not fit into."""
    folder = make_model(
        short_dir / "windows",
        architectures=["Qwen2ForCausalLM"],
        model_type="qwen2",
        num_hidden_layers=3,
        use_sliding_window=True,
        sliding_window=24,
        max_window_layers=1,
    )
    with Served(folder, tmp_path, *SLOW, "--block-size", "4", "--num-blocks", "260") as served:
        yield served.wait_ready()


def test_streams_outlive_a_worker(group: Served) -> None:
    old = dict(group.pids)
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names[:3], 40)
        kill(group)
        expect_exact(raw, names)
        wait_restarted(group, old["worker-0"])
        expect_exact(raw, submit_load(raw, "again"))
    assert "does not fit" not in group.log
