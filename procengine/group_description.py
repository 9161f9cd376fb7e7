"""What a supervisor makes known of its group when it is ready: the ready line, and `group.json`.

Owns: the names of the fields (`groups.GroupInfo` reads them). Never does: write anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from procengine.children import Children
from procengine.config import EngineConfig
from procengine.paths import socket_path

__all__ = ["Facts", "describe_group"]

Facts = Mapping[str, Mapping[str, int | float | str]]  # what each child said of itself, by name


def describe_group(
    config: EngineConfig, children: Children, facts: Facts, urls: Mapping[str, str], *, is_private: bool
) -> dict[str, Any]:
    """A group whose processes are all there. `is_private`: launched by a program, for itself."""
    run_dir = Path(config.group.run_dir)
    return {
        "name": config.group.name,
        "endpoint": socket_path(run_dir, "frontend"),
        "control": socket_path(run_dir, "control"),
        "model": config.model.name,
        "pids": {"supervisor": os.getpid(), **children.pids},
        "num_blocks": facts["frontend"]["num_blocks"],
        **urls,
        "worker": {key: value for key, value in facts["worker-0"].items() if key != "num_blocks"},
        "is_private": is_private,
    }
