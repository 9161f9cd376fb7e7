"""From options to facts: ranges, options that must fit each other, and what "auto" becomes."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from procengine.config import EngineConfig, LimitsConfig, MetricsConfig
from procengine.engine_args import OPTIONS, EngineArgs
from procengine.errors import ConfigError, ModelError
from procengine.kernels.native import library
from procengine.resolve import resolve
from tests.model_files import LLAMA, SIZES, write_folder, write_gguf

POSITIONS = SIZES["max_position_embeddings"]


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the group would live: short, and not the user's own."""
    with tempfile.TemporaryDirectory(prefix="pe", dir="/tmp") as path:
        monkeypatch.setenv("PROCENGINE_RUN_DIR", path)
        yield Path(path)


@pytest.fixture
def model(tmp_path: Path, run_dir: Path) -> str:
    return str(write_folder(tmp_path / "tiny-llama", LLAMA))


def resolved(model: str, **options: Any) -> EngineConfig:
    return resolve(EngineArgs(model=model, **options))


RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("workers", [1, 64], [0, -1, 65]),
    ("threads", [1, 1024], [0, 1025]),
    ("block_size", [1, 1024], [0, -16, 1025]),
    ("num_blocks", [1, 1 << 24], [0, -1, (1 << 24) + 1]),
    ("kv_cache_memory", [1, 1 << 40], [0, -1]),
    ("gpu_memory_utilization", [0.01, 1], [0, 1.1]),
    ("max_num_seqs", [1, 2048], [0, -1, 65537]),
    ("max_num_batched_tokens", [256, 1 << 20], [0, -1, (1 << 20) + 1]),
    ("max_mixed_tokens", [2, 1 << 20], [1, 0, (1 << 20) + 1]),
    ("max_overtaken_tokens", [0, 1 << 20], [-1, (1 << 20) + 1]),
    ("max_model_len", [2, POSITIONS], [1, 0, -1]),
    ("async_depth", [1, 2, 3], [0, 4]),
    ("decode_steps", [1, 64], [0, 65]),
    ("speculative_tokens", [0, 64], [-1, 65]),
    ("max_loras", [1, 4096], [0, 4097]),
    ("max_lora_rank", [1, 512], [0, 513]),
    ("mock_step_ms", [0, 0.5, 60_000], [-0.1, 60_001, math.nan, math.inf]),
    ("max_queued_requests", [1, 10**6], [0]),
    ("max_queued_tokens", [1, 10**9], [0]),
    ("max_clients", [1, 50], [0, (1 << 20) + 1]),
    ("max_client_requests", [1, 10**6], [0]),
    ("max_client_bytes", [1024, 1 << 40], [1023]),
    ("max_unsent_bytes", [1024, 1 << 40], [1023]),
    ("request_timeout", [0.001, 86_400], [0, -1, 86_401, math.nan, math.inf]),
    ("queue_timeout", [0.001, 86_400], [0, -1, 86_401, math.nan, math.inf]),
    ("max_request_bytes", [1024, 1 << 30], [1023, (1 << 30) + 1]),
    ("max_n", [1, 1 << 16], [0, -1, (1 << 16) + 1]),
    ("max_stop_strings", [0, 1 << 16], [-1, (1 << 16) + 1]),
    ("max_stop_bytes", [0, 1 << 20], [-1, (1 << 20) + 1]),
    ("max_stop_token_ids", [0, 1 << 16], [-1, (1 << 16) + 1]),
    ("max_logprobs", [0, 1 << 16], [-1, (1 << 16) + 1]),
    ("max_bad_words", [0, 1 << 16], [-1, (1 << 16) + 1]),
    ("max_logit_bias", [0, 1 << 20], [-1, (1 << 20) + 1]),
    ("max_grammar_bytes", [0, 1 << 24], [-1, (1 << 24) + 1]),
    ("grammar_timeout", [0.01, 3600], [0, -1, 3601, math.nan, math.inf]),
    ("template_timeout", [0.01, 3600], [0, -1, 3601, math.nan]),
    ("crash_seconds", [0, 3600], [-1, 3601, math.nan]),
    ("crash_records", [1, 10_000], [0, -1, 10_001]),
    ("start_timeout", [0.1, 3600], [0, -1, math.nan, math.inf]),
    ("drain_timeout", [0, 3600], [-1, math.nan, math.inf]),
    ("max_restarts", [0, 100], [-1, (1 << 16) + 1]),
    ("step_timeout", [0.1, 3600], [0, -1, math.nan, math.inf]),
    ("restart_window", [0.1, 3600], [0, -1, math.nan, math.inf]),
    ("span_records", [0, 1, 1 << 14], [-1, 3, 1000, (1 << 24) + 1]),
    ("metrics_port", [0, 9400, 65535], [-1, 65536]),
    ("crash_seconds", [0, 0.5, 3600], [-1, 3601, math.nan]),
    ("crash_records", [1, 10_000], [0, 10_001]),
    ("port", [0, 8000, 65535], [-1, 65536]),
    ("api_workers", [1, 64], [0, -1, 65]),
]


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, good, _ in RANGES for value in good])
def test_value_in_range_is_taken(model: str, option: str, value: Any) -> None:
    assert resolved(model, **{option: value}).group.name == "tiny-llama"


