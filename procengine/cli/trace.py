"""`procengine trace`: what a running group did in the next seconds, as a trace file.

Owns: the arguments and what is said about the file. Never does: draw the trace (`profiling.chrome_trace`).
"""

from __future__ import annotations

import argparse
import gzip
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError
from procengine.groups import find_group

if TYPE_CHECKING:
    from procengine.profiling.capture import Capture, Joined

__all__ = ["MAX_SECONDS", "add_arguments", "check_seconds", "run", "say_what_is_missing"]

MAX_SECONDS: Final = 600.0
_GZIP_LEVEL: Final = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Write what a running group does in the next seconds to a trace file: a track for each thread of each\n"
        "process, requests with their stages, arrows from plan to text, queues, and the gaps of the workers with what\n"
        "they waited for. The group notes this anyway and is not slowed down. Open the file at https://ui.perfetto.dev\n"
        "or in chrome://tracing. Ctrl-C ends early and writes what there is. docs/PROFILING.md shows how to read it."
    )
    add_examples(
        parser,
        ("procengine trace", "the next 5 seconds, into trace.json.gz"),
        ("procengine trace prod --seconds 1 -o prod.json", "one second"),
        ("procengine trace --request 7f3a --past --seconds 0", "one request's life, afterwards"),
    )
    parser.add_argument(
        "group", metavar="GROUP", nargs="?", help="name or endpoint of the group [the only running one]"
    )
    parser.add_argument("--seconds", type=float, default=5.0, metavar="X", help="how long to watch [5]")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("trace.json.gz"),
        metavar="FILE",
        help="compressed if its name ends in .gz [trace.json.gz]",
    )
    parser.add_argument(
        "--request",
        metavar="ID",
        help="only one request's life, and the steps it was in; looks into the past too",
    )
    parser.add_argument(
        "--past", action="store_true", help="begin with what the group still remembers (see --span-records of `serve`)"
    )


def run(args: argparse.Namespace) -> int:
    """Watch, write, say what is in it."""
    check_seconds(args.seconds, at_least=0.0 if args.past or args.request else None)
    _check_output(args.output)
    group = find_group(args.group)
    # Here, not above: `procengine --help` need not load numpy.
    from procengine.profiling.capture import join_capture, only_request
    from procengine.profiling.chrome_trace import encode_trace
    from procengine.profiling.recording import Recording, record_for

    recording = Recording(group, includes_past=args.past or args.request is not None)
    if args.seconds:
        print(f"watching group {group.name} for {args.seconds:g} s ...", file=sys.stderr, flush=True)
    capture = record_for(recording, args.seconds)
    say_what_is_missing(capture)
    joined = join_capture(capture)
    if args.request is not None:
        joined = only_request(joined, args.request)
    size = _write(args.output, encode_trace(joined))
    print(_describe(joined, args.output, size))
    return 0


def check_seconds(seconds: float, at_least: float | None = None) -> None:
    """Refuse a time that makes no sense.

    Raises:
        ConfigError: it is not more than 0 (or less than `at_least`), or above the limit.
    """
    is_enough = seconds > 0 if at_least is None else seconds >= at_least
    if not (is_enough and seconds <= MAX_SECONDS):
        low = "more than 0" if at_least is None else f"at least {at_least:g}"
        raise ConfigError(f"--seconds: must be {low} and at most {MAX_SECONDS:g}, got {seconds:g}")


def say_what_is_missing(capture: Capture) -> None:
    """On stderr: records that were lost, processes that were, and why a capture is shorter than it was to be."""
    if capture.cut_short:
        print(f"procengine: {capture.cut_short}", file=sys.stderr)
    if capture.restarted:
        names = ", ".join(capture.restarted)
        print(f"procengine: restarted meanwhile: {names}; the time until it was back is left out", file=sys.stderr)
    if capture.tables.num_lost:
        print(
            f"procengine: {capture.tables.num_lost} records were overwritten before they were read; "
            "give the group more --span-records, or the machine more idle time",
            file=sys.stderr,
        )


def _check_output(path: Path) -> None:
    """Before anything is recorded: whether the file can be written."""
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {path.parent} to write {path.name} to")


def _write(path: Path, data: bytes) -> int:
    """Returns the size of the file."""
    if path.suffix == ".gz":
        data = gzip.compress(data, _GZIP_LEVEL, mtime=0)
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"--output: {path} cannot be written: {error.strerror}") from error
    return len(data)


def _describe(joined: Joined, path: Path, size: int) -> str:
    num_passes, num_requests = len(joined.passes), len(joined.requests) + len(joined.unfinished)
    what = (
        f"{_count(num_passes, 'pass', 'passes')} of {_count(len(joined.passes.ranks), 'worker', 'workers')}, "
        f"{_count(num_requests, 'request', 'requests')}"
        if num_passes or num_requests
        else "the group ran nothing in this time"
    )
    return f"{path}: {what} ({size / 1e6:.1f} MB); open it at https://ui.perfetto.dev"


def _count(number: int, one: str, several: str) -> str:
    return f"{number:,} {one if number == 1 else several}"
