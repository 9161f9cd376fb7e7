"""`procengine profile`: where the time of a group goes: of a running one, or of a private one under a load.

Owns: the arguments, the load, and the files of a report. Never does: compute or draw (`profiling`).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.cli.trace import check_seconds, say_what_is_missing
from procengine.errors import ConfigError
from procengine.groups import find_group
from procengine.resolve import EngineArgs, resolve

if TYPE_CHECKING:
    from procengine.client import Client
    from procengine.client_bodies import Prompt
    from procengine.profiling.capture import Capture

__all__ = ["add_arguments", "run"]

_SECONDS: Final = 5.0
_WARMUP_TOKENS: Final = 16
_LOAD: Final = {"num_prompts": 64, "input_len": 128, "output_len": 128, "warmup": 4, "seed": 0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Show where the time goes: how busy the workers were and what they waited for, how long each stage of a step\n"
        "and of a request took, and the CPU of each process. Without MODEL, a running group is watched for a while,\n"
        "which does not slow it down; with MODEL, a private group is launched and given a set of prompts. With -o, a\n"
        "report is written that opens in any browser. docs/PROFILING.md shows how to read it."
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as for `serve`; none: watch a running group")
    parser.add_argument("--group", metavar="NAME", help="name or endpoint of the group to watch [the only running one]")
    parser.add_argument("--seconds", type=float, metavar="X", help=f"how long to watch a running group [{_SECONDS:g}]")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="DIR",
        help="write summary.json, report.html and (with the extra `plot`) PNGs into this folder",
    )
    parser.add_argument("--json", action="store_true", help="print summary.json instead of tables")
    load = parser.add_argument_group("load on a private group").add_argument
    load("--num-prompts", type=int, metavar="N", help=f"how many prompts, all at once [{_LOAD['num_prompts']}]")
    load("--input-len", type=int, metavar="N", help=f"tokens of each random prompt [{_LOAD['input_len']}]")
    load("--output-len", type=int, metavar="N", help=f"tokens of each answer [{_LOAD['output_len']}]")
    load("--prompts", type=Path, metavar="FILE", help="a JSON list of texts or token id lists, not random prompts")
    load("--warmup", type=int, metavar="N", help=f"requests before those that count [{_LOAD['warmup']}]")
    load("--seed", type=int, metavar="N", help=f"of the random prompts [{_LOAD['seed']}]")
    add_engine_arguments(parser, mentions_model=False)


def run(args: argparse.Namespace) -> int:
    """Record, summarize, print, write."""
    _check(args)
    capture = _record_load(args) if args.model is not None else _record_running(args)
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


def _record_load(args: argparse.Namespace) -> Capture:
    """Launch a group, warm it up, and record it until it has answered all prompts."""
    from procengine.client import Client
    from procengine.launch import launch_group

    given = None if args.prompts is None else _read_prompts(args.prompts)
    config = resolve(engine_args_from(args, default_name=f"profile-{os.getpid()}"))
    if not config.profiling.span_records:
        raise ConfigError("--span-records: a group that keeps no spans cannot be profiled, got 0")
    # The pool outlives the group: a client whose group is gone gives up, so that the thread ends.
    with ThreadPoolExecutor(1) as pool, launch_group(config) as group, Client(group.endpoint) as client:
        prompts = _random_prompts(args, client) if given is None else given
        _warm_up(args, client)
        print(f"{len(prompts)} prompts ...", file=sys.stderr, flush=True)
        return _record_answers(pool, client, group.endpoint, prompts, args)


def _record_answers(
    pool: ThreadPoolExecutor, client: Client, endpoint: str, prompts: list[Prompt], args: argparse.Namespace
) -> Capture:
    from procengine.profiling.recording import READ_EVERY_S, Recording

    recording = Recording(find_group(endpoint))
    answers = pool.submit(client.generate, prompts, _greedy(_of(args, "output_len")))
    while wait([answers], READ_EVERY_S).not_done:
        recording.read()
    answers.result()
    return recording.stop()


def _greedy(num_tokens: int) -> Any:
    from procengine.sampling_params import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def _warm_up(args: argparse.Namespace, client: Client) -> None:
    """Pay for what happens once, with prompts that the others do not begin with."""
    count, length = _of(args, "warmup"), _of(args, "input_len")
    if count:
        client.generate(_token_ids(_of(args, "seed") + 1, count, length, client), _greedy(_WARMUP_TOKENS))


def _random_prompts(args: argparse.Namespace, client: Client) -> list[Prompt]:
    return _token_ids(_of(args, "seed"), _of(args, "num_prompts"), _of(args, "input_len"), client)


def _token_ids(seed: int, count: int, length: int, client: Client) -> list[Prompt]:
    draw = random.Random(seed)
    return [draw.choices(range(client.welcome.vocab_size), k=length) for _ in range(count)]


def _read_prompts(path: Path) -> list[Prompt]:
    try:
        prompts: list[Prompt] = msgspec.json.decode(path.read_bytes(), type=list[str | list[int]])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--prompts: {path} is no readable JSON list of texts or token id lists ({error})") from error
    if not prompts:
        raise ConfigError(f"--prompts: {path} holds no prompt")
    return prompts


def _of(args: argparse.Namespace, name: str) -> int:
    """An option of the load, or its default."""
    value: int | None = getattr(args, name)
    return _LOAD[name] if value is None else value


# --- arguments


def _check(args: argparse.Namespace) -> None:
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"--output: {args.output} is a file; name a folder")
    if args.model is None:
        _refuse_given(args, [*_LOAD, "prompts"], "belongs to a load of our own; give MODEL")
        options = [field.name for field in msgspec.structs.fields(EngineArgs) if field.name != "model"]
        _refuse_given(args, options, "belongs to a group that is launched; give MODEL")
        if args.seconds is not None:
            check_seconds(args.seconds)
        return
    _refuse_given(args, ["group"], "MODEL launches a group of its own; give one of the two")
    _refuse_given(args, ["seconds"], "belongs to a running group; a load lasts until all prompts are answered")
    if args.prompts is not None:
        _refuse_given(args, ["num_prompts"], "--prompts says how many there are")
    for name in _LOAD:
        value, low = _of(args, name), 0 if name in ("warmup", "seed") else 1
        if value < low:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {low}, got {value}")


def _refuse_given(args: argparse.Namespace, names: list[str], why: str) -> None:
    defaults = {field.name: field.default for field in msgspec.structs.fields(EngineArgs) if field.name != "model"}
    for name in names:
        if getattr(args, name) not in (defaults.get(name), []):
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
