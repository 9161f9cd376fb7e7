"""What the options of LoRA adapters come to.

Owns: the names that adapters may have. Never does: read weights; the workers do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from procengine.config import ApiConfig, LoraConfig, LoraModule, ModelConfig
from procengine.engine_args import EngineArgs
from procengine.errors import ConfigError
from procengine.lora_targets import why_no_lora

__all__ = ["check_adapter_name", "resolve_lora"]

_MAX_LORAS: Final = 8
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")


def resolve_lora(args: EngineArgs, model: ModelConfig, api: ApiConfig) -> LoraConfig:
    """The adapters of a group. Raises ConfigError: they do not fit the model, or each other."""
    if not args.enable_lora:
        if args.lora_modules:
            raise ConfigError("lora_modules: adapters take enable_lora (--enable-lora)")
        return LoraConfig()
    if args.device != "mock" and (reason := why_no_lora(model)) is not None:
        raise ConfigError(f"enable_lora: {reason}, and {model.name} is another kind ({model.architecture})")
    modules = tuple(_module(text) for text in args.lora_modules)
    names = [module.name for module in modules]
    for name in names:
        check_adapter_name(name, (model.name, *api.served_model_names))
        if names.count(name) > 1:
            raise ConfigError(f"lora_modules: {name} is there {names.count(name)} times")
    max_loras = max(_MAX_LORAS, len(modules)) if args.max_loras is None else args.max_loras
    if len(modules) > max_loras:
        raise ConfigError(f"lora_modules: has {len(modules)} adapters, the limit (max_loras) is {max_loras}")
    return LoraConfig(max_loras, args.max_lora_rank, modules, args.allow_runtime_lora_updating)


def check_adapter_name(name: str, taken: tuple[str, ...]) -> None:
    """Raises ConfigError: no adapter can be called this, beside models with these names."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "lora_name: must be 1 to 128 letters, digits, '.', '_', '-', '/' or ':' and start with a letter or digit, "
            f"got {name!r:.200}"
        )
    if name in taken:
        raise ConfigError(f"lora_name: {name} is what the model itself is called")


def _module(text: str) -> LoraModule:
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise ConfigError(f"lora_modules: must be NAME=PATH, got {text!r}")
    folder = Path(path).expanduser().absolute()
    if not (folder / "adapter_config.json").is_file():
        raise ConfigError(f"lora_modules: {name}: there is no adapter_config.json in {folder}")
    return LoraModule(name, str(folder))
