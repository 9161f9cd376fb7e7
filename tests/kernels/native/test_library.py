"""The native library: opened only when it was built from these sources, and its pool and levels can be set."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from procengine.errors import ConfigError
from procengine.kernels.native import build, library

pytestmark = pytest.mark.skipif(not library.is_available(), reason="the native library is not built")


def test_library_tells_the_sources_it_was_built_from() -> None:
    tell = library.native_function(build.SOURCE_ID_SYMBOL, ctypes.c_char_p)
    assert tell().decode() == build.source_id()


def test_library_of_other_sources_is_refused(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library, "source_id", lambda: "0" * 16)
    library._open.cache_clear()
    try:
        assert not library.is_available()
        assert "built from other sources" in str(library.why_not("cpu"))
        with pytest.raises(ConfigError, match=r"python -m procengine\.kernels\.native\.build"):
            library.native_function("pe_isa", ctypes.c_int32)
        assert len([record for record in caplog.records if "several times slower" in record.message]) == 1
    finally:
        library._open.cache_clear()


@pytest.mark.skipif(shutil.which("nm") is None or shutil.which("c++") is None, reason="no nm or no C++ compiler")
def test_units_for_an_instruction_set_define_no_function_that_others_might_be_linked_to() -> None:
    units = [unit for unit in build._units() if build._isa_flags(unit)]
    objects = [build._compile(build._find_compiler(), unit) for unit in units]
    for path in objects:
        symbols = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True).stdout.splitlines()
        kinds = {line[17:18]: line for line in symbols}
        assert "T" in kinds or "D" in kinds or "R" in kinds  # the format is the one read here
        assert [kinds[kind] for kind in "WVuw" if kind in kinds] == []


def test_other_devices_have_no_native_kernels() -> None:
    assert library.why_not("cpu") is None
    assert library.why_not("cuda") is not None


@pytest.mark.parametrize("isa", library.Isa)
def test_each_level_up_to_the_best_can_be_forced(isa: library.Isa) -> None:
    current = library.native_function("pe_isa", ctypes.c_int32)
    if isa > library.best_isa():
        with pytest.raises(ConfigError, match=isa.name), library.forced_isa(isa):
            pass
    else:
        with library.forced_isa(isa):
            assert current() == isa
    assert current() == library.best_isa()


@pytest.mark.parametrize("count", [0, -1, 257])
def test_number_of_threads_is_checked(count: int) -> None:
    with pytest.raises(ConfigError, match=str(count)):
        library.set_num_threads(count)


def test_pool_is_resized() -> None:
    before = library.num_threads()
    try:
        assert [library.set_num_threads(count) for count in (3, 1, 5)] == [3, 1, 5]
        assert library.num_threads() == 5
    finally:
        library.set_num_threads(before)
