"""The files of a Hugging Face model folder: `HuggingFaceFolder`.

Owns: which files a folder must have, and what those beside config.json say (weights index, tokenizer, chat template).
Never does: interpret config.json (see `hf_config`), or read a weight beyond its header.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from procengine.errors import ModelError

__all__ = ["HuggingFaceFolder", "first_dtype"]


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


class HuggingFaceFolder:
    """A model folder; each file is read when it is asked for. What is wrong in one is a ModelError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_json(self, name: str, missing_ok: bool = False) -> dict[str, Any]:
        """The JSON object in the file `name`; one that is absent is empty when `missing_ok`."""
        path = self.path / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except FileNotFoundError as error:
            if missing_ok:
                return {}
            raise ModelError(f"{path}: there is no such file") from error
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error

    def module_kinds(self) -> list[tuple[str, str]] | None:
        """(kind, folder) of the modules of sentence-transformers that follow each other; None where no file says."""
        path = self.path / "modules.json"
        if not path.is_file():
            return None
        try:
            modules = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        except (OSError, msgspec.DecodeError, RecursionError) as error:
            raise ModelError(f"{path}: cannot be read: {error}") from error
        return [(str(one.get("type", "")).rpartition(".")[2], str(one.get("path", ""))) for one in modules]

    def find_weights(self) -> Path:
        """The safetensors file, or the first of its shards, all of which are there; else a single pytorch_model.bin."""
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if index.is_file():
            shards = sorted({str(shard) for shard in self.read_json(index.name).get("weight_map", {}).values()})
            outside = [shard for shard in shards if Path(shard).name != shard]
            if outside:
                raise self.error(f"{index.name} names files that are not in its folder: {', '.join(outside)}")
            missing = [shard for shard in shards if not (self.path / shard).is_file()]
            if missing or not shards:
                raise self.error(f"{index.name} names files that are not there: {', '.join(missing) or 'none at all'}")
            return self.path / shards[0]
        if single.is_file():
            return single
        torch_file = self.path / "pytorch_model.bin"
        if torch_file.is_file():
            return torch_file
        sharded = f" (of the other kind only {torch_file.name} is read)" if any(self.path.glob("*.bin")) else ""
        raise self.error(f"there is neither {single.name} nor {index.name}{sharded}")

    def find_tokenizer(self) -> Path:
        """The absolute path of tokenizer.json."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            raise self.error(
                "there is no tokenizer.json (AutoTokenizer of transformers writes one with save_pretrained)"
            )
        return path.absolute()

    def added_token_id(self, content: str) -> int | None:
        """The id of the special token written `content`; None when the tokenizer adds no such token."""
        if not content:
            return None
        path = self.find_tokenizer()
        try:
            added = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
        except (msgspec.DecodeError, RecursionError) as error:
            raise ModelError(f"{path}: not a tokenizer.json: {error}") from error
        return next((token.id for token in added if token.content == content), None)

    def chat_template(self, tokenizer_config: dict[str, Any]) -> str | None:
        """Jinja source: a file of its own, or else what tokenizer_config.json holds."""
        path = self.path / "chat_template.jinja"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        template = tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = next((entry["template"] for entry in template if entry.get("name") == "default"), None)
        return template if isinstance(template, str) else None

    def error(self, message: str) -> ModelError:
        """An error that names the folder, to be raised."""
        return ModelError(f"{self.path}: {message}")


def first_dtype(path: Path) -> str:
    """dtype of the first tensor of a file of weights."""
    from procengine.safetensors_file import SafetensorsFile  # numpy comes with it, which most commands do without
    from procengine.torch_file import TorchFile

    names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    file = TorchFile(path) if path.suffix == ".bin" else SafetensorsFile(path)
    found = next((info.dtype for info in file.tensors.values()), "of no tensor")
    return names.get(found, found)
