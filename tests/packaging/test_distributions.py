"""What is in the wheel and the sdist, and that the wheel imports where the sources are not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.packaging.conftest import ROOT, Distributions, build_distributions


def tree_files() -> set[str]:
    """Source files as they should be named in a distribution: "procengine/kernels/...", never "kernels/..."."""
    files = {
        f"{prefix}{path.relative_to(ROOT).as_posix()}"
        for folder, prefix in (("procengine", ""), ("procs", "procengine/"), ("kernels", "procengine/"))
        for pattern in ("*.py", "*.cpp", "*.h", "*.html", "*.css", "*.js")
        for path in (ROOT / folder).rglob(pattern)
    }
    return files | {"procengine/py.typed"}


def run_in(folder: Path, site: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run `code` with the package as unpacked at `site`."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_wheel_has_one_top_level_name(distributions: Distributions) -> None:
    names = zipfile.ZipFile(distributions.wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"procengine", "procengine-0.1.0.dist-info"}


def test_wheel_holds_every_source_file(distributions: Distributions) -> None:
    names = zipfile.ZipFile(distributions.wheel).namelist()
    assert len(names) == len(set(names))
    assert tree_files() - set(names) == set()


def test_wheel_ships_licence_and_entry_point(distributions: Distributions) -> None:
    archive = zipfile.ZipFile(distributions.wheel)
    info = "procengine-0.1.0.dist-info"
    assert f"{info}/licenses/LICENSE" in archive.namelist()
    assert "procengine = procengine.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_sdist_holds_real_files_below_one_package(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if not member.isreg()] == []
    names = {member.name.removeprefix("procengine-0.1.0/") for member in members}
    assert tree_files() - names == set()
    assert {name.split("/")[0] for name in names if "/" in name} == {"procengine"}


def test_wheel_imports_without_the_sources(distributions: Distributions, tmp_path: Path) -> None:
    target = tmp_path / "site"
    zipfile.ZipFile(distributions.wheel).extractall(target)
    code = "import procengine.errors as e, procengine.kernels.backends as b; print(e.__file__); print(b.__file__)"
    done = run_in(tmp_path, target, code)
    assert done.returncode == 0, done.stderr
    assert all(Path(line).is_relative_to(target) for line in done.stdout.split())


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_wheel_brings_a_native_library_that_fits_its_sources(tmp_path: Path) -> None:
    # From the tree itself: what is compiled there already need not be compiled again.
    build_distributions(ROOT, tmp_path / "dist", dict(os.environ), "--wheel")
    (wheel,) = (tmp_path / "dist").iterdir()
    assert wheel.name.startswith("procengine-0.1.0-py3-none-linux_")
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    code = "from procengine.kernels.native import build, library; print(library.why_not('cpu'), build.LIBRARY)"
    done = run_in(tmp_path, target, code)
    assert done.stdout.split() == ["None", str(target / "procengine/kernels/native/libprocengine_native.so")], (
        done.stderr
    )


def test_sdist_holds_no_compiled_file(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        assert [name for name in archive.getnames() if name.endswith((".so", ".o"))] == []


def test_sdist_holds_what_compiles_the_library(distributions: Distributions) -> None:
    with tarfile.open(distributions.sdist) as archive:
        assert "procengine-0.1.0/hatch_build.py" in archive.getnames()


def test_wheel_made_without_a_compiler_is_pure_and_says_what_is_slower(
    distributions: Distributions, tmp_path: Path
) -> None:
    assert distributions.wheel.name == "procengine-0.1.0-py3-none-any.whl"
    zipfile.ZipFile(distributions.wheel).extractall(tmp_path / "site")
    code = "from procengine.kernels.native import library; print(library.is_available(), library.why_not('cpu'))"
    done = run_in(tmp_path, tmp_path / "site", code)
    assert done.stdout.startswith("False not built"), done.stderr
    assert done.stderr.count("several times slower") == 1


@pytest.mark.parametrize("folder", ["procs", "kernels"])
def test_folder_is_a_link_and_no_import_root(folder: str) -> None:
    link = ROOT / "procengine" / folder
    assert link.is_symlink()
    assert link.readlink() == Path(f"../{folder}")
    assert not (ROOT / folder / "__init__.py").exists()


def test_transformers_imports_with_the_repository_as_working_directory() -> None:
    code = "import transformers; from transformers import AutoModelForCausalLM; print(AutoModelForCausalLM.__name__)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.stdout.split() == ["AutoModelForCausalLM"], done.stderr
