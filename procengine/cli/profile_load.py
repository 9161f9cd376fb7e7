"""The load that `procengine profile MODEL` puts on a group of its own, and the recording of it.

Owns: its options, and when recording begins and ends. Never does: take the times of answers; the group notes its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Final

from procengine.errors import ConfigError, ProcengineError

if TYPE_CHECKING:
    from procengine.bench.run import BenchClient
    from procengine.bench.workload import BenchRequest
    from procengine.groups import GroupInfo
    from procengine.profiling.capture import Capture
    from procengine.profiling.recording import Recording

__all__ = ["LOAD_DEFAULTS", "LOAD_OPTIONS", "add_load_arguments", "check_load_arguments", "record_load"]

LOAD_DEFAULTS: Final = {"num_prompts": 64, "input_len": 128, "output_len": 128, "warmup": 4, "seed": 0}
LOAD_OPTIONS: Final = (*LOAD_DEFAULTS, "prompts", "max_concurrency")
_WARMUP_TOKENS: Final = 16
_LAST_RECORDS_S: Final = 2.0
_WARMUP_SEED: Final = 1 << 64  # added to the run's; larger than anybody's


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the load. Their defaults are None here, so that it can be told whether they are given."""
    add = parser.add_argument_group("load on a group of our own (MODEL)").add_argument
    add("--num-prompts", type=int, metavar="N", help=f"how many prompts [{LOAD_DEFAULTS['num_prompts']}]")
    add("--input-len", type=int, metavar="N", help=f"tokens of each random prompt [{LOAD_DEFAULTS['input_len']}]")
    add("--output-len", type=int, metavar="N", help=f"tokens of each answer [{LOAD_DEFAULTS['output_len']}]")
    add("--prompts", type=Path, metavar="FILE", help="a JSON list of texts or token id lists, not random prompts")
    add("--max-concurrency", type=int, metavar="N", help="most requests under way [all at once]")
    add("--warmup", type=int, metavar="N", help=f"requests before those that count [{LOAD_DEFAULTS['warmup']}]")
    add("--seed", type=int, metavar="N", help=f"of the random prompts [{LOAD_DEFAULTS['seed']}]")


def check_load_arguments(args: argparse.Namespace) -> None:
    """Refuse what makes no sense, before anything is launched.

    Raises:
        ConfigError: an option is out of range.
    """
    for name in (*LOAD_DEFAULTS, "max_concurrency"):
        value, low = getattr(args, name), 0 if name in ("warmup", "seed") else 1
        if value is not None and value < low:
            raise ConfigError(f"--{name.replace('_', '-')}: must be at least {low}, got {value}")


def record_load(args: argparse.Namespace) -> Capture:
    """Launch a group, warm it up, and record it until it has answered everything.

    Raises:
        ProcengineError: an option, the model or a prompt is wrong, or a request failed.
    """
    from procengine.bench.run import BenchClient
    from procengine.cli.engine_args import engine_args_from
    from procengine.groups import find_group
    from procengine.launch import launch_group
    from procengine.resolve import resolve

    given = None if args.prompts is None else _read_prompts(args)
    config = resolve(engine_args_from(args, default_name=f"profile-{os.getpid()}"))
    if not config.profiling.span_records:
        raise ConfigError("--span-records: a group that keeps no spans cannot be profiled, got 0")
    # The pool outlives the group: a client whose group is gone gives up, so that the thread ends.
    with ThreadPoolExecutor(1) as pool, launch_group(config) as launched:
        group = find_group(launched.endpoint)
        client = BenchClient(group)
        try:
            return _record_answers(
                pool, client, group, _random_requests(args, client) if given is None else given, args
            )
        finally:
            client.close()


def _record_answers(
    pool: ThreadPoolExecutor,
    client: BenchClient,
    group: GroupInfo,
    requests: list[BenchRequest],
    args: argparse.Namespace,
) -> Capture:
    from procengine.bench.arrivals import Pace
    from procengine.bench.workload import check_fits
    from procengine.profiling.recording import READ_EVERY_S, Recording
    from procengine.sampling_params import SamplingParams

    check_fits(requests, client.welcome.max_model_len)
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    recording = Recording(group)
    warmups = _warmup_requests(args, client)
    client.run(warmups, params, Pace())
    _read_ends(recording, len(warmups))
    print(f"{len(requests)} requests ...", file=sys.stderr, flush=True)
    recording = Recording(group)
    answers = pool.submit(client.run, requests, params, Pace(max_concurrency=args.max_concurrency))
    while wait([answers], READ_EVERY_S).not_done:
        recording.read()
    for request_id, error in answers.result().failures.items():
        raise ProcengineError(f"request {request_id} failed: {error}")
    _read_ends(recording, len(requests))
    return recording.stop()


def _read_ends(recording: Recording, num_requests: int) -> None:
    """Read until that many requests have ended: an answer is on its way before the record of it is written."""
    deadline_s = time.monotonic() + _LAST_RECORDS_S
    while recording.read() and recording.num_ended < num_requests and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _random_requests(args: argparse.Namespace, client: BenchClient) -> list[BenchRequest]:
    from procengine.bench.workload import Lengths, random_requests

    lengths = Lengths(_of(args, "input_len"), _of(args, "output_len"))
    return random_requests(_of(args, "num_prompts"), lengths, client.welcome.vocab_size, _of(args, "seed"))


def _warmup_requests(args: argparse.Namespace, client: BenchClient) -> list[BenchRequest]:
    """Pay for what happens once, with prompts that the others do not begin with."""
    from procengine.bench.workload import Lengths, random_requests

    room = client.welcome.max_model_len - 1
    lengths = Lengths(min(_of(args, "input_len"), max(room - _WARMUP_TOKENS, 1)), min(_WARMUP_TOKENS, room))
    seed = _of(args, "seed") + _WARMUP_SEED
    return random_requests(_of(args, "warmup"), lengths, client.welcome.vocab_size, seed)


def _read_prompts(args: argparse.Namespace) -> list[BenchRequest]:
    from procengine.bench.datasets import parse_prompts

    path: Path = args.prompts
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error.strerror}") from error
    requests = parse_prompts(data, f"--prompts: {path}", _of(args, "output_len"))[: args.num_prompts]
    if not requests:
        raise ConfigError(f"--prompts: {path} holds no prompt")
    return requests


def _of(args: argparse.Namespace, name: str) -> int:
    """An option, or its default."""
    value: int | None = getattr(args, name)
    return LOAD_DEFAULTS[name] if value is None else value
