"""`procengine run-batch -i in.jsonl -o out.jsonl`: answers a file of requests (OpenAI's batch format).

Owns: the progress bar, and what an earlier run has left to do. Never does: run a request (`procengine.api.batch_run`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.cli.examples import add_examples
from procengine.config import EngineConfig
from procengine.engine_args import EngineArgs
from procengine.errors import ConfigError
from procengine.groups import GroupInfo, find_group

__all__ = ["add_arguments", "run"]

_MAX_CONCURRENCY = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Answer a file of requests, one JSON object a line:\n"
        '  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...]}}\n'
        "Answers are appended to the output as they come. The same command again goes on with what is not answered.\n\n"
        "With MODEL, a private group is launched and torn down; without, the running group answers (see --group)."
    )
    add_examples(
        parser,
        ("procengine run-batch smollm2-135m -i in.jsonl -o out.jsonl", "a private group"),
        ("procengine run-batch -i in.jsonl -o out.jsonl --group prod", "a running one"),
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="as for `serve`; none: ask a running group")
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="the requests")
    parser.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="the answers")
    parser.add_argument("--group", metavar="GROUP", help="name or endpoint of the group [the only running one]")
    parser.add_argument(
        "--max-concurrency",
        type=int,
        default=_MAX_CONCURRENCY,
        metavar="N",
        help=f"most requests under way [{_MAX_CONCURRENCY}]",
    )
    add_engine_arguments(parser, mentions_model=False)


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet. 1 if a request was answered with an error, else 0."""
    from tqdm import tqdm

    from procengine.api.batch_file import check_lines, finished_ids, read_lines
    from procengine.api.batch_run import run_batch

    if args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency: must be at least 1, got {args.max_concurrency}")
    if args.model is not None and args.group is not None:
        raise ConfigError("--group: MODEL launches a group of its own; give one of the two")
    num_requests = check_lines(args.input_file)  # before anything is launched
    finished = finished_ids(args.output_file)
    left = (line for line in read_lines(args.input_file) if line.custom_id not in finished)
    num_left = sum(line.custom_id not in finished for line in read_lines(args.input_file))
    num_failed = 0
    if num_left:
        with contextlib.ExitStack() as exits:
            config, group = _target(args, exits)
            bar = exits.enter_context(
                tqdm(total=num_requests, initial=num_requests - num_left, unit="request", disable=None, file=sys.stderr)
            )

            def count(is_answer: bool) -> None:
                nonlocal num_failed
                num_failed += not is_answer
                bar.update()

            run_batch(config, group, left, args.output_file, min(args.max_concurrency, num_left), count)
    already = f", {num_requests - num_left} were answered before" if num_left < num_requests else ""
    print(f"{num_left} requests answered, {num_failed} of them with an error{already}", file=sys.stderr)
    return 1 if num_failed else 0


def _target(args: argparse.Namespace, exits: contextlib.ExitStack) -> tuple[EngineConfig, GroupInfo]:
    from procengine.launch import launch_group
    from procengine.resolve import resolve

    if args.model is not None:
        config = resolve(engine_args_from(args, default_name=f"batch-{os.getpid()}"))
        return config, find_group(exits.enter_context(launch_group(config)).endpoint)
    group = find_group(args.group)
    return resolve(EngineArgs(model=group.model, name=group.name)), group
