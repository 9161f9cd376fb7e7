"""procengine beside other engines on this machine: same model, same prompts, run by run in turn.

Runs whichever peers are installed below PEERS_HOME (default ~/.cache/procengine-peers) and says which are not;
docs/PERFORMANCE.md, *Peers*, says how to install them. Progress goes to stderr, the tables to stdout.

  scripts/bench peers
  scripts/bench peers --workloads w1,w3 --peers llama-cpp-q4_1 --options "--async-depth 1" --options "--async-depth 2"

In pieces, where there is no quiet hour; the n-th runs of all engines of a piece are neighbours, and stay so:

  scripts/bench peers --workloads w2 --runs 2 --json w2-a.json
  scripts/bench peers --workloads w2 --runs 3 --first-run 3 --json w2-b.json
  scripts/bench peers --merge w2-a.json w2-b.json --max-others 0.1
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from installed import SCRIPTS, WORKLOADS, choose

from procengine.bench.peers.comparison import tables
from procengine.bench.peers.loads import PromptSource, Workload, select_workloads
from procengine.bench.peers.precision import precision_of, weights_class
from procengine.bench.peers.results import EngineResult, EngineSpec
from procengine.bench.peers.saved import decode_results, encode_results, measured_workloads, merge_results, only_quiet
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
    add("--first-run", type=int, default=1, metavar="N", help="number of the first run: who begins, which prompts [1]")
    add("--peers", type=listed, metavar="LIST", help="names with commas between [all that are installed]")
    add("--options", action="append", metavar="TEXT", help="options of procengine serve; each use is one more entry")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts [%(default)s]")
    add("--timeout", type=float, default=900.0, metavar="S", help="of one run of one engine [%(default)g]")
    add(
        "--max-others",
        type=float,
        metavar="X",
        help="leave out runs in which other programs used more cores [no limit]",
    )
    add("--json", type=Path, metavar="FILE", help="all figures of all runs go there, as one JSON object")
    add("--merge", type=Path, nargs="+", metavar="FILE", help="run nothing: the tables of what --json has written")
    args = cli.parse_args()
    for option in ("runs", "first_run"):
        if getattr(args, option) < 1:
            cli.error(f"--{option.replace('_', '-')}: must be at least 1, got {getattr(args, option)}")
    return args


def read_pieces(paths: Sequence[Path]) -> list[EngineResult]:
    """What was measured in pieces, as one comparison."""
    try:
        return merge_results([decode_results(path.read_bytes(), str(path)) for path in paths])
    except OSError as error:
        raise ConfigError(f"--merge: {error.filename} cannot be read: {error.strerror}") from error


def measure(args: argparse.Namespace, workloads: Sequence[Workload], logs: Path) -> list[EngineResult]:
    """Run all engines by turns."""
    ours = [our_spec(args.model, text) for text in dict.fromkeys(args.options or [""])]
    model = ours[0][1].model
    home = Path(os.environ.get("PEERS_HOME", Path.home() / ".cache" / "procengine-peers"))
    specs = [spec for spec, _ in ours] + peer_specs(args.peers, home, Path(model.path))
    token_ids = Tokenizer.load(model.tokenizer_path).encode(read_text(), add_special_tokens=False)
    first = args.first_run - 1
    return run_session(
        specs,
        workloads,
        range(first, first + args.runs),
        PromptSource(np.array(token_ids, np.int32), args.seed + first),
        logs,
        Limits(run_s=args.timeout, max_others=args.max_others),
        lambda line: print(line, file=sys.stderr, flush=True),
    )


def main() -> int:
    args = parse_arguments()
    if args.merge is not None:
        results = read_pieces(args.merge)
        workloads = measured_workloads(results)
    else:
        workloads = select_workloads(args.workloads)
        logs = Path(tempfile.mkdtemp(prefix="peers-"))
        print(f"logs of the engines, kept if one fails: {logs}", file=sys.stderr)
        results = measure(args, workloads, logs)
        if all(result.error is None for result in results):
            shutil.rmtree(logs)
    if args.json is not None:
        args.json.write_bytes(encode_results(results, workloads))
    counted = results if args.max_others is None else only_quiet(results, args.max_others)
    print(tables(counted, workloads))
    return int(any(result.error is not None for result in results))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ProcengineError as error:
        sys.exit(f"error: {error}")
