"""One run that says what the engine does on a GPU, in at most eight minutes.

    scripts/gpu_check                              everything
    scripts/gpu_check --only kernels,steps         some parts
    scripts/gpu_check --device cpu                 a dry run with tiny sizes, in Triton's interpreter

It needs torch (2.11 or newer, CUDA), triton (3.6 or newer) and numpy; nothing is installed and the network is not used.
`greedy` and `peer` need transformers too. `group` starts the whole group of processes and needs what pyproject.toml
lists as dependencies. What the machine lacks can be brought along as wheels, for its Python:

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \\
        -d wheels msgspec pyzmq tokenizers uvloop tqdm gguf llguidance jinja2 markupsafe
    scripts/gpu_check --wheels wheels

What is there already is used before what is brought. Without msgspec, the parts that run in one process still do.

parts:
  kernels    every Triton kernel against its reference, and its time against the memory's bandwidth
  greedy     the whole engine, in one process, against transformers: the same tokens in float32, as close in bfloat16 as
             can be; random weights of a 1B model, and SmolLM2 where it was pulled to or --smollm2 says
  steps      decode steps at batch 1 to 512: time, the device's idle time between them at depth 1, 2 and multi-step,
             tokens a second beside what the memory's bandwidth allows; at batch 256 with an int8 KV cache too
  quantized  the same with int8, int4 and fp8 weights, and how far their logits are off
  peer       transformers' continuous batching on the same work
  group      the group of processes, with its own clients
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_checks import packages
from gpu_checks.report import Budget, DeviceLostError, Report, Row

# Seconds on a GPU; together less than eight minutes. A part's own time ends with the whole run's.
SECONDS = {"kernels": 90, "greedy": 80, "steps": 110, "quantized": 70, "peer": 60, "group": 60}
_GRACE = 20  # seconds that a part may take beyond its own, before it is stopped


def main() -> int:
    """Each part is a process of its own: one that hangs or loses the device costs itself, and not those behind it."""
    args = _arguments()
    if args.child:
        return _child(args)
    report = Report({"started": time.strftime("%Y-%m-%d %H:%M:%S")}, args.json)
    whole = Budget(args.seconds)
    for part in args.only:
        budget = Budget(min(whole.left, SECONDS[part]))
        begin: int | None = 0
        while begin is not None:
            if not budget.has(1):
                report.add(Row(part, "everything" if not begin else "everything else", "skip", "no time left"))
                break
            begin = _spawn(part, begin, args, report, budget)
    report.facts["seconds"] = round(args.seconds - whole.left, 1)
    report.write()
    _print_end(report, args.json)
    return 1 if report.num_failed else 0


def _spawn(part: str, begin: int, args: argparse.Namespace, report: Report, budget: Budget) -> int | None:
    """Runs a part in a process, and takes its rows in. Where another one is to go on; None: nowhere."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        path = Path(folder) / "rows.json"
        own = ["--child", "--only", part, "--begin", str(begin), "--json", str(path), "--seconds", f"{budget.left:.0f}"]
        given = [(f"--{name}", getattr(args, name)) for name in ("device", "wheels", "smollm2")]
        options = [text for name, value in given if value is not None for text in (name, str(value))]
        command = [sys.executable, __file__, *own, *options]
        try:
            status: int | None = subprocess.run(command, check=False, timeout=budget.left + _GRACE).returncode
        except subprocess.TimeoutExpired:
            status = None
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"facts": {}, "rows": []}
    resume: int | None = found["facts"].pop("resume", None)
    report.facts.update(found["facts"])
    report.rows += [Row(**row) for row in found["rows"]]  # which were printed when they came
    if status != 0:
        last = found["rows"][-1]["what"] if found["rows"] else "nothing"
        how = f"stopped: it took {_GRACE} s too long" if status is None else f"its process ended with status {status}"
        report.add(Row(part, "everything else", "FAIL", f"{how}; the last that it did: {last}"))
    return resume


def _child(args: argparse.Namespace) -> int:
    """One part. Whatever goes wrong in it is a row. The status says only whether it came to its end."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(args.seconds + _GRACE - 3)  # where it hangs, before it is stopped
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    said, (part,) = packages.make_importable(args.wheels), args.only
    report = Report({"notes": said}, args.json)
    lacking = packages.missing(part)
    if lacking:
        report.add(Row(part, "everything", "skip", f"not installed: {', '.join(lacking)}"))
        return 0
    budget = Budget(args.seconds)
    try:
        from gpu_checks.machine import Machine  # from here on torch is loaded

        machine = Machine(args.device)
        report.facts = {**machine.facts, "notes": said}
        _part(part, args)(machine, report, budget)
    except Exception as error:  # noqa: BLE001
        if isinstance(error, DeviceLostError):
            report.facts["resume"] = error.begin
        else:
            traceback.print_exc()
        text = str(error).splitlines()[0] if str(error) else ""
        report.add(Row(part, "everything else", "FAIL", f"{type(error).__name__}: {text}"[:160]))
    report.write()
    return 0


def _part(part: str, args: argparse.Namespace) -> Callable[..., None]:
    """Imported when its turn comes: what one part cannot import is no other one's trouble."""
    match part:
        case "kernels":
            from gpu_checks.kernels import check_kernels

            return partial(check_kernels, begin=args.begin)
        case "greedy":
            from gpu_checks.greedy import check_greedy

            return partial(check_greedy, smollm2=args.smollm2)
        case "steps":
            from gpu_checks.steps import check_steps

            return check_steps
        case "quantized":
            from gpu_checks.quantized import check_quantized

            return check_quantized
        case "peer":
            from gpu_checks.peer import check_peer

            return check_peer
        case "group":
            from gpu_checks.group import check_group

            return check_group
        case _:
            raise ValueError(f"no such part: {part}")


def _print_end(report: Report, path: Path) -> None:
    facts = ", ".join(f"{name} {value}" for name, value in report.facts.items() if value)
    print(f"\n{facts}\n\n{report.table()}\n\n{len(report.rows)} rows, {report.num_failed} failed; written to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", default=",".join(SECONDS), type=lambda text: text.split(","), metavar="PART,...")
    parser.add_argument("--seconds", type=float, default=470, help="for all parts together (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="the file to write")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to import from")
    parser.add_argument("--smollm2", type=Path, help="a folder or file of SmolLM2-135M")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--begin", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    unknown = [part for part in args.only if part not in SECONDS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(SECONDS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
