"""What was converted from a model file the last time: its `ModelConfig` and its tokenizer.json.

Owns: the folders below `home`/tokenizers, their keys (path, size and mtime of the file) and how they are written. Never
does: read a model file, or trust an entry of another version: what cannot be read is made anew.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from procengine.config import ModelConfig
from procengine.errors import ModelError

__all__ = ["Converter", "cached_conversion"]

_CACHE_VERSION = 2  # part of the key: raise it when a converted tokenizer or a ModelConfig changes meaning

Converter = Callable[[Path], tuple[ModelConfig, str]]  # a model file -> its facts, and the text of its tokenizer.json


def cached_conversion(path: Path, home: Path, convert: Converter) -> ModelConfig:
    """The facts of the model file `path`, with the `tokenizer_path` of what was converted from it, now or before.

    Raises ModelError when the conversion cannot be written below `home`, and whatever `convert` raises.
    """
    folder = home / "tokenizers" / _cache_key(path)
    config = _read_cached(folder)
    if config is None:
        config, tokenizer = convert(path)
        _write(folder, config, tokenizer)
    return msgspec.structs.replace(config, tokenizer_path=str(folder.absolute() / "tokenizer.json"))


def _cache_key(path: Path) -> str:
    stat = path.stat()
    facts = f"{_CACHE_VERSION}|{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    return hashlib.sha256(facts.encode()).hexdigest()[:24]


def _read_cached(folder: Path) -> ModelConfig | None:
    try:
        cached = msgspec.json.decode((folder / "model.json").read_bytes(), type=ModelConfig)
    except (OSError, msgspec.DecodeError):  # absent, or written by another version: made anew
        return None
    return cached if (folder / "tokenizer.json").is_file() else None


def _write(folder: Path, config: ModelConfig, tokenizer: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_atomically(folder / "tokenizer.json", tokenizer.encode())
        _write_atomically(folder / "model.json", msgspec.json.encode(config))  # last: it says that both are there
    except OSError as error:
        raise ModelError(f"{folder}: the converted tokenizer cannot be written there: {error}") from error


def _write_atomically(path: Path, data: bytes) -> None:
    """Others see the old file or the whole new one, also when several processes write it at once."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(data)
            file.flush()
            temporary.chmod(0o644)  # temporary files are private, the cache of a shared home need not be
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
