"""The pickle inside a file of `torch.save`, read without unpickling: `read_state_dict(data)`.

Owns: the few opcodes and names that a plain state dict is written with (pickle protocol 2 to 4), and what they mean
here: plain values, and tensors by where they lie. Never does: import, look up or call what a file names. Whatever is
not in the tables below is an error, so a file can say nothing but "these tensors, by these names".
"""

from __future__ import annotations

import pickletools  # it names opcodes; nothing here ever runs one
from collections.abc import Callable
from typing import Any, Final, NamedTuple

__all__ = ["StoredTensor", "TorchPickleError", "read_state_dict"]


class TorchPickleError(ValueError):
    """Why it is no plain state dict."""


class _Storage(NamedTuple):
    dtype: str
    key: str  # the record of the file that holds it


class StoredTensor(NamedTuple):
    """A tensor by where it lies. Offset, shape and strides are in elements."""

    dtype: str  # as safetensors calls it
    key: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Name(NamedTuple):
    """What a file asks to import: a text to us."""

    module: str
    name: str


class _Mark:
    """Where a list of arguments begins."""


_STORAGES: Final = {
    _Name("torch", f"{kind}Storage"): dtype
    for kind, dtype in [
        *(("Float", "F32"), ("Half", "F16"), ("BFloat16", "BF16"), ("Double", "F64")),
        *(("Long", "I64"), ("Int", "I32"), ("Short", "I16"), ("Char", "I8"), ("Byte", "U8"), ("Bool", "BOOL")),
    ]
}
_MARK: Final = _Mark()
_MAX_DIMS: Final = 8


def read_state_dict(data: bytes) -> dict[str, StoredTensor]:
    """The tensors of a state dict, by name; what else it holds is left out.

    Raises:
        TorchPickleError: it is none, or holds what a plain one does not.
    """
    value = _Reader().run(data)
    if not isinstance(value, dict):
        raise TorchPickleError("it holds no map of names to tensors")
    return {name: tensor for name, tensor in value.items() if isinstance(tensor, StoredTensor)}


class _Reader:
    """One run of a pickle's stack machine over plain values."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> object:
        try:
            for opcode, argument, _ in pickletools.genops(data):
                if opcode.name == "STOP":
                    return self._stack.pop()
                self._step(opcode.name, argument)
        except TorchPickleError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:  # of a stream that makes no sense
            raise TorchPickleError(f"its pickle is damaged: {type(error).__name__}") from error
        raise TorchPickleError("its pickle has no end")

    def _step(self, opcode: str, argument: Any) -> None:
        if opcode in _IGNORED:
            return
        if opcode in _CONSTANTS:
            self._stack.append(_CONSTANTS[opcode]())
        elif opcode in _LITERALS:
            self._stack.append(argument)
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            self._stack[len(self._stack) - count :] = [tuple(self._stack[-count:])]
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        else:
            raise TorchPickleError(f"it uses {opcode}, which a plain state dict does not")

    def take_from_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise TorchPickleError("its pickle is damaged: a mark is missing")
        taken = self._stack[at + 1 :]
        del self._stack[at:]
        return taken

    def close_tuple(self, _: Any) -> None:
        self._stack.append(tuple(self.take_from_mark()))

    def put(self, index: int) -> None:
        self._memo[index] = self._stack[-1]

    def memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def get(self, index: int) -> None:
        self._stack.append(self._memo[index])

    def name(self, argument: str) -> None:
        self._stack.append(_Name(*argument.split(" ", 1)))

    def stacked_name(self, _: Any) -> None:
        name, module = self._text(self._stack.pop()), self._text(self._stack.pop())
        self._stack.append(_Name(module, name))

    def set_item(self, _: Any) -> None:
        value, key = self._stack.pop(), self._text(self._stack.pop())
        self._into(dict)[key] = value

    def set_items(self, _: Any) -> None:
        flat = self.take_from_mark()
        self._into(dict).update(zip(map(self._text, flat[::2]), flat[1::2], strict=True))

    def append_items(self, _: Any) -> None:
        items = self.take_from_mark()
        self._into(list).extend(items)

    def append_item(self, _: Any) -> None:
        item = self._stack.pop()
        self._into(list).append(item)

    def drop_state(self, _: Any) -> None:
        """BUILD: attributes of an object, of which ours has none (a state dict's `_metadata`)."""
        self._stack.pop()

    def storage(self, _: Any) -> None:
        kind, name, key, _device, _count = self._stack.pop()
        if kind != "storage" or not isinstance(name, _Name) or name not in _STORAGES:
            raise TorchPickleError("a storage is not of numbers that are known")
        self._stack.append(_Storage(_STORAGES[name], self._text(key)))

    def call(self, _: Any) -> None:
        arguments, name = self._stack.pop(), self._stack.pop()
        make = _CALLS.get(name) if isinstance(name, _Name) else None
        if make is None:
            raise TorchPickleError(f"it wants to call {'.'.join(name) if isinstance(name, _Name) else 'a value'}")
        self._stack.append(make(*arguments))

    def _text(self, value: object) -> str:
        """Names and keys are texts. Of other values nothing is hashed, compared or shown: small files can hold values
        that refer to each other so often that it would take for ever."""
        if type(value) is not str:
            raise TorchPickleError(f"a {type(value).__name__} is where a name must be")
        return value

    def _into(self, kind: type) -> Any:
        target = self._stack[-1]
        if not isinstance(target, kind):
            raise TorchPickleError(f"its pickle is damaged: it fills a {type(target).__name__}")
        return target


def _tensor(storage: object, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: object) -> StoredTensor:
    if not isinstance(storage, _Storage):
        raise TorchPickleError("a tensor has no storage")
    sizes = (offset, *shape, *strides)
    if len(shape) != len(strides) or len(shape) > _MAX_DIMS or any(type(n) is not int or n < 0 for n in sizes):
        raise TorchPickleError(f"a tensor's shape and strides are not as many sizes of 0 or more, {_MAX_DIMS} at most")
    return StoredTensor(storage.dtype, storage.key, offset, tuple(shape), tuple(strides))


_CALLS: Final[dict[_Name, Callable[..., object]]] = {
    _Name("torch._utils", "_rebuild_tensor_v2"): _tensor,
    _Name("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
    _Name("collections", "OrderedDict"): dict,
}
_IGNORED: Final = {"PROTO", "FRAME"}
_CONSTANTS: Final[dict[str, Callable[[], object]]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "MARK": lambda: _MARK,
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
}
_LITERALS: Final = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE"}
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_ACTIONS: Final[dict[str, Callable[[_Reader, Any], None]]] = {
    "TUPLE": _Reader.close_tuple,
    "APPENDS": _Reader.append_items,
    "APPEND": _Reader.append_item,
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Reader.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Reader.get),
    "MEMOIZE": _Reader.memoize,
    "GLOBAL": _Reader.name,
    "STACK_GLOBAL": _Reader.stacked_name,
    "SETITEM": _Reader.set_item,
    "SETITEMS": _Reader.set_items,
    "BUILD": _Reader.drop_state,
    "BINPERSID": _Reader.storage,
    "REDUCE": _Reader.call,
}
