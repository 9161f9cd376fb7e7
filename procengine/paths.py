"""Where things live on disk: the model cache and the run directories of process groups.

Owns: the environment variables that move them. Never does: create a socket or read a model.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from procengine.errors import ConfigError

__all__ = ["MAX_SOCKET_PATH_BYTES", "procengine_home", "run_root", "running_group_dirs", "socket_path"]

MAX_SOCKET_PATH_BYTES = 107  # sun_path on Linux is 108 bytes with its NUL (unix(7))
_LONGEST_SOCKET_NAME = "frontend.sock"
_MAX_GROUP_NAME_BYTES = 40


def procengine_home() -> Path:
    """The cache root: `$PROCENGINE_HOME`, else `~/.cache/procengine` (models are in its `models/`)."""
    moved = os.environ.get("PROCENGINE_HOME")
    return Path(moved).expanduser() if moved else Path.home() / ".cache" / "procengine"


def run_root() -> Path:
    """The directory that holds one sub-directory a running group. Made 0700, and ours alone.

    `$PROCENGINE_RUN_DIR` is taken as it is or refused; otherwise the first of `$XDG_RUNTIME_DIR`, the temporary
    directory and `/tmp` that is writable and short enough for socket paths serves.
    """
    asked = os.environ.get("PROCENGINE_RUN_DIR")
    if asked:
        return _private_dir(Path(asked))
    problems: list[str] = []
    for candidate in _default_roots():
        try:
            return _private_dir(candidate)
        except ConfigError as error:
            problems.append(str(error))
    raise ConfigError("no directory can hold the group's sockets: " + "; ".join(problems))


def running_group_dirs(root: Path) -> Iterator[Path]:
    """Directories below `root` that look like groups (they hold a lock file), in name order."""
    if root.is_dir():
        yield from sorted(entry for entry in root.iterdir() if (entry / "lock").exists())


def socket_path(run_dir: Path, name: str) -> str:
    """`ipc://` endpoint of the socket `name` in a group's directory.

    Raises:
        ConfigError: the path is longer than a Unix socket address can be.
    """
    path = str(run_dir / f"{name}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"run directory {run_dir} is too long: the socket path {path} has {len(os.fsencode(path))} bytes, "
            f"a Unix socket allows {MAX_SOCKET_PATH_BYTES}; set PROCENGINE_RUN_DIR to a shorter directory"
        )
    return f"ipc://{path}"


def _default_roots() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "procengine"
    name = f"procengine-{os.getuid()}"
    yield Path(tempfile.gettempdir()) / name
    yield Path("/tmp") / name  # noqa: S108 - the directory is 0700 and its owner is checked


def _private_dir(path: Path) -> Path:
    room = len(os.fsencode(path)) + 1 + _MAX_GROUP_NAME_BYTES + 1 + len(_LONGEST_SOCKET_NAME)
    if room > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(
            f"run directory {path} is too long for socket paths: it may have at most "
            f"{MAX_SOCKET_PATH_BYTES - _MAX_GROUP_NAME_BYTES - 2 - len(_LONGEST_SOCKET_NAME)} bytes, "
            f"it has {len(os.fsencode(path))}"
        )
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"run directory {path} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"run directory {path} is not a writable directory of this user")
    return path
