"""Adapters of PEFT folders: what they make of a model is what merged weights make of it, and what is wrong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from procengine.config import LoraConfig
from procengine.decode_graphs import graph_sizes
from procengine.errors import ModelError
from procengine.kernels.lora import AdapterBlocks, adapter_blocks
from procengine.model_source import resolve_model
from procengine.models.decoder import AdaptedDecoder
from procengine.models.loader import load_model
from procengine.models.lora_bank import LoraBank
from procengine.models.lora_weights import read_lora_weights
from procengine.request import RowSampling
from procengine.row_features import ADAPTER
from procengine.torch_executor import TorchModel
from tests.lora_adapters import ATTENTION, MLP, merged, save_adapter
from tests.unit.models.tiny_families import FAMILIES, save_family
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import PROMPTS, Engine, TinyModel

_QUERIES = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
_IDS = [3, 14, 15, 92, 65, 35, 89, 79]
_FUSED = ("qkv_proj", "gate_up_proj", "o_proj", "down_proj")
# kind of tiny model -> modules of its adapters
_MODELS = {
    "llama": (*ATTENTION, *MLP),
    "llama-biases": (*ATTENTION, *MLP),
    "llama-head-dim": ("q_proj", "o_proj", "up_proj"),
    "phi3": _FUSED,
    "phi4-longrope": _FUSED,  # heads that turn in part: rows of queries and keys are in another order
    "gemma3": (*ATTENTION, *MLP),
    "qwen3-moe": ATTENTION,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def save(kind: str, folder: Path) -> Any:
    """transformers' model of that kind, saved to `folder`."""
    model = save_family(kind, folder)[0] if kind in FAMILIES else save_tiny_model(kind, folder)
    (folder / "tokenizer.json").touch()
    return model


def logits(model: AdaptedDecoder, bank: LoraBank, place: int) -> torch.Tensor:
    """Of all positions of one sequence whose tokens have the adapter in that place."""
    blocks = adapter_blocks(np.full(len(_IDS), place, np.int32))
    assert blocks is not None
    tokens, places, adapters = map(torch.from_numpy, (blocks.tokens, blocks.places, blocks.adapters))
    adapted = bank.during(AdapterBlocks(tokens, places, adapters, blocks.width))
    start = torch.tensor([0, len(_IDS)], dtype=torch.int32)

    def attend(layer: int, q: Any, k: Any, v: Any, rotation: Any) -> torch.Tensor:
        ops, spec = model.operations, model.attention[layer]
        if rotation is not None:
            q, k = ops.apply_rope(q, k, rotation.cos, rotation.sin, rotation.positions)
        shape = (spec.scale, True, spec.sliding_window, spec.softcap)
        return ops.varlen_attention(q, k, v, start, len(_IDS), *shape)

    with torch.inference_mode():
        hidden = model.forward(torch.tensor(_IDS), torch.arange(len(_IDS)), attend, adapters=adapted)
        return model.compute_logits(hidden)


@pytest.mark.parametrize("kind", _MODELS)
def test_logits_are_those_of_merged_weights(kind: str, tmp_path: Path) -> None:
    oracle = save(kind, tmp_path / "model")
    config = resolve_model(str(tmp_path / "model"), tmp_path / "home")
    model: Any = load_model(config, torch.float32, "cpu", progress=False)
    bank = LoraBank(config, LoraConfig(max_loras=3, max_rank=6), model.dtype, model.device)
    paths = [
        save_adapter(oracle, tmp_path / f"a{i}", i, rank=rank, modules=_MODELS[kind]) for i, rank in ((0, 6), (1, 3))
    ]
    for place, path in (
        (2, paths[1]),
        (0, paths[0]),
        (0, paths[1]),
    ):  # the last one instead of another, of a higher rank
        bank.put(place, read_lora_weights(path, config, 6))
        with torch.inference_mode():
            expected = merged(oracle, path)(torch.tensor([_IDS])).logits[0]
        torch.testing.assert_close(logits(model, bank, place), expected, atol=2e-4, rtol=2e-4)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """A model, what we read of its folder, and an adapter of it."""
    root = tmp_path_factory.mktemp("lora")
    oracle = save("llama", root / "model")
    return oracle, resolve_model(str(root / "model"), root), save_adapter(oracle, root / "adapter", 1)


