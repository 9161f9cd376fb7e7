"""`AdapterChanges`: who asked the group to load or unload a LoRA adapter, and which there are now.

Owns: the list of adapters that successors of processes begin with, and the answers. Never does: load one; the frontend
has the workers do that, and says whether they could.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import zmq

from procengine import ipc
from procengine.child_process import ChildProcess
from procengine.children import Children
from procengine.config import EngineConfig, LoraModule
from procengine.errors import ConfigError, EngineDeadError, InvalidRequestError
from procengine.lora_options import check_adapter_name
from procengine.messages import AdapterChanged, Adapters, ChangeAdapter, LoadLora, LoraChanged, UnloadLora, encode

__all__ = ["AdapterChanges"]


class AdapterChanges:
    """Of one group. `control` is the ROUTER that answers go out of."""

    def __init__(self, config: EngineConfig, children: Children, control: zmq.Socket[bytes]) -> None:
        self._config = config
        self._children = children
        self._control = control
        self._asked: dict[int, tuple[bytes, int, ChangeAdapter]] = {}  # our number -> asker, its number, what
        self._next_id = 0

    def ask(self, asker: bytes, message: LoadLora | UnloadLora) -> None:
        """Somebody wants a change, and waits for an answer."""
        frontend = self._children.find("frontend")
        path = _absolute(message.path) if isinstance(message, LoadLora) else None
        try:
            if not self._config.lora.is_on:
                raise InvalidRequestError("lora_name: this group takes no adapters; start it with --enable-lora")
            if path is not None:
                check_adapter_name(message.name, (self._config.model.name, *self._config.api.served_model_names))
            if frontend is None or not frontend.is_ready or not frontend.is_alive:
                raise EngineDeadError("the frontend is being started; try again later")
        except (ConfigError, InvalidRequestError, EngineDeadError) as error:
            self._answer(asker, LoraChanged(message.ask_id, error.code, str(error)))
            return
        change = ChangeAdapter(self._next_id, message.name, path)
        self._asked[self._next_id] = (asker, message.ask_id, change)
        self._next_id += 1
        self._children.send_to(frontend, change)

    def take(self, changed: AdapterChanged) -> None:
        """The frontend has done it, or says why not; or one is gone by itself."""
        asker, ask_id, change = self._asked.pop(changed.ask_id, (None, -1, None))
        if change is not None and not changed.error:
            self._note(change.name, change.path)
        elif changed.ask_id < 0:  # else of a frontend that is gone, and whoever asked it knows
            self._note(changed.name, None)
        if asker is not None:
            self._answer(asker, LoraChanged(ask_id, changed.code, changed.error))

    def tell(self, child: ChildProcess) -> None:
        """One is ready that may have been started before the newest change."""
        if child.role == "api" and self._config.lora.is_on:
            self._children.send_to(child, self._all)

    def lose(self, child: ChildProcess) -> None:
        """One is gone, and if it is the frontend, what it had not done with it."""
        if child.role == "frontend":
            error = EngineDeadError("the frontend was restarted before this was done; try again")
            for asker, ask_id, _ in self._asked.values():
                self._answer(asker, LoraChanged(ask_id, error.code, str(error)))
            self._asked.clear()

    @property
    def _all(self) -> Adapters:
        return Adapters([(module.name, module.path) for module in self._config.lora.modules])

    def _note(self, name: str, path: str | None) -> None:
        others = tuple(module for module in self._config.lora.modules if module.name != name)
        modules = others if path is None else (*others, LoraModule(name, path))
        lora = msgspec.structs.replace(self._config.lora, modules=modules)
        self._config = msgspec.structs.replace(self._config, lora=lora)
        self._children.tell_successors(self._config)
        self._children.send(self._all, "api")

    def _answer(self, asker: bytes, answer: LoraChanged) -> None:
        ipc.send_routed(self._control, asker, encode(answer))


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
