"""`DecodeBench`: a private group that decodes batches, and what its worker noted meanwhile.

Owns: the group, the client and the recording of a run. Never does: figures (`steady_decode`), or choose what to run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Self

from procengine.bench.arrivals import Pace
from procengine.bench.run import BenchClient
from procengine.bench.steady_decode import SteadyDecode, steady_decode
from procengine.bench.workload import BenchRequest, Lengths, check_fits, random_requests
from procengine.config import EngineConfig
from procengine.errors import ProcengineError
from procengine.groups import find_group
from procengine.launch import launch_group
from procengine.profiling.capture import join_capture
from procengine.profiling.recording import Recording
from procengine.sampling_params import SamplingParams

__all__ = ["DecodeBench"]

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class DecodeBench:
    """Launches the group when entered, ends it when left."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as exits:
            self._group = find_group(exits.enter_context(launch_group(self._config)).endpoint)
            self._client = BenchClient(self._group)
            exits.callback(self._client.close)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def run(self, batch_size: int, input_len: int, output_len: int, seed: int) -> SteadyDecode:
        """Decode a batch of random prompts; another seed gives others."""
        lengths = Lengths(input_len, output_len)
        return self.run_requests(random_requests(batch_size, lengths, self._config.model.vocab_size, seed))

    def run_requests(self, requests: Sequence[BenchRequest]) -> SteadyDecode:
        """Decode these, all at once.

        Raises:
            ConfigError: one does not fit the model.
            ProcengineError: one failed, or they were never all decoded together.
        """
        check_fits(requests, self._config.scheduler.max_model_len)
        recording = Recording(self._group)
        record = self._client.run(requests, _GREEDY, Pace())
        capture = recording.stop()
        for error in record.failures.values():
            raise ProcengineError(error)
        return steady_decode(join_capture(capture), len(requests))
