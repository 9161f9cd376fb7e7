"""Finds a model by name: `resolve_model(name, home) -> ModelConfig`.

Owns: what a name may be (folder, .gguf file, alias, hub id) and in which order it is looked up. Never does: interpret
a file (see `hf_config`, `gguf_config`), read weights, or import torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from procengine import hub
from procengine.config import ModelConfig
from procengine.errors import ModelError
from procengine.hf_config import HuggingFaceConfig
from procengine.hf_encoder_config import HuggingFaceEncoderConfig, is_encoder
from procengine.hf_files import HuggingFaceFolder
from procengine.model_cache import cached_conversion

__all__ = ["resolve_model"]

# A value of another kind than the one that its reader looks for; what is looked for and missing is a ModelError there.
_VALUE_ERRORS = (TypeError, ValueError, AttributeError, ArithmeticError, LookupError, RecursionError)


def resolve_model(name: str, home: Path) -> ModelConfig:
    """Everything the engine must know about `name`: a folder, a .gguf file, an alias or a hub id, tried in this order.

    `home` holds pulled models and converted tokenizers. Raises ModelError saying what was tried or what is wrong.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(name, path, home)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{name}: a model is a folder or a .gguf file, and this is neither")
        return _from_gguf(name, path, home)
    if name in hub.ALIASES or hub.is_hub_id(name):
        return _from_pulled(name, home)
    raise ModelError(
        f"{name!r}: no such model. Tried: a folder or .gguf file at {path.absolute()}; "
        f"the aliases {', '.join(sorted(hub.ALIASES))}; a hub id (org/name)"
    )


def _from_pulled(name: str, home: Path) -> ModelConfig:
    folder = hub.model_dir(name, home)
    if not folder.is_dir():
        raise ModelError(
            f"{name!r}: there is no such folder or file, and it was not pulled to {folder}; run: procengine pull {name}"
        )
    return _from_folder(name, folder, home)


def _from_folder(name: str, folder: Path, home: Path) -> ModelConfig:
    found = sorted(folder.glob("*.gguf"))
    # Folders of GGUF files often carry the config.json of the model that they were made from.
    if (folder / "config.json").is_file() and (any(folder.glob("*.safetensors")) or not found):
        return _checked(lambda: _read_folder(name, folder), folder)
    if len(found) == 1:
        return _from_gguf(name, found[0], home)
    if found:
        raise ModelError(f"{folder} holds several GGUF files, name one: {', '.join(path.name for path in found)}")
    raise ModelError(f"{folder}: there is neither a config.json nor a .gguf file in it")


def _read_folder(name: str, folder: Path) -> ModelConfig:
    if is_encoder(HuggingFaceFolder(folder).read_json("config.json")):
        return HuggingFaceEncoderConfig(name, folder).resolve()
    return HuggingFaceConfig(name, folder).resolve()


def _from_gguf(name: str, path: Path, home: Path) -> ModelConfig:
    """Read a GGUF file, or what was kept of it the last time: parsing its vocabulary costs a second, the cache 1 ms."""
    return msgspec.structs.replace(cached_conversion(path.absolute(), home, _convert_gguf), name=name)


def _convert_gguf(path: Path) -> tuple[ModelConfig, str]:
    # Imported here because a warm start needs none of them.
    from procengine.gguf_config import GGUFConfig
    from procengine.gguf_file import GGUFFile
    from procengine.gguf_tokenizer import build_tokenizer

    file = GGUFFile(path)
    config = _checked(lambda: GGUFConfig(file).resolve(), path)
    with _naming(path):
        return config, build_tokenizer(file.metadata, str(path)).to_str()


def _checked(read: Callable[[], ModelConfig], path: Path) -> ModelConfig:
    """What `read` returns, with every field of the type it is declared to have: the files may hold anything."""
    with _naming(path):
        return msgspec.convert(msgspec.to_builtins(read()), ModelConfig)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What reading a value of an unexpected kind may raise becomes an error that names the file."""
    try:
        yield
    except _VALUE_ERRORS as error:
        text = f"{type(error).__name__}: {error}"
        raise ModelError(
            f"{path}: a value in its configuration has the wrong type or is out of range: {text}"
        ) from error