@pytest.mark.parametrize(("option", "value"), [(option, value) for option, _, bad in RANGES for value in bad])
def test_value_out_of_range_is_refused_by_name_and_value_before_the_model_is_looked_for(
    option: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}: must be .*, got {value}$"):
        resolved("no such model", **{option: value})


def test_every_numeric_option_has_its_ranges_tested() -> None:
    numeric = {name for name, option in OPTIONS.items() if option.kind in (int, float)}
    assert numeric == {option for option, _, _ in RANGES}


# --- the token budget


@pytest.mark.parametrize(
    ("options", "budget"),
    [
        ({}, 256 + 64),
        ({"max_num_seqs": 32}, 256),
        ({"device": "mock"}, 2048),
        ({"max_num_seqs": 4096}, 4096 + 64),
        ({"enable_chunked_prefill": False}, POSITIONS),
        ({"enable_chunked_prefill": False, "max_num_seqs": 1024}, 1024),
        ({"enable_chunked_prefill": False, "max_model_len": 100, "max_num_seqs": 8}, 100),
        ({"max_num_batched_tokens": 256}, 256),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 8}, 8),
    ],
)
def test_token_budget_that_is_not_given_holds_what_a_step_may_need(
    model: str, options: dict[str, Any], budget: int
) -> None:
    assert resolved(model, **options).scheduler.max_num_batched_tokens == budget


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 64),
        ({"max_num_batched_tokens": 2048}, None),  # who chooses the one means it
        ({"max_num_batched_tokens": 2048, "max_mixed_tokens": 64}, 64),
        ({"device": "mock"}, None),
        ({"device": "mock", "max_mixed_tokens": 64}, 64),
    ],
)
def test_a_cpu_keeps_prompts_beside_decoding_rows_short(model: str, options: dict[str, Any], most: int | None) -> None:
    assert resolved(model, **options).scheduler.max_mixed_tokens == most


def test_token_budget_below_the_rows_of_a_step_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: must be at least max_num_seqs \(256\), got 255"):
        resolved(model, max_num_batched_tokens=255)


def test_token_budget_below_a_whole_prompt_is_refused_without_chunked_prefill(model: str) -> None:
    options = {"max_num_batched_tokens": POSITIONS - 1, "enable_chunked_prefill": False}
    with pytest.raises(ConfigError, match=rf"at least max_model_len \({POSITIONS}\), got {POSITIONS - 1}"):
        resolved(model, **options)
    assert resolved(model, **options, max_model_len=POSITIONS - 1).scheduler.max_model_len == POSITIONS - 1


# --- the model


def test_context_is_the_models_own_unless_it_is_shortened(model: str) -> None:
    assert resolved(model).scheduler.max_model_len == POSITIONS
    assert resolved(model, max_model_len=100).scheduler.max_model_len == 100
    with pytest.raises(ConfigError, match=rf"max_model_len: {POSITIONS + 1} is more than the {POSITIONS} positions"):
        resolved(model, max_model_len=POSITIONS + 1)


def test_missing_model_is_an_error_that_names_it(run_dir: Path) -> None:
    with pytest.raises(ModelError, match="no such model"):
        resolved("/no/such/model")


@pytest.mark.parametrize(("pooling", "expected"), [("auto", "last"), ("mean", "mean"), ("last", "last")])
def test_pooling_is_the_models_own_unless_it_is_said(model: str, pooling: str, expected: str) -> None:
    assert resolved(model, pooling=pooling).model.pooling == expected


