"""`scripts/bench scaling --merge`: pieces become one table and one picture."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[3]
SHAPE = dict(
    zip(
        ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"),
        (30, 576, 1536, 9, 3, 64, 49152),
        strict=True,
    )
)


def piece(name: str, read_gb_per_s: float, pass_ms: float) -> dict[str, Any]:
    def row(sweep: str, batch_size: int, context_len: int) -> dict[str, Any]:
        own = {"format": name, "weight_bytes": 10**8, "pass_ms": pass_ms, "least_pass_ms": pass_ms}
        return {**own, "sweep": sweep, "batch_size": batch_size, "context_len": context_len}

    limits = {"read_gb_per_s": read_gb_per_s, "gop_per_s": {"bf16": 400.0, "int8": 800.0}}
    rows = [row("batch", 1, 148), row("batch", 8, 148), row("context", 1, 1024), row("context", 8, 1024)]
    return {"model": "tiny", "shape": SHAPE, "limits": limits, "threads": 2, "rows": rows}


def merge(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "bench_scaling.py"), "--merge", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_pieces_become_one_table_and_one_picture(tmp_path: Path) -> None:
    for name, value in (("a", piece("int8", 10.0, 20.0)), ("b", piece("bf16", 25.0, 40.0))):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    done = merge(tmp_path, "a.json", "b.json", "--plot", "scaling.svg", "--json", "all.json")
    assert done.returncode == 0, done.stderr
    assert "2 threads: 25.0 GB/s read" in done.stdout, "the better of the two"
    rows = json.loads((tmp_path / "all.json").read_text())["rows"]
    assert [row["format"] for row in rows] == ["int8"] * 4 + ["bf16"] * 4
    assert all(row["bound_ms"] >= 1e8 / 25e9 * 1e3 for row in rows)
    ElementTree.fromstring((tmp_path / "scaling.svg").read_text())
    assert (tmp_path / "scaling.svg").stat().st_size < 100_000


def test_other_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("{}")
    done = merge(tmp_path, "notes.json")
    assert done.returncode == 1 and done.stderr.startswith("error: --merge: notes.json cannot be read")
