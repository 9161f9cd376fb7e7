"""What a supervisor makes known of its group: JSON lines on stdout, and `group.json` in the run directory.

Owns: what the children said of themselves, and when the group was started. Never does: decide what the group is.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from procengine.child_process import ChildProcess, write_log, write_to
from procengine.children import Children
from procengine.config import EngineConfig
from procengine.errors import ConfigError
from procengine.group_description import describe_group
from procengine.run_dir import write_description

__all__ = ["Announcements", "announce"]

_STDOUT = 1

Urls = Callable[[], Mapping[str, str]]  # where the group is reached now, by kind


class Announcements:
    """Of one group. `is_private`: launched by a program, for itself."""

    def __init__(
        self, config: EngineConfig, children: Children, urls: Urls, started_s: float, *, is_private: bool
    ) -> None:
        self._config = config
        self._children = children
        self._urls = urls
        self._started_s = started_s
        self._is_private = is_private
        self._facts: dict[str, dict[str, int | float | str]] = {}

    def note(self, child: ChildProcess, facts: dict[str, int | float | str]) -> None:
        """A child is ready, and has said this of itself."""
        self._facts[child.name] = facts

    def ready(self) -> None:
        """All children are.

        Raises:
            ConfigError: the description cannot be written, so nobody would find the group.
        """
        description = self._write()
        announce({"event": "ready", **description})

    def changed(self) -> None:
        """Another process has taken a place. If that cannot be written, the log says so, and the group goes on."""
        try:
            self._write()
        except ConfigError as error:
            write_log(f"procengine: {error}; the group goes on\n")

    def _write(self) -> dict[str, Any]:
        description = {
            **describe_group(self._config, self._children, self._facts, self._urls(), is_private=self._is_private),
            "ready_s": round(time.monotonic() - self._started_s, 2),
        }
        write_description(Path(self._config.group.run_dir), description)
        return description


def announce(event: Mapping[str, Any]) -> None:
    """One JSON line on stdout."""
    if not write_to(_STDOUT, json.dumps(event) + "\n"):
        write_log(f"procengine: nobody could be told: {event['event']}\n")
