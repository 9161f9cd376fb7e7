"""`procengine profile`: where the time of a group goes: of a running one, or of a private one under a load.

Owns: the arguments, and the files of a report. Never does: compute or draw (`profiling`), or make the load
(`profile_load`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from procengine.cli.engine_args import add_engine_arguments, given_flags
from procengine.cli.examples import add_examples
from procengine.cli.profile_load import LOAD_OPTIONS, add_load_arguments, check_load_arguments, record_load
from procengine.cli.trace import check_seconds, say_what_is_missing
from procengine.errors import ConfigError
from procengine.groups import find_group

if TYPE_CHECKING:
    from procengine.profiling.capture import Capture

__all__ = ["add_arguments", "run"]

_SECONDS: Final = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show where the time goes: how busy the workers were and what they waited for, how long each stage of a step\n"
        "and of a request took, and the CPU of each process. Without MODEL, a running group is watched for a while,\n"
        "which does not slow it down; with MODEL, a private group is launched and given a set of prompts. With -o, a\n"
        "report is written that opens in any browser. docs/PROFILING.md shows how to read it."
    )
    add_examples(
        parser,
        ("procengine profile --seconds 10", "a running group"),
        (
            "procengine profile smollm2-135m --num-prompts 32 -o report",
            "a private one; a report for a browser",
        ),
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as for `serve`; none: watch a running group")
    parser.add_argument("--group", metavar="GROUP", help="name or endpoint of a running group [the only one]")
    parser.add_argument("--seconds", type=float, metavar="X", help=f"how long to watch a running group [{_SECONDS:g}]")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="write summary.json, report.html and (with the extra `plot`) PNGs into this folder",
    )
    parser.add_argument("--json", action="store_true", help="print summary.json instead of tables")
    add_load_arguments(parser)
    add_engine_arguments(parser, mentions_model=False)


def run(args: argparse.Namespace) -> int:
    """Record, summarize, print, write."""
    _check(args)
    capture = record_load(args) if args.model is not None else _record_running(args)
    # Here, not above: `procengine --help` need not load numpy.
    from procengine.profiling.capture import join_capture
    from procengine.profiling.summary import summarize
    from procengine.profiling.summary_text import summary_text

    say_what_is_missing(capture)
    joined = join_capture(capture)
    summary = summarize(joined)
    print(msgspec.json.encode(summary).decode() if args.json else summary_text(summary))
    if args.output is not None:
        from procengine.profiling.report_data import report_data

        _write_report(report_data(joined, summary), args.output)
    return 0


# --- recording


def _record_running(args: argparse.Namespace) -> Capture:
    from procengine.profiling.recording import Recording, record_for

    seconds = _SECONDS if args.seconds is None else args.seconds
    group = find_group(args.group)
    recording = Recording(group)
    print(f"watching group {group.name} for {seconds:g} s ...", file=sys.stderr, flush=True)
    return record_for(recording, seconds)


# --- arguments


def _check(args: argparse.Namespace) -> None:
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"--output: {args.output} is a file; name a folder")
    if args.model is not None:
        _refuse_given(args, ["group"], "MODEL launches a group of its own; give one of the two")
        _refuse_given(args, ["seconds"], "belongs to a running group; a load lasts until all prompts are answered")
        check_load_arguments(args)
        return
    _refuse_given(args, LOAD_OPTIONS, "belongs to a load of our own; give MODEL")
    for flag in given_flags(args):
        raise ConfigError(f"{flag}: belongs to a group that is launched; give MODEL")
    if args.seconds is not None:
        check_seconds(args.seconds)


def _refuse_given(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: {why}")


# --- report


def _write_report(data: dict[str, Any], folder: Path) -> None:
    from procengine.profiling.figures import can_draw, draw_figures
    from procengine.profiling.html_report import html_report

    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").write_bytes(msgspec.json.format(msgspec.json.encode(data["summary"])))
        (folder / "report.html").write_text(html_report(data), encoding="utf-8")
        written = ["summary.json", "report.html"]
        if can_draw():
            written += [path.name for path in draw_figures(data, folder)]
    except OSError as error:
        raise ConfigError(f"--output: {folder} cannot be written: {error.strerror}") from error
    print(f"\n{folder}: {', '.join(written)}", file=sys.stderr)
    if not can_draw():
        print("no PNGs: matplotlib is not installed (pip install 'procengine[plot]')", file=sys.stderr)
