"""`procengine replay FILE`: the requests of a crash record once more.

Owns: which group runs them, and the report. Never does: compare (`crash.replay`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from procengine.cli.examples import add_examples
from procengine.errors import ConfigError
from procengine.groups import find_group

if TYPE_CHECKING:
    from procengine.crash.record import CrashRecord

__all__ = ["add_arguments", "run"]

_MAX_FILE_BYTES: Final = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Run the requests of a crash record again, with the recorded tokens, parameters and seeds, and say which yield "
        "the same\ntokens: all of them for a request that had ended, those that it had for one that was running. The "
        "exit status is 1 if any\ndiffers. Without --group a private group with the recorded configuration runs them."
    )
    add_examples(
        parser,
        ("procengine replay now.record --show", "what is in it"),
        ("procengine replay now.record", "run it again, on a private group"),
        ("procengine replay now.record --group prod --fast", "on a running one, all at once"),
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what `procengine record` or a crash left")
    parser.add_argument("--group", metavar="GROUP", help="a running group to run them on")
    parser.add_argument("--fast", action="store_true", help="send all at once, not at the recorded moments")
    parser.add_argument("--show", action="store_true", help="only say what is in the file")


def run(args: argparse.Namespace) -> int:
    """Read, run, compare."""
    import asyncio

    record = _read(args.file)
    print(_describe(record))
    if args.show:
        return 0
    if record.is_redacted:
        raise ConfigError(f"{args.file}: written with --redact-prompts: there are no tokens in it to run again")
    from procengine.crash.replay import recorded_config, replay
    from procengine.launch import launch_group
    from procengine.paths import run_root

    with contextlib.ExitStack() as exits:
        if args.group is not None:
            endpoint = find_group(args.group).endpoint
        else:
            name = f"replay-{os.getpid()}"
            config = recorded_config(record, name, str(run_root() / name))
            endpoint = exits.enter_context(launch_group(config)).endpoint
        comparisons = asyncio.run(replay(record, endpoint, keeps_times=not args.fast))
    for one in comparisons:
        verdict = {True: "same", False: "DIFFERENT", None: "not compared"}[one.is_equal]
        print(f"{one.request_id}[{one.index}]: {verdict}: {one.text}")
    num_different = sum(one.is_equal is False for one in comparisons)
    num_same = sum(one.is_equal is True for one in comparisons)
    print(f"{num_same} the same, {num_different} different, {len(comparisons) - num_same - num_different} not compared")
    return 1 if num_different else 0


def _read(path: Path) -> CrashRecord:
    from procengine.crash.record import decode_record

    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ConfigError(f"{path}: has {path.stat().st_size} bytes, a crash record has at most {_MAX_FILE_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    return decode_record(data, str(path))


def _describe(record: CrashRecord) -> str:
    num_running = sum(not one.ended for one in record.requests)
    num_steps = len(record.steps["step_sent"].to_rows()) if "step_sent" in record.steps else 0
    model = record.config.get("model", {}).get("name", "?")
    return (
        f"{record.reason} ({record.written_at}); model {model}, procengine {record.versions.get('procengine', '?')}\n"
        f"{len(record.requests)} requests, {num_running} of them running; {num_steps} steps of the last "
        f"{record.seconds:g} s"
    )