QWEN = {"chat_template": "{% if tools %}<tool_call>{% endif %}"}


@pytest.mark.parametrize(
    ("files", "asked", "expected"),
    [
        ({}, "auto", "none"),  # no template
        ({"tokenizer_config__json": {"chat_template": "{{ messages }}"}}, "auto", "none"),
        ({"tokenizer_config__json": QWEN}, "auto", "hermes"),
        ({"tokenizer_config__json": QWEN}, "none", "none"),
        ({"tokenizer_config__json": QWEN}, "mistral", "mistral"),
        ({}, "llama3", "llama3"),
        # The template writes no marker, but the tokenizer has one.
        (
            {
                "tokenizer_config__json": {"chat_template": "{{ tools }}"},
                "tokenizer__json": {"added_tokens": [{"content": "<|python_tag|>"}]},
            },
            "auto",
            "llama3",
        ),
    ],
    ids=str,
)
def test_style_of_tool_calls_is_the_models_own_unless_it_is_said(
    tmp_path: Path, run_dir: Path, files: dict[str, Any], asked: str, expected: str
) -> None:
    model = str(write_folder(tmp_path / "model", LLAMA, **files))
    assert resolved(model, tool_call_parser=asked).model.tool_call_parser == expected


# --- the group


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "x" * 40])
def test_name_is_the_last_part_of_the_run_directory(model: str, run_dir: Path, name: str) -> None:
    group = resolved(model, name=name).group
    assert (group.name, group.run_dir) == (name, str(run_dir / name))


@pytest.mark.parametrize("name", ["x" * 41, "a/b", "..", ".a", "-a", "a b", "ü", "a\n", "a\0"])
def test_name_that_is_no_plain_word_is_refused(model: str, name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name: must be 1 to 40"):
        resolved(model, name=name)


@pytest.mark.parametrize(
    ("folder", "name"),
    [("My Model (v2)", "My-Model--v2-"), ("...hidden", "hidden"), ("ü", "model"), ("m" * 200, "m" * 40)],
)
def test_name_is_made_from_the_models_when_it_is_not_given(
    tmp_path: Path, run_dir: Path, folder: str, name: str
) -> None:
    assert resolved(str(write_folder(tmp_path / folder, LLAMA))).group.name == name


# --- the machine


@pytest.mark.parametrize("device", ["cpu", "cuda", "mock"])
def test_device_that_is_named_is_taken(model: str, device: str) -> None:
    assert resolved(model, device=device).worker.device == device


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"device": "cuda"}, "bfloat16"),
        ({"device": "mock"}, "float32"),
        ({"device": "cpu", "dtype": "float16"}, "float16"),
        ({"device": "cuda", "dtype": "float32"}, "float32"),
    ],
)
def test_dtype_follows_the_device_unless_it_is_named(model: str, options: dict[str, Any], dtype: str) -> None:
    assert resolved(model, **options).worker.dtype == dtype


def test_float16_weights_stay_float16_on_a_gpu(tmp_path: Path, run_dir: Path) -> None:
    folder = write_folder(tmp_path / "half", LLAMA | {"dtype": "float16"})
    assert resolved(str(folder), device="cuda").worker.dtype == "float16"


