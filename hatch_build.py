"""Build hook: compiles the native kernels into wheels and beside the sources of editable installs, where a compiler is.

Owns: what the library means for a wheel. Never does: know how to compile (`kernels/native/build.py` does), or fail:
without the library the package is slower on a CPU and says so.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_FOLDER = "procengine/kernels/native"


class NativeKernels(BuildHookInterface):
    """Runs for the wheel target alone, `version` being "standard" or "editable"."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        builder = _load(Path(self.root) / _FOLDER / "build.py")
        try:
            library = builder.build()
        except builder.BuildError as error:
            self.app.display_warning(f"The native CPU kernels are left out; CPU inference will be slow. {error}")
            return
        if version == "standard":
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"  # plain C functions: no Python's binary interface is involved
            build_data["force_include"][str(library)] = f"{_FOLDER}/{library.name}"


def _load(path: Path) -> Any:
    """The module at `path`: the package it belongs to cannot be imported before it is installed."""
    spec = importlib.util.spec_from_file_location("native_build", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
