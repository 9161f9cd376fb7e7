"""procengine beside other engines on this machine: same model, same prompts, run by run in turn.

Runs whichever peers are installed below PEERS_HOME (default ~/.cache/procengine-peers) and says which are not;
docs/PERFORMANCE.md, *Peers*, says how to install them. Progress goes to stderr, the tables to stdout.

  scripts/bench peers
  scripts/bench peers --workloads w1,w3 --peers llama-cpp-q4_1 --options "--async-depth 1" --options "--async-depth 2"
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pydoc_data.topics
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from installed import SCRIPTS, WORKLOADS, choose

from procengine.bench.peers.comparison import compare_engines, judge_targets, tables
from procengine.bench.peers.loads import PromptSource, select_workloads
from procengine.bench.peers.precision import precision_of, weights_class
from procengine.bench.peers.results import EngineSpec
from procengine.bench.peers.session import Limits, run_session
from procengine.cli.engine_args import add_engine_arguments, engine_args_from
from procengine.config import EngineConfig
from procengine.errors import ConfigError, ProcengineError
from procengine.resolve import resolve
from procengine.tokenizer import Tokenizer

LICENSES = ("Apache-2.0", "Artistic", "GFDL-1.3", "GPL-3", "LGPL-2.1", "MPL-2.0")


def our_config(model: str, options: Sequence[str]) -> EngineConfig:
    """What these options of `procengine serve` resolve to."""
    parser = argparse.ArgumentParser(prog="--options")
    add_engine_arguments(parser)
    return resolve(engine_args_from(parser.parse_args([model, *options])))


def our_spec(model: str, text: str) -> tuple[EngineSpec, EngineConfig]:
    """An entry of procengine, and its configuration."""
    try:
        options = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--options: {text!r} cannot be read as options: {error}") from error
    config = our_config(model, options)
    command = [sys.executable, str(SCRIPTS / "procengine_engine.py"), model, *options]
    name = f"procengine {' '.join(options)}".rstrip()
    return EngineSpec(name, weights_class(precision_of(config)), command, frozenset(WORKLOADS), is_ours=True), config


def read_text() -> str:
    """Some 200,000 tokens of English and code that come with Python, and with Debian where there is one."""
    topics = pydoc_data.topics.topics
    parts = [topics[name] for name in sorted(topics)]
    folder = Path("/usr/share/common-licenses")
    parts += [(folder / name).read_text() for name in LICENSES if (folder / name).is_file()]
    return "\n".join(parts)


def peer_specs(names: Sequence[str] | None, home: Path, gguf: Path) -> list[EngineSpec]:
    """Those that are installed; says which are not."""
    specs = []
    for peer in choose(names):
        missing = peer.missing(home)
        if missing is None and not peer.model and gguf.suffix != ".gguf":
            missing = f"{gguf} is no GGUF file"
        if missing is None:
            specs.append(peer.spec(home, gguf))
        else:
            print(f"skipped: {peer.name}: {missing} (docs/PERFORMANCE.md says how to install it)", file=sys.stderr)
    return specs


def listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_arguments() -> argparse.Namespace:
    cli = argparse.ArgumentParser(
        prog="scripts/bench peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = cli.add_argument
    add(
        "--model",
        default="smollm2-135m",
        help="what procengine runs; the peers have their own copies of it [%(default)s]",
    )
    add("--workloads", type=listed, default=list(WORKLOADS), metavar="LIST", help=f"of {','.join(WORKLOADS)} [all]")
    add("--runs", type=int, default=5, metavar="N", help="runs of each engine and work load [%(default)s]")
    add("--peers", type=listed, metavar="LIST", help="names with commas between [all that are installed]")
    add("--options", action="append", metavar="TEXT", help="options of procengine serve; each use is one more entry")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts [%(default)s]")
    add("--timeout", type=float, default=900.0, metavar="S", help="of one run of one engine [%(default)g]")
    add("--json", type=Path, metavar="FILE", help="all figures of all runs go there, as one JSON object")
    args = cli.parse_args()
    if args.runs < 1:
        cli.error(f"--runs: must be at least 1, got {args.runs}")
    return args


def main() -> int:
    args = parse_arguments()
    workloads = select_workloads(args.workloads)
    ours = [our_spec(args.model, text) for text in dict.fromkeys(args.options or [""])]
    model = ours[0][1].model
    home = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "procengine-peers"))
    specs = [spec for spec, _ in ours] + peer_specs(args.peers, home, Path(model.path))
    token_ids = Tokenizer.load(model.tokenizer_path).encode(read_text(), add_special_tokens=False)
    logs = Path(tempfile.mkdtemp(prefix="peers-"))
    print(f"logs of the engines, kept if one fails: {logs}", file=sys.stderr)
    results = run_session(
        specs,
        workloads,
        args.runs,
        PromptSource(np.array(token_ids, np.int32), args.seed),
        logs,
        Limits(run_s=args.timeout),
        lambda line: print(line, file=sys.stderr, flush=True),
    )
    print(tables(results, workloads))
    if args.json is not None:
        whole = {
            "engines": [dataclasses.asdict(result) for result in results],
            "rows": compare_engines(results, workloads),
            "targets": judge_targets(results, workloads),
        }
        args.json.write_bytes(msgspec.json.encode(whole))
    if any(result.error is not None for result in results):
        return 1
    shutil.rmtree(logs)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProcengineError as error:
        sys.exit(f"error: {error}")
