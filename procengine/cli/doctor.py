"""`procengine doctor`: what this machine offers a group, what is missing, and what to do about it.

Owns: the checks. Never does: change anything, or import torch (it asks the packages' metadata).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from procengine.cli.examples import add_examples
from procengine.cpu_flags import cpu_flags
from procengine.errors import ConfigError
from procengine.free_memory import available_bytes
from procengine.groups import running_groups
from procengine.open_files import clients_within, hard_limit
from procengine.paths import procengine_home, run_root

__all__ = ["Finding", "add_arguments", "examine", "run"]

State = Literal["ok", "note", "problem"]

_PACKAGES: Final = ("torch", "numpy", "pyzmq", "msgspec", "tokenizers", "uvloop", "llguidance")
_FAST_CPU_FLAGS: Final = ("avx2", "avx512_vnni", "avx512_bf16", "amx_bf16")
_MANY_CLIENTS: Final = 1000
_MIB: Final = 1 << 20
_LITTLE_SPACE: Final = 512 * _MIB


class Finding(NamedTuple):
    """One line: a problem keeps a group from running, a note makes it slower or smaller than it could be."""

    state: State
    subject: str
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Look at what a group needs of this machine: versions, CPU, GPU, limits, directories, running groups. The exit "
        "status\nis 1 if something keeps a group from running."
    )
    add_examples(
        parser,
        ("procengine doctor", "a list"),
        ("procengine doctor --json", "for programs"),
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of findings")


def run(args: argparse.Namespace) -> int:
    """Examine, and print what was found."""
    findings = list(examine())
    if args.json:
        print(msgspec.json.encode([finding._asdict() for finding in findings]).decode())
    else:
        print("\n".join(map(_line, findings)))
    return int(any(finding.state == "problem" for finding in findings))


def examine() -> Iterator[Finding]:
    """All findings, in the order of what needs what."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _cpu,
        _memory,
        _gpu,
        _open_files,
        _locked_memory,
        _sockets,
        _models,
        _groups,
    )
    for check in checks:
        yield from check()


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    is_known = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding(
        "ok" if is_known and sys.platform == "linux" else "problem",
        "python",
        f"{version} on {platform.system()} {platform.release()} ({platform.machine()})",
        "" if is_known else "use Python 3.11, 3.12 or 3.13",
    )


def _packages() -> Iterator[Finding]:
    for name in ("procengine", *_PACKAGES):
        version = _version_of(name)
        advice = "" if version else f"pip install {name}"
        yield Finding("ok" if version else "problem", name, version or "not installed", advice)


def _cpu() -> Iterator[Finding]:
    flags = cpu_flags()
    fast = [flag for flag in _FAST_CPU_FLAGS if flag in flags]
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    found = f"{usable} of {present} cores usable, {', '.join(fast) or 'no wide vector instructions'}"
    is_fast = "avx512_bf16" in flags or "amx_bf16" in flags
    advice = "" if is_fast else "without AVX-512 BF16, torch emulates bfloat16; the native kernels do not need it"
    yield Finding("ok" if is_fast else "note", "cpu", found, advice)


def _memory() -> Iterator[Finding]:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    available = available_bytes()
    found = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB available"
    is_little = available < _LITTLE_SPACE
    yield Finding("note" if is_little else "ok", "memory", found, "lower --kv-cache-memory" if is_little else "")


def _gpu() -> Iterator[Finding]:
    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists():
        yield Finding("ok", "gpu", "no NVIDIA driver: groups run on the CPU")
        return
    version = driver.read_text().split("\n", 1)[0]
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    if not devices:
        yield Finding("problem", "gpu", f"{version}; no device file", "give this user or container /dev/nvidia*")
    elif "+cpu" in _version_of("torch"):
        yield Finding("problem", "gpu", f"{version}; torch is a CPU build", "install a CUDA build of torch")
    else:
        yield Finding("ok", "gpu", f"{', '.join(devices)}: {version}")


def _open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_clients = clients_within(hard_limit())
    is_few = num_clients < _MANY_CLIENTS
    shown = "unlimited" if hard == resource.RLIM_INFINITY else hard
    found = f"limit {soft} (hard {shown}, to which a group raises it as needed)"
    advice = f"enough for {num_clients} clients of a group; raise it (`ulimit -Hn`) for more" if is_few else ""
    yield Finding("note" if is_few else "ok", "open files", found, advice)


def _locked_memory() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft // 1024} KiB"
    yield Finding("ok", "locked memory", f"limit {shown} (matters for pinned buffers of a GPU)")


def _sockets() -> Iterator[Finding]:
    try:
        root = run_root()
    except ConfigError as error:
        yield Finding("problem", "sockets", str(error), "set PROCENGINE_RUN_DIR to a short, writable directory")
        return
    free = shutil.disk_usage(root).free
    is_little = free < _MIB
    advice = "no room for sockets and group.json" if is_little else ""
    yield Finding("problem" if is_little else "ok", "sockets", f"{root}, {free // _MIB} MiB free", advice)


def _models() -> Iterator[Finding]:
    home = procengine_home()
    place = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(place, os.W_OK):
        yield Finding("problem", "models", f"{place} is not writable", "set PROCENGINE_HOME to a directory of yours")
        return
    names = sorted(path.name for path in (home / "models").glob("[!.]*")) if home.exists() else []
    free = shutil.disk_usage(place).free
    found = f"{home}: {', '.join(names) or 'none yet'}; {free // _MIB} MiB free"
    if not names:
        yield Finding("note", "models", found, "procengine pull smollm2-135m")
    elif free < _LITTLE_SPACE:
        yield Finding("note", "models", found, "make room before you pull another one")
    else:
        yield Finding("ok", "models", found)


def _groups() -> Iterator[Finding]:
    try:
        groups = running_groups()
    except ConfigError:
        return  # `_sockets` has said so
    names = [f"{group.name} ({group.model})" for group in groups]
    yield Finding("ok", "groups", ", ".join(names) or "none running")


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _line(finding: Finding) -> str:
    advice = f"\n{'':26}-> {finding.advice}" if finding.advice else ""
    return f"{finding.state:<8} {finding.subject:<16} {finding.found}{advice}"