# --- kernels


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the native library were there, whether it is or not."""
    monkeypatch.setattr(library, "why_not", lambda _device: None)


@pytest.fixture
def not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_not", lambda _device: "not built")


def kernel_facts(config: EngineConfig) -> tuple[str, str, str, str]:
    worker = config.worker
    return worker.kernels, worker.dtype, worker.kv_cache_dtype, worker.quantization


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({}, ("native", "bfloat16", "bfloat16", "none")),
        ({"dtype": "bfloat16", "quantization": "int8"}, ("native", "bfloat16", "bfloat16", "int8")),
        ({"quantization": "int4", "kv_cache_dtype": "float32"}, ("native", "bfloat16", "float32", "int4")),
        ({"kv_cache_dtype": "int8"}, ("native", "bfloat16", "int8", "none")),
        ({"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, ("torch", "bfloat16", "fp8", "none")),
        ({"kv_cache_dtype": "int8", "dtype": "float32"}, ("torch", "float32", "int8", "none")),
        ({"kv_cache_dtype": "int8", "device": "cuda"}, ("torch", "bfloat16", "int8", "none")),
        (
            {"kv_cache_dtype": "fp8", "device": "cuda", "attention_backend": "triton"},
            ("torch", "bfloat16", "fp8", "none"),
        ),
        ({"kernels": "native", "quantization": "none"}, ("native", "bfloat16", "bfloat16", "none")),
        ({"dtype": "float32"}, ("torch", "float32", "float32", "none")),
        ({"dtype": "float16"}, ("torch", "float16", "float16", "none")),
        ({"kernels": "torch", "dtype": "bfloat16"}, ("torch", "bfloat16", "bfloat16", "none")),
        ({"block_size": 3, "dtype": "bfloat16"}, ("torch", "bfloat16", "bfloat16", "none")),
        ({"device": "cuda"}, ("torch", "bfloat16", "bfloat16", "none")),
    ],
)
def test_native_kernels_run_what_they_can(
    model: str, options: dict[str, Any], facts: tuple[str, str, str, str]
) -> None:
    assert kernel_facts(resolved(model, **{"device": "cpu", **options})) == facts


@pytest.mark.usefixtures("built")
def test_quantised_blocks_of_a_gguf_file_stay_what_they_are(tmp_path: Path, run_dir: Path) -> None:
    path = str(write_gguf(tmp_path / "tiny.gguf"))
    assert kernel_facts(resolved(path, device="cpu")) == ("native", "bfloat16", "bfloat16", "stored")
    assert resolved(path, device="cpu", quantization="none").worker.quantization == "none"
    assert resolved(path, device="cpu", dtype="float32").worker.quantization == "none"


@pytest.mark.usefixtures("not_built")
def test_without_the_library_torch_computes(model: str) -> None:
    config = resolved(model, device="cpu", dtype="bfloat16")
    assert kernel_facts(config) == ("torch", "bfloat16", "bfloat16", "none")
    with pytest.raises(ConfigError, match="kernels: native was asked for, but not built"):
        resolved(model, device="cpu", kernels="native")
    with pytest.raises(ConfigError, match=r"quantization: int8 takes the native kernels .* but not built"):
        resolved(model, device="cpu", quantization="int8")


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "float32", "quantization": "int8"}, "quantization: int8 .* they compute in bfloat16.* is float32"),
        ({"device": "mock", "quantization": "int4"}, "quantization: int4 .* they are for the cpu, and device is mock"),
        ({"quantization": "fp8"}, "quantization: fp8 is for GPUs, and for --kernels torch"),
        ({"kernels": "native", "dtype": "float16"}, "kernels: native .* dtype is float16"),
        ({"kernels": "native", "block_size": 7}, "kernels: native .* block_size must be even, not 7"),
        (
            {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
            r"kv_cache_dtype: .* dtype \(float32\), int8 or fp8, not bf",
        ),
        ({"kernels": "native", "kv_cache_dtype": "fp8"}, "kernels: native .* or int8, and kv_cache_dtype is fp8"),
        (
            {"device": "cuda", "attention_backend": "flash_attn", "kv_cache_dtype": "int8"},
            "kv_cache_dtype: attention_backend flash_attn reads .* in dtype alone, not in int8; triton and torch do",
        ),
    ],
)
def test_options_that_contradict_each_other_are_named(model: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        resolved(model, **{"device": "cpu", **options})


def test_workers_share_cores_and_memory(model: str) -> None:
    num_cores = len(os.sched_getaffinity(0))
    assert resolved(model).worker.threads == num_cores
    assert resolved(model, workers=64).worker.threads == max(1, num_cores // 64)
    assert resolved(model, threads=3, workers=2).worker.threads == 3
    one, many = (resolved(model, workers=workers).cache.memory_bytes for workers in (1, 64))
    assert one is not None
    assert many is not None
    assert 1 << 20 <= many < one
    assert resolved(model, kv_cache_memory=12345).cache.memory_bytes == 12345
    assert resolved(model, device="cuda").cache.memory_bytes is None, "what is left is known once the weights are there"
    assert resolved(model, device="cuda", kv_cache_memory=12345).cache.memory_bytes == 12345


def test_nothing_is_told_to_the_outside_unless_it_is_asked_for(model: str) -> None:
    assert not resolved(model).metrics.is_on
    assert resolved(model, metrics_port=0).metrics == MetricsConfig(0, "127.0.0.1", None)
    assert resolved(model, otlp_endpoint="http://c:4318").metrics.is_on


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://collector/own/path", "https://collector/own/path"),
        ("http://[::1]:4318?x=1", "http://[::1]:4318/v1/traces?x=1"),
    ],
)
def test_traces_go_to_the_path_of_the_standard_unless_one_is_given(model: str, endpoint: str, url: str) -> None:
    assert resolved(model, otlp_endpoint=endpoint).metrics.otlp_endpoint == url


@pytest.mark.parametrize(
    "endpoint",
    ["", "localhost:4318", "localhost", "ftp://x", "http://", "http://x:port", "http://x:99999", "http://[::1"],
)
def test_what_is_no_url_takes_no_traces(model: str, endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"^otlp_endpoint: must be a URL .*, got "):
        resolved(model, otlp_endpoint=endpoint)


@pytest.mark.parametrize(("option", "value"), [("metrics_port", 0), ("otlp_endpoint", "http://c:4318")])
def test_without_spans_there_is_nothing_to_tell(model: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}: comes from spans, and span_records is 0"):
        resolved(model, span_records=0, **{option: value})


def test_metrics_are_not_served_everywhere_by_an_empty_host(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^metrics_host: must name an address .*, got ''"):
        resolved(model, metrics_port=0, metrics_host="")


def test_options_reach_the_configuration_as_they_are(model: str) -> None:
    config = resolved(
        model,
        block_size=8,
        num_blocks=99,
        enable_prefix_caching=False,
        scheduling_policy="priority",
        async_depth=3,
        decode_steps=4,
        max_overtaken_tokens=99,
        max_queued_requests=7,
        max_request_bytes=2048,
        drain_timeout=1.5,
        logits_processors=("a:b", "c:d"),
    )
    assert (config.cache.block_size, config.cache.num_blocks, config.cache.enable_prefix_caching) == (8, 99, False)
    assert (config.scheduler.policy, config.scheduler.async_depth, config.scheduler.decode_steps) == ("priority", 3, 4)
    assert (config.limits.max_queued_requests, config.limits.max_request_bytes) == (7, 2048)
    assert config.scheduler.max_overtaken_tokens == 99
    assert config.group.drain_timeout_s == 1.5
    assert config.worker.logits_processors == ("a:b", "c:d")


def test_every_limit_is_an_option_with_the_same_default(model: str) -> None:
    assert resolved(model).limits == LimitsConfig()
    fields = LimitsConfig.__struct_fields__
    values = {field: 2048 + at for at, field in enumerate(fields)}
    limits = resolved(model, **{field.removesuffix("_s"): value for field, value in values.items()}).limits
    assert {field: getattr(limits, field) for field in fields} == values


def test_configuration_survives_the_way_to_a_child(model: str) -> None:
    config = resolved(model)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def test_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError, match="max_num_seq"):
        EngineArgs(model="m", max_num_seq=5)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"model": "m", "max_num_seq": 5}, EngineArgs)


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"device": "cpu", "kernels": "torch"}], ids=str)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_torch_takes_weights_of_few_bits(model: str, options: dict[str, Any], quantization: str) -> None:
    assert resolved(model, quantization=quantization, **options).worker.quantization == quantization


# --- a GPU


def test_graphs_are_for_a_gpu_unless_told_otherwise(model: str) -> None:
    def uses_graphs(**options: Any) -> bool:
        return resolved(model, **options).worker.uses_graphs

    assert uses_graphs(device="cuda")
    assert not uses_graphs(device="cuda", enforce_eager=True)
    assert not uses_graphs(device="cpu", kernels="torch")
    assert uses_graphs(device="cpu", kernels="torch", enforce_eager=False)
    assert not uses_graphs(device="cpu")


@pytest.mark.usefixtures("built")
def test_an_attention_backend_is_for_the_torch_kernels(model: str) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend: triton is for the torch kernels \(--kernels torch\)"):
        resolved(model, device="cpu", attention_backend="triton")
    assert resolved(model, device="cuda", kernels="auto").worker.attention_backend == "auto"


def test_the_block_size_is_one_that_the_attention_backend_takes(model: str) -> None:
    def block_size(**options: Any) -> int:
        return resolved(model, device="cuda", **options).cache.block_size

    assert block_size() == 16
    assert block_size(attention_backend="flash_attn") == 256
    assert block_size(attention_backend="flash_attn", block_size=512) == 512
