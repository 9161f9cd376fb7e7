"""From what a user asked to what will run: the only place that turns "auto" into facts.

Owns: the checks between options. Never does: start anything, or know where an option was set (`option_sources` does).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import cast

import msgspec

from procengine.attention_direction import with_direction
from procengine.config import (
    AttentionBackend,
    CacheConfig,
    CrashConfig,
    Device,
    DType,
    EngineConfig,
    GroupConfig,
    Kernels,
    KVCacheDType,
    LimitsConfig,
    ModelConfig,
    ProfilingConfig,
    Quantization,
    SchedulerConfig,
    ToolCallStyle,
    WorkerConfig,
)
from procengine.cpu_flags import cpu_flags
from procengine.decoder_sizes import decoder_sizes, why_not_decoder
from procengine.engine_args import EngineArgs, check_ranges
from procengine.errors import ConfigError
from procengine.free_memory import available_bytes
from procengine.http_config import resolve_api, resolve_metrics
from procengine.kernels.backends import cache_dtypes, preferred_block_size
from procengine.kernels.decoder.limits import why_not as why_decoder_cannot
from procengine.kernels.native import library
from procengine.listen import resolve_listen
from procengine.lora_options import resolve_lora
from procengine.model_source import resolve_model
from procengine.open_files import clients_within, hard_limit
from procengine.paths import procengine_home, run_root
from procengine.reranker import with_reranker
from procengine.rope_scaling import rope_for_length
from procengine.tokenizer_file import added_tokens
from procengine.tool_calls.detect import detect_style, mentions_tools
from procengine.workflows import installed_workflows

__all__ = ["resolve"]

_MAX_NAME_LENGTH = 40
_CHUNK_TOKENS = 2048
_CPU_CHUNK_TOKENS = 256  # there a step of more is no faster a token (docs/PERFORMANCE.md)
_CPU_MIXED_TOKENS = 64  # a little slower a token; but all that decode wait for them
_PROMPT_TOKENS = 64  # of each step, however many rows decode
_GIB = 1 << 30
_BLOCK_SIZE = 16
_QUANTIZED_GROUP = 32  # weights with a scale of their own
_MAX_CLIENTS = 4096


def resolve(args: EngineArgs) -> EngineConfig:
    """The configuration of a group.

    Raises:
        ConfigError: an option is out of range or does not fit another.
        ModelError: the model cannot be found or is not supported.
    """
    check_ranges(args)
    model = resolve_model(args.model, procengine_home())
    if args.pooling != "auto":
        model = msgspec.structs.replace(model, pooling=args.pooling)
    model = msgspec.structs.replace(model, tool_call_parser=_tool_call_parser(args, model))
    model = with_direction(model, args.bidirectional)
    if args.score_tokens or args.score_template is not None:
        model = with_reranker(model, args.score_tokens, args.score_template)
    model = msgspec.structs.replace(model, workflows=(*model.workflows, *_installed_workflows(model)))
    device = _device(args)
    scheduler = _scheduler(args, model, device)
    model = rope_for_length(model, scheduler.max_model_len)
    group, api = _group(args, model), resolve_api(args, model)
    return EngineConfig(
        model=model,
        group=group,
        cache=CacheConfig(
            block_size=_block_size(args),
            num_blocks=args.num_blocks,
            memory_bytes=_cache_bytes(args, device),
            gpu_memory_utilization=args.gpu_memory_utilization,
            enable_prefix_caching=args.enable_prefix_caching,
        ),
        scheduler=scheduler,
        worker=_worker(args, model, device),
        limits=_limits(args),
        profiling=ProfilingConfig(span_records=args.span_records, nvtx=args.nvtx and device == "cuda"),
        metrics=resolve_metrics(args, group, api),
        api=api,
        listen=resolve_listen(args.listen, args.curve_keys),
        crash=_crash(args),
        lora=resolve_lora(args, model, api),
    )


def _installed_workflows(model: ModelConfig) -> list[str]:
    """Those of other packages that have a part for such a model."""
    part = "forward" if model.encoder is None else "encode"
    return sorted(name for name, workflow in installed_workflows().items() if getattr(workflow, part))


def _token_budget(args: EngineArgs, model: ModelConfig, max_model_len: int, device: Device) -> int:
    if not args.enable_chunked_prefill:
        return max(max_model_len, args.max_num_seqs)
    nobody_waits = model.encoder is not None  # for the end of a step
    chunk = _CPU_CHUNK_TOKENS if device == "cpu" and not nobody_waits else _CHUNK_TOKENS
    return max(chunk, args.max_num_seqs + _PROMPT_TOKENS)


def _mixed_tokens(args: EngineArgs, device: Device) -> int | None:
    is_auto = args.max_mixed_tokens is None and args.max_num_batched_tokens is None
    return _CPU_MIXED_TOKENS if is_auto and device == "cpu" else args.max_mixed_tokens


def _scheduler(args: EngineArgs, model: ModelConfig, device: Device) -> SchedulerConfig:
    max_model_len = args.max_model_len or min(
        model.max_position_embeddings, model.max_seq_length or model.max_position_embeddings
    )
    if max_model_len > model.max_position_embeddings:
        raise ConfigError(
            f"max_model_len: {max_model_len} is more than the {model.max_position_embeddings} positions "
            f"that {model.name} was made for (max_position_embeddings)"
        )
    budget = args.max_num_batched_tokens or _token_budget(args, model, max_model_len, device)
    if budget < args.max_num_seqs:
        raise ConfigError(f"max_num_batched_tokens: must be at least max_num_seqs ({args.max_num_seqs}), got {budget}")
    if not args.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"max_num_batched_tokens: without chunked prefill it must be at least max_model_len ({max_model_len}), "
            f"got {budget}"
        )
    return SchedulerConfig(
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget,
        max_mixed_tokens=_mixed_tokens(args, device),
        max_overtaken_tokens=args.max_overtaken_tokens,
        max_embed_tokens=args.max_num_batched_tokens
        or max(budget, _CHUNK_TOKENS, max_model_len if model.encoder else 0),
        max_model_len=max_model_len,
        enable_chunked_prefill=args.enable_chunked_prefill,
        policy=args.scheduling_policy,
        async_depth=args.async_depth,
        decode_steps=args.decode_steps,
        num_speculative_tokens=args.speculative_tokens,
    )


def _limits(args: EngineArgs) -> LimitsConfig:
    return LimitsConfig(
        max_queued_requests=args.max_queued_requests,
        max_queued_tokens=args.max_queued_tokens,
        max_clients=_max_clients(args.max_clients),
        max_client_requests=args.max_client_requests or args.max_queued_requests,
        max_client_bytes=args.max_client_bytes,
        max_unsent_bytes=args.max_unsent_bytes,
        request_timeout_s=args.request_timeout,
        queue_timeout_s=args.queue_timeout,
        max_request_bytes=args.max_request_bytes,
        max_stop_strings=args.max_stop_strings,
        max_stop_bytes=args.max_stop_bytes,
        max_stop_token_ids=args.max_stop_token_ids,
        max_logprobs=args.max_logprobs,
        max_n=args.max_n,
        max_bad_words=args.max_bad_words,
        max_logit_bias=args.max_logit_bias,
        max_grammar_bytes=args.max_grammar_bytes,
        grammar_timeout_s=args.grammar_timeout,
        template_timeout_s=args.template_timeout,
    )


def _max_clients(asked: int | None) -> int:
    """What was asked for, or the default, as far as this machine's limit of open files allows it."""
    most = clients_within(hard_limit())
    if asked is not None and asked > most:
        raise ConfigError(
            f"max_clients: {asked} clients need more files than a process may open here (`ulimit -Hn`: {hard_limit()}, "
            f"enough for {most})"
        )
    return min(_MAX_CLIENTS, most) if asked is None else asked


