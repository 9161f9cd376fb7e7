"""A launched group with a client on it and its log in a file."""

from __future__ import annotations

import itertools
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from procengine import Client, RequestOutput, SamplingParams
from procengine.client_bodies import Prompt
from procengine.engine_args import EngineArgs
from procengine.groups import find_group
from procengine.launch import launch_group
from procengine.outputs import StreamDelta
from procengine.resolve import resolve

__all__ = ["RunningGroup", "joined"]

_QUEUED_TIMEOUT_S = 60.0


class RunningGroup:
    """One group for as long as the `with` block; whatever a process of it prints is in `log`."""

    def __init__(self, model: Path | str, **options: Any) -> None:
        name = f"e2e-{os.getpid()}-{time.monotonic_ns() % 10**9}"
        self.config = resolve(msgspec.convert({"name": name, "model": str(model), **options}, EngineArgs))
        with ExitStack() as stack:
            self._log = stack.enter_context(tempfile.TemporaryFile())
            group = stack.enter_context(launch_group(self.config, log_to=self._log))
            self.endpoint = group.endpoint
            self.ready = group.ready
            self.client = stack.enter_context(Client(group.endpoint))
            self.pids = dict(find_group(group.endpoint).pids)
            self._salts = (f"salt {number}" for number in itertools.count())
            self._stack = stack.pop_all()

    @property
    def log(self) -> str:
        """What the processes have printed so far."""
        return os.pread(self._log.fileno(), 1 << 24, 0).decode(errors="replace")

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams],
        *,
        cache_salt: str = "",
    ) -> list[RequestOutput]:
        """All prompts at once; requests with different salts share no cached prefix."""
        several: list[Prompt] = list(prompts)
        return self.client.generate(several, params, cache_salt=cache_salt)

    def new_salt(self) -> str:
        """A cache salt that no request has had: with it the prefix cache is cold."""
        return next(self._salts)

    def num_preemptions(self) -> int:
        """Since it was asked the last time."""
        return int(self.client.stats(reset=True)["num_preemptions"])

    @contextmanager
    def held_until_queued(self, num_requests: int) -> Iterator[None]:
        """Inside, the workers stand still until the group has that many requests: however slowly they come on a loaded
        machine, they run side by side.
        """
        pids = [pid for role, pid in self.pids.items() if role.startswith("worker")]
        assert len(pids) == self.config.worker.num_workers
        thread = threading.Thread(target=self._release_when_queued, args=(pids, num_requests))
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def _release_when_queued(self, pids: list[int], num_requests: int) -> None:
        deadline_s = time.monotonic() + _QUEUED_TIMEOUT_S
        try:
            with Client(self.endpoint) as client:
                while client.stats()["num_unfinished"] < num_requests and time.monotonic() < deadline_s:
                    time.sleep(0.005)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)

    def num_open_files(self) -> dict[str, int]:
        """Descriptors that each process holds."""
        return {name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in self.pids.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        log = self.log
        self._stack.close()
        assert "Traceback" not in log, log


def joined(deltas: Sequence[StreamDelta]) -> tuple[str, list[int], str | None, int | str | None]:
    """A whole stream as (text, token ids, finish reason, stop reason); only its last delta may have a reason."""
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return "".join(delta.text for delta in deltas), token_ids, deltas[-1].finish_reason, deltas[-1].stop_reason
