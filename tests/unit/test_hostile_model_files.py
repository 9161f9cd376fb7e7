"""Whatever a model's files hold, they are read, or refused by an error that names the file: nothing crashes."""

from __future__ import annotations

import json
import random
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from procengine.chat_template import ChatTemplate
from procengine.errors import ModelError
from procengine.gguf_file import GGUFFile
from procengine.gguf_tokenizer import build_tokenizer
from procengine.model_source import resolve_model
from procengine.tokenizer import Tokenizer
from tests.mangling import mangled
from tests.model_files import LLAMA, LLAMA3_ROPE, write_folder, write_gguf

_ODD: Final[list[Any]] = [
    None, True, -1, 0, 2**31, 2**63, 2**64 - 1, 1e308, float("nan"), float("inf"), 0.5, "", "x", "é\0", "9" * 400, [],
    [[]], [None], ["a", 7], [-1], [2**40], {}, {"a": 1}, {"content": 3}, [{"name": "default"}],
    [{"name": "default", "template": 3}],
]  # fmt: skip
_CONFIG_KEYS: Final = [
    *LLAMA, "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters", "head_dim", "rms_norm_eps",
    "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window", "layer_types", "max_window_layers",
    "torch_dtype", "hidden_act", "quantization_config", "partial_rotary_factor", "original_max_position_embeddings",
]  # fmt: skip
_ROPE_KEYS: Final = [
    *LLAMA3_ROPE,
    "rope_type",
    "type",
    "rope_theta",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
]
_FILES: Final = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)
_JUNK: Final = (b"", b"\xff" * 50, b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[]", b"3", b'"x"', b"{{" * 9)


def attempt(path: Path, home: Path) -> bool:
    """Whether the group would start, as far as its configuration and its frontend go."""
    try:
        config = resolve_model(str(path), home)
        Tokenizer.load(config.tokenizer_path)
        if config.chat_template is not None:
            ChatTemplate(config.chat_template, config.chat_bos_token, config.chat_eos_token)
    except ModelError as error:
        return _must_name(error, path)
    return True


def _must_name(error: ModelError, path: Path) -> bool:
    text = str(error)
    if str(path) not in text and "chat template" not in text:
        raise AssertionError(f"an error that does not say where: {text}") from error
    return False


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_no_value_of_a_config_json_crashes_its_reader(tmp_path: Path, home: Path, architecture: str) -> None:
    base = {**LLAMA, "architectures": [architecture], "use_sliding_window": True}
    configs = [{**base, key: value} for key in _CONFIG_KEYS for value in _ODD]
    for kind in ("llama3", "yarn", "linear") if architecture == "LlamaForCausalLM" else ():
        rope = {**LLAMA3_ROPE, "rope_type": kind, "mscale": 1.0, "mscale_all_dim": 1.0}
        configs += [{**base, "rope_scaling": {**rope, key: value}} for key in _ROPE_KEYS for value in _ODD]
    write_folder(tmp_path, base)
    assert attempt(tmp_path, home)
    outcomes = []
    for config in configs:
        (tmp_path / "config.json").write_text(json.dumps(config))
        outcomes.append(attempt(tmp_path, home))
    assert outcomes.count(False) > len(outcomes) / 4


@pytest.mark.parametrize("name", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_sizes_beyond_any_model_are_refused_before_anything_is_made_of_them(
    tmp_path: Path, home: Path, name: str
) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {name} is {2**31}, the limit is \d+"):
        resolve_model(str(write_folder(tmp_path, {**LLAMA, name: 2**31})), home)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("tokenizer_config.json", ("chat_template", "bos_token", "eos_token")),
        ("generation_config.json", ("eos_token_id",)),
        ("model.safetensors.index.json", ("weight_map", "metadata")),
        ("1_Pooling/config.json", ("pooling_mode", "pooling_mode_mean_tokens")),
    ],
)
def test_no_value_of_the_other_files_crashes_their_reader(
    tmp_path: Path, home: Path, name: str, keys: tuple[str, ...]
) -> None:
    write_folder(tmp_path, LLAMA)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    for content in ({key: value} for key in keys for value in _ODD):
        (tmp_path / name).write_text(json.dumps(content))
        attempt(tmp_path, home)


@pytest.mark.parametrize("name", _FILES)
def test_a_spoilt_file_is_read_or_refused(tmp_path: Path, home: Path, name: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    more: dict[str, Any] = {"generation_config__json": {"eos_token_id": [1, 2]}, "chat_template__jinja": template}
    config = {**LLAMA, "rope_scaling": {**LLAMA3_ROPE, "rope_type": "llama3"}}
    write_folder(tmp_path, config, tokenizer_config__json={"eos_token": "</s>", "chat_template": template}, **more)
    assert attempt(tmp_path, home)
    rnd, good = random.Random(name), (tmp_path / name).read_bytes()
    outcomes = []
    for spoilt in (*_JUNK, *(mangled(rnd, good) for _ in range(250))):
        (tmp_path / name).write_bytes(spoilt)
        outcomes.append(attempt(tmp_path, home))
    assert False in outcomes
    (tmp_path / name).write_bytes(good)
    assert attempt(tmp_path, home)


def test_an_index_cannot_name_files_elsewhere(tmp_path: Path, home: Path) -> None:
    folder = write_folder(tmp_path / "m", LLAMA)
    (folder / "model.safetensors").rename(tmp_path / "other.safetensors")
    for shard in ("../other.safetensors", str(tmp_path / "other.safetensors"), "."):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(ModelError, match=r"not in its folder|not there"):
            resolve_model(str(folder), home)


# --- GGUF


def _encoded(value: Any) -> bytes:
    """A value with its type before it."""
    pack = struct.pack
    match value:
        case bool():
            return pack("<I?", 7, value)
        case int():
            return pack("<IQ", 10, value) if value >= 2**31 else pack("<Ii", 5, value)
        case float():
            return pack("<If", 6, value)
        case str():
            return pack("<IQ", 8, len(value)) + value.encode()
        case _:
            return _encoded_array(value)


def _encoded_array(value: list[Any]) -> bytes:
    pack = struct.pack
    kind, items = (8, [_encoded(item)[4:] for item in value]) if value and isinstance(value[0], str) else (5, None)
    if items is None and value and isinstance(value[0], list):
        kind, items = 9, [_encoded(item)[4:] for item in value]
    return pack("<IIQ", 9, kind, len(value)) + b"".join(items or (pack("<i", item) for item in value))


_GGUF_ODD: Final[list[Any]] = [
    True, -1, 0, 2**31, 2**63, float("nan"), float("inf"), "", "x", [], [1, 2], ["a"], [-5] * 400, [""] * 600,
    [[1], []],
]  # fmt: skip
_MORE_KEYS: Final = [
    "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.attention.key_length", "llama.rope.freq_base",
    "llama.attention.sliding_window", "llama.expert_count", "tokenizer.chat_template", "general.alignment",
    "tokenizer.ggml.add_bos_token", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.unknown_token_id",
]  # fmt: skip


def _with_value(header: bytes, key: str, value: Any) -> bytes:
    """The same header with `value` under `key`, behind the others: an older value of it gets another name."""
    name = struct.pack("<Q", len(key)) + key.encode()
    renamed = header.replace(name, name[:-1] + b"_")
    (num_keys,) = struct.unpack_from("<Q", header, 16)
    return renamed[:16] + struct.pack("<Q", num_keys + 1) + name + _encoded(value) + renamed[24:]


@pytest.fixture(scope="module")
def gguf_parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, bytes, list[str]]:
    """Header and data of a good file, and its keys."""
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf")
    file, data = GGUFFile(path), path.read_bytes()
    start = min(info.offset for info in file.tensors.values())
    return data[:start], data[start:], list(file.metadata)


def test_no_value_of_a_gguf_file_crashes_its_reader(
    gguf_parts: tuple[bytes, bytes, list[str]], tmp_path: Path, home: Path
) -> None:
    header, data, keys = gguf_parts
    end = header.rstrip(b"\0")  # the last field of the header may end in zeros: at most 8 of them
    path, outcomes = tmp_path / "odd.gguf", []
    for key in (*keys, *_MORE_KEYS):
        for value in _GGUF_ODD:
            changed = _with_value(header[: len(end) + 8], key, value)
            path.write_bytes(changed + b"\0" * (-len(changed) % 32) + data)
            outcomes.append(attempt(path, home))
    assert outcomes.count(True) > 10 and outcomes.count(False) > 50


def test_a_spoilt_gguf_header_is_read_or_refused_and_takes_no_more_memory_than_a_few_files(
    gguf_parts: tuple[bytes, bytes, list[str]], tmp_path: Path
) -> None:
    header, data, _ = gguf_parts
    rnd, path = random.Random(11), tmp_path / "spoilt.gguf"
    num_read, most = 0, len(header) + len(data)
    tracemalloc.start()
    try:
        for _ in range(1000):
            path.write_bytes(mangled(rnd, header) + data)
            try:
                file = GGUFFile(path)
                num_read += 1
                list(_walk(file))
                build_tokenizer(file.metadata, str(path))
            except ModelError as error:
                _must_name(error, path)
        assert 0 < num_read < 900
        assert tracemalloc.get_traced_memory()[1] < 16 * most
    finally:
        tracemalloc.stop()


def _walk(file: GGUFFile) -> Iterator[int]:
    for value in file.metadata.values():
        yield len(list(value)) if hasattr(value, "__iter__") else 1
    for name in file.tensors:
        yield file.tensor_bytes(name).size
