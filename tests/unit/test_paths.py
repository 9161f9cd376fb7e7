"""Where sockets lie: short enough, private, or one clear message (IPC-04)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from procengine.errors import ConfigError
from procengine.paths import MAX_SOCKET_PATH_BYTES, procengine_home, run_root, running_group_dirs, socket_path

LONGEST_GROUP_NAME = "n" * 40


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """None of the variables that say where sockets go, and a temporary directory that is not remembered."""
    for name in ("PROCENGINE_RUN_DIR", "PROCENGINE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    return monkeypatch


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory with a short path: pytest's own are long."""
    with tempfile.TemporaryDirectory(prefix="p", dir="/tmp") as path:
        yield Path(path)


def longest_that_fits() -> int:
    return MAX_SOCKET_PATH_BYTES - len(f"/{LONGEST_GROUP_NAME}/frontend.sock")


def nested(root: Path, length: int) -> Path:
    """A path below `root` with exactly that many bytes."""
    path = root / ("d" * (length - len(os.fsencode(root)) - 1))
    assert len(os.fsencode(path)) == length
    return path


def test_ipc_04_deep_temporary_directory_is_left_for_a_shorter_one(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    environment.setenv("TMPDIR", str(deep))
    root = run_root()
    assert root == Path(f"/tmp/procengine-{os.getuid()}")
    assert len(socket_path(root / LONGEST_GROUP_NAME, "control")) <= len("ipc://") + MAX_SOCKET_PATH_BYTES


def test_ipc_04_deep_directory_that_was_asked_for_is_refused_by_name(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deep = tmp_path / ("deep" * 30)
    environment.setenv("PROCENGINE_RUN_DIR", str(deep))
    with pytest.raises(ConfigError, match="too long for socket paths") as caught:
        run_root()
    assert str(deep) in str(caught.value)
    assert not deep.exists()


def test_ipc_04_directory_that_cannot_be_made_is_refused_by_name(
    environment: pytest.MonkeyPatch, short_dir: Path
) -> None:
    (short_dir / "file").touch()
    environment.setenv("PROCENGINE_RUN_DIR", str(short_dir / "file" / "run"))
    with pytest.raises(ConfigError, match=f"run directory {short_dir}/file/run cannot be used: Not a directory"):
        run_root()


def test_ipc_04_read_only_file_system_is_refused_by_name(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PROCENGINE_RUN_DIR", "/proc/procengine")
    with pytest.raises(ConfigError, match="run directory /proc/procengine cannot be used"):
        run_root()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_ipc_04_unwritable_directory_is_refused(environment: pytest.MonkeyPatch, short_dir: Path) -> None:
    short_dir.chmod(0o500)
    environment.setenv("PROCENGINE_RUN_DIR", str(short_dir))
    with pytest.raises(ConfigError, match="is not a writable directory"):
        run_root()


def test_file_in_place_of_the_directory_is_refused(environment: pytest.MonkeyPatch, short_dir: Path) -> None:
    (short_dir / "file").touch()
    environment.setenv("PROCENGINE_RUN_DIR", str(short_dir / "file"))
    with pytest.raises(ConfigError, match=f"{short_dir}/file cannot be used: File exists"):
        run_root()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_directory_of_another_user_is_refused(environment: pytest.MonkeyPatch, short_dir: Path, mode: int) -> None:
    foreign = short_dir / "foreign"
    foreign.mkdir()
    foreign.chmod(mode)
    os.chown(foreign, 12345, 12345)
    environment.setenv("PROCENGINE_RUN_DIR", str(foreign))
    with pytest.raises(ConfigError, match="is not a writable directory of this user"):
        run_root()


def test_order_of_candidates(environment: pytest.MonkeyPatch, short_dir: Path) -> None:
    name = f"procengine-{os.getuid()}"
    environment.setenv("TMPDIR", str(short_dir))
    assert run_root() == short_dir / name
    runtime = short_dir / "runtime"
    environment.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert run_root() == runtime / "procengine"
    environment.setenv("PROCENGINE_RUN_DIR", str(short_dir / "asked"))
    assert run_root() == short_dir / "asked"
    assert (short_dir / "asked").stat().st_mode & 0o777 == 0o700


def test_unusable_runtime_directory_is_passed_over(environment: pytest.MonkeyPatch, short_dir: Path) -> None:
    environment.setenv("TMPDIR", str(short_dir))
    environment.setenv("XDG_RUNTIME_DIR", "/proc/runtime")
    assert run_root() == short_dir / f"procengine-{os.getuid()}"


def test_longest_directory_that_is_taken_holds_the_longest_group_name(
    environment: pytest.MonkeyPatch, short_dir: Path
) -> None:
    path = nested(short_dir, longest_that_fits())
    environment.setenv("PROCENGINE_RUN_DIR", str(path))
    assert len(socket_path(run_root() / LONGEST_GROUP_NAME, "frontend")) == len("ipc://") + MAX_SOCKET_PATH_BYTES
    environment.setenv("PROCENGINE_RUN_DIR", str(path) + "x")
    with pytest.raises(ConfigError, match=f"at most {longest_that_fits()} bytes, it has {longest_that_fits() + 1}"):
        run_root()


@pytest.mark.parametrize(
    "name", ["frontend", "output", "control", "register", "feedback", "results", "text", "steps-63"]
)
def test_every_socket_of_a_group_fits_where_the_longest_one_was_checked(name: str) -> None:
    root = Path("/" + "d" * (longest_that_fits() - 1))
    assert socket_path(root / LONGEST_GROUP_NAME, name).endswith(f"/{name}.sock")


@pytest.mark.parametrize("letter", ["d", "é"])
def test_socket_path_counts_bytes_up_to_107(letter: str) -> None:
    room = MAX_SOCKET_PATH_BYTES - len("/x.sock") - 1
    size = len(letter.encode())
    fits = Path("/" + letter * (room // size))
    assert socket_path(fits, "x") == f"ipc://{fits}/x.sock"
    with pytest.raises(ConfigError, match=r"a Unix socket allows 107; set PROCENGINE_RUN_DIR"):
        socket_path(Path(f"{fits}{letter}{letter}"), "x")


def test_home_is_where_it_was_moved_to(environment: pytest.MonkeyPatch) -> None:
    assert procengine_home() == Path.home() / ".cache" / "procengine"
    environment.setenv("PROCENGINE_HOME", "~/elsewhere")
    assert procengine_home() == Path.home() / "elsewhere"


def test_groups_are_the_directories_with_a_lock(tmp_path: Path) -> None:
    for name in ("b", "a", "no-lock"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "lock").touch()
    (tmp_path / "b" / "lock").touch()
    (tmp_path / ".lock").touch()
    assert [path.name for path in running_group_dirs(tmp_path)] == ["a", "b"]
    assert list(running_group_dirs(tmp_path / "missing")) == []
