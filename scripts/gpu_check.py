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
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_checks import packages
from gpu_checks.report import Budget, Report, Row

# Seconds on a GPU; together less than eight minutes. A part's own time ends with the whole run's.
SECONDS = {"kernels": 90, "greedy": 80, "steps": 110, "quantized": 70, "peer": 60, "group": 60}


def main() -> int:
    args = _arguments()
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    said = packages.make_importable(args.wheels)
    from gpu_checks.machine import Machine  # from here on torch is loaded

    machine = Machine(args.device)
    report = Report({"started": time.strftime("%Y-%m-%d %H:%M:%S"), **machine.facts, "notes": said})
    whole = Budget(args.seconds)
    for part in args.only:
        lacking = packages.missing(part)
        if lacking:
            report.add(Row(part, "everything", "skip", f"not installed: {', '.join(lacking)}"))
            continue
        budget = Budget(min(whole.left, SECONDS[part]))
        if not budget.has(1):
            report.add(Row(part, "everything", "skip", "no time left"))
            continue
        _run(part, args, machine, report, budget)
        report.write(args.json)
    report.facts["seconds"] = round(args.seconds - whole.left, 1)
    report.write(args.json)
    _print_end(report, args.json)
    return 1 if report.num_failed else 0


def _run(part: str, args: argparse.Namespace, machine: object, report: Report, budget: Budget) -> None:
    """One part. Whatever goes wrong in it is a row, and the next part has its turn."""
    try:
        _part(part, args)(machine, report, budget)
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        text = str(error).splitlines()[0] if str(error) else ""
        report.add(Row(part, "everything else", "FAIL", f"{type(error).__name__}: {text}"[:160]))


def _part(part: str, args: argparse.Namespace) -> Callable[..., None]:
    """Imported when its turn comes: what one part cannot import is no other one's trouble."""
    match part:
        case "kernels":
            from gpu_checks.kernels import check_kernels

            return check_kernels
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
    args = parser.parse_args()
    unknown = [part for part in args.only if part not in SECONDS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are: {', '.join(SECONDS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