def _crash(args: EngineArgs) -> CrashConfig:
    folder = procengine_home() / "crashes" if args.crash_dir is None else Path(args.crash_dir).expanduser()
    return CrashConfig(str(folder.absolute()), args.crash_seconds, args.crash_records, args.redact_prompts)


def _group(args: EngineArgs, model: ModelConfig) -> GroupConfig:
    name = args.name or _name_from(model.name)
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_MAX_NAME_LENGTH - 1}}}", name):
        raise ConfigError(
            f"name: must be 1 to {_MAX_NAME_LENGTH} letters, digits, '.', '_' or '-' and start with a letter or digit, "
            f"got {name!r}"
        )
    return GroupConfig(
        name=name,
        run_dir=str(run_root() / name),
        start_timeout_s=args.start_timeout,
        drain_timeout_s=args.drain_timeout,
        max_restarts=args.max_restarts,
        restart_window_s=args.restart_window,
        step_timeout_s=args.step_timeout,
    )


def _name_from(model_name: str) -> str:
    """A group name from a model's name or path."""
    last = Path(model_name.rstrip("/")).name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._-]", "-", last).lstrip("._-")[:_MAX_NAME_LENGTH] or "model"


def _device(args: EngineArgs) -> Device:
    if args.device != "auto":
        return args.device
    return "cuda" if Path("/proc/driver/nvidia/version").exists() else "cpu"


