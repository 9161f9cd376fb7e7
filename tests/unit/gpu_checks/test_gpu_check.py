"""`scripts/gpu_check`: what it computes of a trace, and that the whole script runs, with tiny sizes on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("kernels", "greedy", "steps", "quantized", "peer", "group")
# Hides packages as if they were not installed. Python runs a module of this name when it starts.
_HIDING = """
import importlib.util, sys
HIDDEN = set({hidden!r})
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            stand_in = [one for one in sys.path if one.endswith("stand_in")]
            if name.partition(".")[0] == "msgspec" and stand_in:
                return importlib.machinery.PathFinder.find_spec(name, path or stand_in)
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
def find_spec(name, package=None, real=importlib.util.find_spec):
    try:
        return real(name, package)
    except ModuleNotFoundError:
        return None
importlib.util.find_spec = find_spec
sys.meta_path.insert(0, Hide())
"""


def load(name: str) -> Any:
    """A module of the script that imports none of its neighbours."""
    path = ROOT / "scripts" / "gpu_checks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    folder: Path, *arguments: str, hidden: tuple[str, ...] = (), scripts: Path = ROOT / "scripts"
) -> tuple[int, dict[str, Any], str]:
    """Exit status, the file's content, and what was printed."""
    (folder / "sitecustomize.py").write_text(_HIDING.format(hidden=hidden) if hidden else "")
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT)))}
    command: list[str | Path] = [scripts / "gpu_check", "--device", "cpu", "--json", "found.json", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert (folder / "found.json").is_file(), done.stderr[-3000:]
    return done.returncode, json.loads((folder / "found.json").read_text()), done.stdout


def test_idle_time_is_what_no_kernel_covers() -> None:
    module = load("timeline")
    passes = [(0, 10, "a"), (8, 20, "Memcpy HtoD"), (50, 60, "b"), (60, 70, "Memcpy DtoH"), (72, 80, "c")]
    found = module.timeline([module.Interval(*one) for one in reversed(passes)], 2)
    assert (found.whole, found.busy, found.idle) == (40, 24, 16)
    assert (found.longest_gap, found.h2d, found.d2h) == (30, 6, 5)
    assert found.idle_share == 0.4
    assert module.timeline([], 3).idle_share == 0


def test_a_table_and_its_failures() -> None:
    module = load("report")
    report = module.Report({})
    report.add(module.Row("steps", "batch 1", "ok", "5 us"))
    report.add(module.Row("kernels", "rope", "FAIL", "error 3"))
    assert report.table().splitlines()[2:] == [
        "| steps   | batch 1 | ok   | 5 us |",
        "| kernels | rope    | FAIL | error 3 |",
    ]
    assert report.num_failed == 1


def test_steps_on_a_cpu(tmp_path: Path) -> None:
    status, found, printed = run(tmp_path, "--only", "steps")
    assert status == 0, printed
    assert {row["part"] for row in found["rows"]} == {"steps"}
    assert all(row["status"] in ("ok", "info") for row in found["rows"]), printed
    assert printed.rstrip().endswith("0 failed; written to found.json")


def test_no_part_of_that_name(tmp_path: Path) -> None:
    command: list[str | Path] = [sys.executable, ROOT / "scripts" / "gpu_check.py", "--only", "steps,speed"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no such part: speed" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_parts_on_a_cpu(tmp_path: Path) -> None:
    status, found, printed = run(tmp_path)
    assert status == 0, printed
    assert {row["part"] for row in found["rows"]} == set(PARTS)
    skipped = [row["what"] for row in found["rows"] if row["status"] == "skip"]
    assert skipped == ["SmolLM2"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_with_torch_triton_and_numpy_alone(tmp_path: Path) -> None:
    hidden = ("msgspec", "zmq", "tokenizers", "transformers", "uvloop", "tqdm", "jinja2", "gguf", "llguidance")
    status, found, printed = run(tmp_path, hidden=(*hidden, "accelerate", "safetensors"))
    assert status == 0, printed
    ran = {row["part"] for row in found["rows"] if row["status"] == "ok"}
    assert ran == {"kernels", "steps", "quantized"}


@pytest.mark.slow
def test_a_part_that_fails_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    status, found, printed = run(tmp_path, "--only", "greedy,steps", "--smollm2", "nothing-here")
    assert status == 1, printed
    failed = [row for row in found["rows"] if row["status"] == "FAIL"]
    assert [row["part"] for row in failed] == ["greedy"]
    assert "nothing-here" in failed[0]["result"]
    assert any(row["part"] == "steps" for row in found["rows"])


def changed(folder: Path, module: str, old: str, new: str) -> Path:
    """The script with something else in one of its modules: its folder."""
    scripts = folder / "scripts"
    scripts.mkdir()
    for name in ("gpu_check", "gpu_check.py"):
        shutil.copy(ROOT / "scripts" / name, scripts)
    shutil.copytree(ROOT / "scripts/gpu_checks", scripts / "gpu_checks")
    text = (scripts / "gpu_checks" / module).read_text()
    assert text.count(old) == 1
    (scripts / "gpu_checks" / module).write_text(text.replace(old, new))
    return scripts


def test_a_part_whose_process_dies_is_a_row_and_the_next_one_runs(tmp_path: Path) -> None:
    die = "    import os\n    os.kill(os.getpid(), 9)\n    sizes = Sizes.of(machine.is_cuda)\n"
    scripts = changed(tmp_path, "kernels.py", "    sizes = Sizes.of(machine.is_cuda)\n", die)
    status, found, printed = run(tmp_path, "--only", "kernels,steps", scripts=scripts)
    assert status == 1, printed
    (failed,) = [row for row in found["rows"] if row["status"] == "FAIL"]
    assert (failed["part"], failed["result"]) == (
        "kernels",
        "its process ended with status -9; the last that it did: nothing",
    )
    assert any(row["part"] == "steps" and row["status"] == "ok" for row in found["rows"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_behind_a_kernel_that_loses_the_device_another_process_goes_on(tmp_path: Path) -> None:
    once = "import pathlib\n        at = pathlib.Path('lost')\n        return not at.exists() and at.touch() is None\n"
    scripts = changed(tmp_path, "machine.py", "return False\n", once)
    status, found, printed = run(tmp_path, "--only", "kernels", scripts=scripts)
    assert status == 1, printed
    assert "DeviceLostError" in found["rows"][1]["result"]
    others = [row["what"] for row in found["rows"] if row["status"] == "ok"]
    assert len(others) == len(found["rows"]) - 1 == len({*others}) > 15, "each kernel once"
