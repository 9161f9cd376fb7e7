"""`AdapterDesk`: the frontend's side of LoRA adapters: it has them loaded by the workers, and says who may be named.

Wiring only: `AdapterTable` knows which there are and who has them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import msgspec

from procengine.adapter_table import Adapter, AdapterTable
from procengine.child import Child
from procengine.engine import Engine
from procengine.errors import InvalidRequestError, ModelError
from procengine.messages import AdapterChanged, AdapterLoaded, ChangeAdapter, LoadAdapter
from procengine.numbering import first_number
from procengine.procs.output_link import OutputLink
from procengine.procs.worker_links import WorkerLinks

__all__ = ["AdapterDesk"]


class AdapterDesk:
    """A worker that has begun anew is told of all adapters, and gets no steps before it has them."""

    def __init__(
        self,
        child: Child,
        to_workers: WorkerLinks,
        to_output: OutputLink,
        tell_supervisor: Callable[[AdapterChanged], None],
    ) -> None:
        config = child.config.lora
        self._child = child
        self._to_workers = to_workers
        self._to_output = to_output
        self._tell_supervisor = tell_supervisor
        self._engine: Engine | None = None
        self._table = AdapterTable(config.max_loras, child.config.worker.num_workers, first_number(child.epoch))
        for module in config.modules:
            self._table.add(module.name, module.path)

    @property
    def all_loaded(self) -> bool:
        """Whether every worker has all adapters."""
        return self._table.all_loaded

    def are_at(self, rank: int) -> bool:
        """Whether a worker has all adapters."""
        return self._table.are_at(rank)

    def open(self, engine: Engine) -> None:
        """From here on there are requests."""
        self._engine = engine
        self._tell_engine()

    def send_all(self, rank: int) -> None:
        """A worker has begun anew."""
        for adapter in self._table.expect(rank):
            self._send(rank, adapter)

    def change(self, message: ChangeAdapter) -> None:
        """The supervisor wants one loaded, or unloaded."""
        try:
            if message.path is None:
                self._table.leave(message.name, message.ask_id)
                self._tell_engine()
            else:
                adapter = self._table.add(message.name, message.path, message.ask_id)
                for rank in adapter.awaits:
                    self._send(rank, adapter)
        except InvalidRequestError as error:
            self._tell_supervisor(AdapterChanged(message.ask_id, message.name, error.code, str(error)))

    def take(self, message: AdapterLoaded) -> None:
        """What a worker says of one."""
        adapter = self._table.take(message.rank, message.number, message.error)
        if adapter is None:
            return
        if adapter.error:
            self._drop(adapter)
        elif not adapter.is_serving:
            adapter.is_serving = True
            self._tell_engine()
            self._answer(adapter)

    def settle(self) -> None:
        """To be called after each change: those that are to leave do when no request has them."""
        for adapter in self._table.leaving:
            if self._engine is not None and not self._engine.uses_adapter(adapter.place):
                self._table.remove(adapter)
                self._answer(adapter)

    def _drop(self, adapter: Adapter) -> None:
        """A worker cannot load it: one that was just asked for is refused; one that was there is gone."""
        self._table.remove(adapter)
        if adapter.ask_id < 0:
            if not adapter.is_serving and not self._child.epoch:
                raise ModelError(f"lora_modules: {adapter.name}: {adapter.error}")
            sys.stderr.write(f"procengine: adapter {adapter.name} is gone: {adapter.error}\n")
        self._answer(adapter, "" if adapter.is_leaving else adapter.error)
        self._tell_engine()
        if adapter.is_serving and self._engine is not None:
            for finish in self._engine.end_adapter(adapter.place, f"its adapter is gone: {adapter.error}"):
                self._to_output.send(finish)

    def _answer(self, adapter: Adapter, error: str = "") -> None:
        """Tell the supervisor what has become of it; if nobody has asked, then only that it is gone."""
        if adapter.ask_id >= 0 or error:
            self._tell_supervisor(AdapterChanged(adapter.ask_id, adapter.name, ModelError.code if error else "", error))
        adapter.ask_id = -1

    def _tell_engine(self) -> None:
        if self._engine is not None:
            self._engine.facts = msgspec.structs.replace(self._engine.facts, adapters=self._table.facts)

    def _send(self, rank: int, adapter: Adapter) -> None:
        self._to_workers.load_adapter(rank, LoadAdapter(adapter.number, adapter.place, adapter.path))