def _worker(args: EngineArgs, model: ModelConfig, device: Device) -> WorkerConfig:
    reason = _why_not_native(args, model, device)
    if args.kernels == "native" and reason is not None:
        raise ConfigError(f"kernels: native was asked for, but {reason}")
    kernels: Kernels = "torch" if reason is not None else "native"
    dtype = _dtype(args, model, device, kernels)
    return WorkerConfig(
        device=device,
        dtype=dtype,
        kv_cache_dtype=_kv_cache_dtype(args, model, dtype, kernels),
        quantization=_quantization(args, model, device, reason),
        kernels=kernels,
        attention_backend=_attention_backend(args, kernels),
        uses_graphs=kernels == "torch" and _wants_graphs(args, device),
        num_workers=args.workers,
        threads=args.threads or max(1, len(os.sched_getaffinity(0)) // args.workers),
        mock_step_ms=args.mock_step_ms,
        logits_processors=args.logits_processors,
    )


def _block_size(args: EngineArgs) -> int:
    return args.block_size or preferred_block_size(args.attention_backend, _BLOCK_SIZE)


def _wants_graphs(args: EngineArgs, device: Device) -> bool:
    """On a CPU they gain nothing, and padding costs."""
    return device == "cuda" if args.enforce_eager is None else not args.enforce_eager


def _attention_backend(args: EngineArgs, kernels: Kernels) -> AttentionBackend:
    if kernels == "native" and args.attention_backend != "auto":
        raise ConfigError(
            f"attention_backend: {args.attention_backend} is for the torch kernels (--kernels torch); native ones have "
            "their own attention"
        )
    return args.attention_backend


def _why_not_native(args: EngineArgs, model: ModelConfig, device: Device) -> str | None:
    """Why the native kernels do not run this model; None where they do. The library is looked for last: it logs."""
    if args.kernels == "torch":
        return "kernels is torch"
    if args.enable_lora:
        return "adapters (enable_lora) take the torch kernels"
    if device != "cpu":
        return f"they are for the cpu, and device is {device}"
    if model.encoder is not None:
        return _why_not_native_encoder(args) or library.why_not("cpu")
    if args.dtype not in ("auto", "bfloat16"):
        return f"they compute in bfloat16, and dtype is {args.dtype}"
    if args.kv_cache_dtype == "fp8":
        return "their KV cache has bfloat16, float32 or int8, and kv_cache_dtype is fp8"
    cannot = why_not_decoder(model) or why_decoder_cannot(decoder_sizes(model), _block_size(args))
    return cannot or library.why_not("cpu")


def _why_not_native_encoder(args: EngineArgs) -> str | None:
    if args.dtype not in ("auto", "float32"):
        return f"those of encoders compute in float32, and dtype is {args.dtype}"
    if args.quantization != "auto":
        return f"those of encoders have weights of 14 bits, and quantization is {args.quantization}"
    return None


def _dtype(args: EngineArgs, model: ModelConfig, device: Device, kernels: Kernels) -> DType:
    if args.dtype != "auto":
        return args.dtype
    if device == "cuda":
        return "float16" if model.weights_dtype == "float16" else "bfloat16"
    if model.encoder is not None:
        return "float32"
    # Half the memory traffic, but with torch only where the CPU multiplies bfloat16 itself; elsewhere it is emulated.
    is_fast = kernels == "native" or (device == "cpu" and "avx512_bf16" in cpu_flags())
    return "bfloat16" if is_fast else "float32"


def _kv_cache_dtype(args: EngineArgs, model: ModelConfig, dtype: DType, kernels: Kernels) -> KVCacheDType:
    if args.kv_cache_dtype == "auto":
        return dtype
    asked = args.kv_cache_dtype
    if asked in ("int8", "fp8"):
        _check_quantized_cache(asked, args, model)
    elif kernels == "torch" and asked != dtype:
        raise ConfigError(
            f"kv_cache_dtype: the torch kernels keep the cache in dtype ({dtype}), int8 or fp8, not {asked}"
        )
    return asked


def _check_quantized_cache(asked: KVCacheDType, args: EngineArgs, model: ModelConfig) -> None:
    if model.head_dim % 4:
        raise ConfigError(f"kv_cache_dtype: {asked} takes a head_dim that is a multiple of 4, not {model.head_dim}")
    if asked not in cache_dtypes(args.attention_backend):
        raise ConfigError(
            f"kv_cache_dtype: attention_backend {args.attention_backend} reads keys and values in dtype alone, not in "
            f"{asked}; triton and torch do"
        )


def _quantization(args: EngineArgs, model: ModelConfig, device: Device, why_not_native: str | None) -> Quantization:
    """auto keeps what the file has: the bits of a GGUF file, the floats of safetensors. A model in torch has floats."""
    asked = args.quantization
    if asked == "auto" and model.encoder is not None:
        return "int14" if why_not_native is None else "none"
    if asked == "auto":
        return "stored" if why_not_native is None and model.format == "gguf" else "none"
    if asked == "none":
        return asked
    if device == "cuda" or args.kernels == "torch":
        _check_groups(asked, model)
    elif asked == "fp8":
        raise ConfigError("quantization: fp8 is for GPUs, and for --kernels torch")
    elif why_not_native is not None:
        raise ConfigError(f"quantization: {asked} takes the native kernels (or --kernels torch), but {why_not_native}")
    return asked


def _check_groups(quantization: Quantization, model: ModelConfig) -> None:
    if model.architecture == "transformers":
        raise ConfigError(f"quantization: {quantization} is not for models that transformers' modules run")
    sizes = {name: getattr(model, name) for name in ("hidden_size", "intermediate_size")}
    for name, size in {**sizes, "num_heads * head_dim": model.num_heads * model.head_dim}.items():
        if size % _QUANTIZED_GROUP:
            multiple = f"a multiple of {_QUANTIZED_GROUP}, and {model.name} has {size}"
            raise ConfigError(f"quantization: for {quantization}, {name} must be {multiple}")


def _tool_call_parser(args: EngineArgs, model: ModelConfig) -> ToolCallStyle:
    if args.tool_call_parser != "auto":
        return args.tool_call_parser
    if not mentions_tools(model.chat_template):
        return "none"  # and the tokenizer need not be read
    return cast(ToolCallStyle, detect_style(model.chat_template, added_tokens(model.tokenizer_path)) or "none")


def _cache_bytes(args: EngineArgs, device: Device) -> int | None:
    """On a CPU a quarter of the memory that can be had, at most 2 GiB, shared by the workers: pages are taken as they
    fill. What a GPU has left only its worker can measure."""
    if args.kv_cache_memory is not None:
        return args.kv_cache_memory
    return None if device == "cuda" else max(min(available_bytes() // 4, 2 * _GIB) // args.workers, 1 << 20)