@pytest.mark.parametrize(
    "mode",
    [
        {"depth": 2, "decode_steps": 4, "max_num_batched_tokens": 24, "num_blocks": 20},  # they preempt each other
        {"depth": 1, "graphs": graph_sizes(8)},
        {"depth": 2, "num_speculative_tokens": 3},
    ],
    ids=str,
)
def test_rows_with_and_without_adapters_share_steps_of_every_kind(
    tiny: tuple[Any, Any, Path], tmp_path: Path, mode: dict[str, Any]
) -> None:
    oracle, config, _ = tiny
    paths = [save_adapter(oracle, tmp_path / str(place), place, rank=2 + place) for place in range(2)]
    bank = LoraBank(config, LoraConfig(max_loras=2, max_rank=4), torch.float32, torch.device("cpu"))
    for place, path in enumerate(paths):
        bank.put(place, read_lora_weights(path, config, 4))
    loaded = load_model(config, torch.float32, "cpu", progress=False)
    graphs, mode = mode.get("graphs", ()), {name: one for name, one in mode.items() if name != "graphs"}
    engine = Engine(TinyModel(config, TorchModel(loaded, graphs, bank=bank)), **mode)
    oracles = [merged(oracle, path) for path in paths] + [oracle]  # -1 is the last
    rows = [(prompt, place) for prompt in PROMPTS for place in (0, -1, 1)]
    for prompt, place in rows:
        sampling = RowSampling(0, features=ADAPTER if place >= 0 else 0)
        engine.add(prompt, 6, sampling, adapter=place, cache_salt=b"%d" % place)
    engine.run()
    for (prompt, place), tokens in zip(rows, engine.tokens.values(), strict=True):
        with torch.inference_mode():
            best = oracles[place](torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].argmax(-1)
        assert tokens == best.tolist(), (len(prompt), place)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_few_bits_are_read(tiny: tuple[Any, Any, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    oracle, config, plain = tiny
    narrow = read_lora_weights(save_adapter(oracle, tmp_path, 1, dtype=dtype), config, 16)
    for part, expected in zip(narrow.parts, read_lora_weights(plain, config, 16).parts, strict=True):
        assert part.target == expected.target and part.layer == expected.layer
        np.testing.assert_array_equal(part.a, torch.from_numpy(expected.a).to(dtype).float().numpy())


def test_scaling_of_rank_stabilised_adapters_and_of_ranks_by_module(
    tiny: tuple[Any, Any, Path], tmp_path: Path
) -> None:
    oracle, config, _ = tiny
    path = save_adapter(oracle, tmp_path, 1, rank=4, use_rslora=True, lora_alpha=6)
    tensors = load_file(path / "adapter_model.safetensors")
    a, b = (tensors[_QUERIES.format(side)] for side in "AB")
    one = {_QUERIES.format("A"): a[:1].contiguous(), _QUERIES.format("B"): b[:, :1].contiguous()}
    save_file(tensors | one, path / "adapter_model.safetensors")
    parts = read_lora_weights(path, config, 16).parts
    queries = [part for part in parts if part.target.matrix == "qkv" and part.target.first_output == 0]
    assert [len(part.a) for part in queries] == [1, 4, 4]
    assert queries[0].b == pytest.approx(6 * b[:, :1].numpy(), abs=1e-6)
    second = tensors[_QUERIES.format("B").replace(".0.", ".1.")]
    assert queries[1].b == pytest.approx(6 / 4**0.5 * second.numpy(), abs=1e-6)


def _config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def _tensors(**changes: torch.Tensor | None) -> Callable[[Path], None]:
    """Other tensors, or none, for the first layer's queries, by side (A or B)."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        for name, tensor in changes.items():
            del tensors[_QUERIES.format(name)]
            if tensor is not None:
                tensors[_QUERIES.format(name)] = tensor
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


def _named(name: str) -> Callable[[Path], None]:
    """One tensor more."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        save_file(tensors | {name: torch.ones(4, 32)}, folder / "adapter_model.safetensors")

    return change


_BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda folder: (folder / "adapter_config.json").unlink(), "there is no adapter_config.json"),
    (lambda folder: (folder / "adapter_model.safetensors").unlink(), "there is no adapter_model.safetensors"),
    (lambda folder: (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin"), "is a pickle"),
    (lambda folder: save_file({}, folder / "adapter_model.safetensors"), "holds no tensors"),
    (lambda folder: (folder / "adapter_config.json").write_text("[1]"), "cannot be read as a JSON object"),
    (_config(peft_type="IA3"), "peft_type: must be LORA, got 'IA3'"),
    (_config(r=0), "r: must be a number more than 0, got 0"),
    (_config(r=9), r"r: the adapter has rank 9, the limit \(max_lora_rank\) is 8"),
    (_config(lora_alpha="x"), "lora_alpha: must be a number"),
    (_config(use_dora=True), "use_dora: is not supported, got True"),
    (_config(bias="all"), "bias: is not supported, got 'all'"),
    (_config(alpha_pattern={"q_proj": 3}), "alpha_pattern: is not supported"),
    (_config(modules_to_save=["lm_head"]), "modules_to_save: is not supported"),
    (_config(init_lora_weights="pissa_niter_4"), "init_lora_weights: 'pissa_niter_4' changes the weights"),
    (_tensors(B=None), "is there without its other half"),
    (_tensors(A=torch.ones(4, 31)), r"lora_A.weight has shape \[4, 31\], expected \[4, 32\]"),
    (_tensors(A=torch.ones(32)), r"lora_A.weight has shape \[32\], expected \['rank', 32\]"),
    (_tensors(B=torch.ones(32, 3)), r"lora_B.weight has shape \[32, 3\], expected \[32, 4\]"),
    (_tensors(A=torch.ones(9, 32), B=torch.ones(32, 9)), r"has rank 9, the limit \(max_lora_rank\) is 8"),
    (_tensors(A=torch.full((4, 32), torch.nan)), "no finite numbers"),
    (_tensors(A=torch.ones(4, 32, dtype=torch.int32)), "is stored as I32"),
    (_named("base_model.model.lm_head.lora_A.weight"), "lm_head takes no adapter in this model; do: mlp.down_proj"),
    (_named("base_model.model.model.layers.0.self_attn.router.lora_A.weight"), "self_attn.router takes no adapter"),
    (_named("base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"), "this model has 3 layers"),
    (_named("other"), "tensor other is none of a LoRA adapter"),
]


@pytest.mark.parametrize(("spoil", "text"), _BAD)
def test_what_is_wrong_is_named(
    tiny: tuple[Any, Any, Path], tmp_path: Path, spoil: Callable[[Path], object], text: str
) -> None:
    _, config, plain = tiny
    folder = shutil.copytree(plain, tmp_path / "adapter")
    spoil(folder)
    with pytest.raises(ModelError, match=text):
        read_lora_weights(folder, config, 8)
