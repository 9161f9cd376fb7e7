"""What the options of adapters come to, and which do not fit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from procengine.config import LoraConfig
from procengine.engine_args import EngineArgs
from procengine.errors import ConfigError
from procengine.resolve import resolve
from tests.model_files import LLAMA, write_folder


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pe", dir="/tmp") as run_dir:
        monkeypatch.setenv("PROCENGINE_RUN_DIR", run_dir)
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "adapter_config.json").write_text(json.dumps({}))
        yield str(write_folder(tmp_path / "tiny", LLAMA))


def lora(model: str, *modules: str, **options: Any) -> LoraConfig:
    given = {"enable_lora": True, "device": "cpu", **options}
    return resolve(EngineArgs(model=model, lora_modules=modules, **given)).lora


def test_off_is_off(model: str) -> None:
    assert not resolve(EngineArgs(model=model)).lora.is_on


def test_modules_have_absolute_paths_and_room(model: str, tmp_path: Path) -> None:
    config = lora(model, f"a={tmp_path}/a", f"org/b:1={tmp_path}/b")
    assert [(one.name, one.path) for one in config.modules] == [("a", f"{tmp_path}/a"), ("org/b:1", f"{tmp_path}/b")]
    assert (config.max_loras, config.max_rank, config.allows_http) == (8, 16, False)
    assert lora(model, max_loras=3, max_lora_rank=64).max_loras == 3


def test_adapters_take_the_torch_kernels(model: str) -> None:
    assert resolve(EngineArgs(model=model, device="cpu", enable_lora=True)).worker.kernels == "torch"
    with pytest.raises(ConfigError, match="kernels: native was asked for, but adapters"):
        lora(model, kernels="native")


@pytest.mark.parametrize(
    ("modules", "options", "text"),
    [
        (("a=PATH/a",), {"enable_lora": False}, "lora_modules: adapters take enable_lora"),
        (("a",), {}, "lora_modules: must be NAME=PATH, got 'a'"),
        (("a=",), {}, "lora_modules: must be NAME=PATH, got 'a='"),
        (("a=PATH/none",), {}, "lora_modules: a: there is no adapter_config.json in"),
        (("=PATH/a",), {}, "lora_name: must be 1 to 128 letters"),
        (("a b=PATH/a",), {}, "lora_name: must be 1 to 128 letters"),
        (("a=PATH/a", "a=PATH/b"), {}, "lora_modules: a is there 2 times"),
        (
            ("served=PATH/a",),
            {"served_model_name": ("served",)},
            "served is what the model itself is called",
        ),
        (("a=PATH/a", "b=PATH/b"), {"max_loras": 1}, r"has 2 adapters, the limit \(max_loras\) is 1"),
        ((), {"max_loras": 0}, "max_loras: must be between 1 and 4096, got 0"),
        ((), {"max_lora_rank": 513}, "max_lora_rank: must be between 1 and 512, got 513"),
    ],
)
def test_what_does_not_fit_is_named(
    model: str, tmp_path: Path, modules: tuple[str, ...], options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        lora(model, *(module.replace("PATH", str(tmp_path)) for module in modules), **options)


def test_models_that_take_none_say_so(tmp_path: Path, model: str) -> None:
    del model  # its run directory
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 96, "n_embd": 32, "n_layer": 1,
            "n_head": 2, "n_positions": 64, "dtype": "float32"}  # fmt: skip
    with pytest.raises(ConfigError, match="enable_lora: there are no adapters for GPT-2"):
        lora(str(write_folder(tmp_path / "gpt2", gpt2)))
