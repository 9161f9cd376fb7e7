"""Every option of a group: its name, type, default, range, unit and meaning, once.

Flags, variables of the environment, keys of a file, `--help`, `procengine config` and completion are derived from this
table. Owns: the table. Never does: decide what "auto" becomes (`resolve` does), or read a value from anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Final, Literal

import msgspec

from procengine.errors import ConfigError
from procengine.option import About, Option, options_of

__all__ = ["OPTIONS", "EngineArgs", "check_ranges", "nearest_option"]

_MODEL: Final = "the model"
_DEVICE: Final = "device and number formats"
_KV_CACHE: Final = "KV cache"
_SCHEDULING: Final = "scheduling"
_LORA: Final = "LoRA adapters"
_HTTP: Final = "HTTP"
_TCP: Final = "clients of other machines (ZeroMQ over tcp)"
_LOAD: Final = "limits of the group"
_REQUEST: Final = "limits of one request"
_LIFE: Final = "start, death and end of processes"
_WATCHING: Final = "observability"
_CRASHES: Final = "crash records"


class EngineArgs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user may set. None is "auto" or "off": `resolve` decides it from the model, the machine and the others."""

    model: Annotated[
        str,
        About(
            _MODEL,
            "a folder (Hugging Face layout), a .gguf file, an alias such as smollm2-135m, or a hub id",
            metavar="MODEL",
        ),
    ]
    name: Annotated[str | None, About(_MODEL, "name of the group (auto: the model's)", metavar="NAME")] = None
    pooling: Annotated[
        Literal["auto", "last", "mean", "cls"],
        About(_MODEL, "how embed reduces hidden states to one vector (auto: what the model says)"),
    ] = "auto"
    bidirectional: Annotated[
        bool | None,
        About(
            _MODEL,
            "a decoder's tokens see those behind them too, for embedders made so: LLM2Vec (auto: as its files say)",
        ),
    ] = None
    score_tokens: Annotated[
        tuple[str, ...],
        About(
            _MODEL,
            "token of a language model that reranks: the one for yes first, then that for no (none: as its files say)",
            metavar="TOKEN",
        ),
    ] = ()
    score_template: Annotated[
        str | None,
        About(
            _MODEL,
            "how score writes two texts: a text with {query} and {document}, or its file (auto: as the model's say)",
            metavar="TEXT",
        ),
    ] = None
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3", "mistral"],
        About(_MODEL, "how the model writes tool calls, which clients read (auto: what its chat template shows)"),
    ] = "auto"
    logits_processors: Annotated[
        tuple[str, ...],
        About(
            _MODEL,
            "callables of the operator that change logits, as module:name (see docs/PLUGINS.md)",
            metavar="MODULE:NAME",
        ),
    ] = ()

    device: Annotated[
        Literal["auto", "cpu", "cuda", "mock"],
        About(_DEVICE, "where the model runs; mock runs none and makes up tokens, to measure everything else"),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        About(_DEVICE, "number format of weights and cache (auto: what the device is fast at)"),
    ] = "auto"
    kernels: Annotated[
        Literal["auto", "native", "torch"],
        About(
            _DEVICE,
            "what computes on a CPU: native, compiled for it, or torch (auto: native with dtype bfloat16, if built)",
        ),
    ] = "auto"
    attention_backend: Annotated[
        Literal["auto", "torch", "triton", "flash_attn"],
        About(_DEVICE, "what computes attention with the torch kernels (auto: triton on a GPU; the log says why)"),
    ] = "auto"
    enforce_eager: Annotated[
        bool | None,
        About(_DEVICE, "launch every operation of every step, instead of graphs of decode steps (auto: not on a GPU)"),
    ] = None
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4", "fp8"],
        About(_DEVICE, "weights rounded to 8 or 4 bits; fp8 on GPUs; none is floats (auto: as the files have them)"),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "int8", "fp8"],
        About(_DEVICE, "number format of keys and values; int8 and fp8 take half of bfloat16's memory (auto: dtype)"),
    ] = "auto"
    workers: Annotated[int, About(_DEVICE, "data-parallel workers, each with its own weights and KV pool", 1, 64)] = 1
    threads: Annotated[int | None, About(_DEVICE, "CPU threads of a worker (auto: the cores, shared)", 1, 1024)] = None
    mock_step_ms: Annotated[float, About(_DEVICE, "time a step of the mock device takes", 0, 60_000, unit="ms")] = 0.0

    block_size: Annotated[
        int | None,
        About(
            _KV_CACHE,
            "size of a block of the KV cache (auto: 16, or what --attention-backend takes)",
            1,
            1024,
            unit="tokens",
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        About(
            _KV_CACHE,
            "blocks in the KV pool of one worker, each for one group of layers (auto: what fits --kv-cache-memory)",
            1,
            1 << 24,
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | None,
        About(
            _KV_CACHE,
            "KV cache of all workers together (auto: a quarter of what there is, at most 2 GiB; on a GPU what is left)",
            1,
            unit="bytes",
        ),
    ] = None
    gpu_memory_utilization: Annotated[
        float,
        About(_KV_CACHE, "share of a GPU's memory that weights, steps and KV cache may take together", 0.01, 1),
    ] = 0.9
    enable_prefix_caching: Annotated[
        bool, About(_KV_CACHE, "keep the KV blocks of finished prompts, and reuse them for equal beginnings")
    ] = True

    max_num_seqs: Annotated[int, About(_SCHEDULING, "most requests that run at once in one worker", 1, 65536)] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        About(
            _SCHEDULING,
            "token budget of one step (auto: 2048, on a CPU 256; more for many rows, whole prompts)",
            1,
            1 << 20,
            unit="tokens",
        ),
    ] = None
    max_mixed_tokens: Annotated[
        int | None,
        About(
            _SCHEDULING,
            "prompt tokens of a step beside rows that decode; few have every second step alone (auto: 64 on a CPU)",
            2,
            1 << 20,
            unit="tokens",
        ),
    ] = None
    max_overtaken_tokens: Annotated[
        int,
        About(
            _SCHEDULING,
            "most tokens of later prompts that may go before a longer one (short prompts wait less); 0: as they come",
            0,
            1 << 20,
            unit="tokens",
        ),
    ] = 4096
    max_model_len: Annotated[
        int | None,
        About(
            _SCHEDULING,
            "most tokens of prompt and answer together (auto: what the model was made for)",
            2,
            unit="tokens",
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool, About(_SCHEDULING, "cut long prompts into pieces, so that running requests go on meanwhile")
    ] = True
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        About(
            _SCHEDULING,
            "who starts first: fcfs, as they come (see max_overtaken_tokens), or priority, smaller numbers first",
        ),
    ] = "fcfs"
    async_depth: Annotated[
        int, About(_SCHEDULING, "steps planned ahead of the device; 1 waits for each result", 1, 3)
    ] = 2
    decode_steps: Annotated[int, About(_SCHEDULING, "tokens a running request gets per step", 1, 64)] = 1
    speculative_tokens: Annotated[
        int, About(_SCHEDULING, "most tokens to propose a step, from earlier text (n-grams); 0 proposes none", 0, 64)
    ] = 0

    enable_lora: Annotated[
        bool, About(_LORA, "serve adapters of the model (PEFT folders), by name per request; takes the torch kernels")
    ] = False
    lora_modules: Annotated[
        tuple[str, ...],
        About(_LORA, "adapter to load at the start: its name, and the folder it is in", metavar="NAME=PATH"),
    ] = ()
    max_loras: Annotated[
        int | None,
        About(_LORA, "most adapters at once, for which memory is set aside (auto: 8, or --lora-modules)", 1, 4096),
    ] = None
    max_lora_rank: Annotated[int, About(_LORA, "highest rank of an adapter", 1, 512)] = 16
    allow_runtime_lora_updating: Annotated[
        bool, About(_LORA, "let HTTP clients load adapters from folders of this machine, and unload them")
    ] = False

    port: Annotated[
        int | None,
        About(
            _HTTP,
            "serve OpenAI-compatible HTTP on this port; 0 takes one that is free (see the ready line)",
            0,
            65535,
            metavar="PORT",
            unset="off",
        ),
    ] = None
    host: Annotated[
        str, About(_HTTP, "address that --port listens on; 0.0.0.0 is every one of this machine", metavar="ADDRESS")
    ] = "127.0.0.1"
    uds: Annotated[
        str | None,
        About(_HTTP, "serve HTTP on a Unix socket of this path instead of a port", metavar="PATH", unset="off"),
    ] = None
    api_workers: Annotated[int, About(_HTTP, "processes that serve HTTP, on the one port", 1, 64)] = 1
    api_key: Annotated[
        tuple[str, ...],
        About(
            _HTTP,
            "key that HTTP clients must send; PROCENGINE_API_KEY hides it from `ps` (none: all are let in)",
            metavar="KEY",
            is_secret=True,
        ),
    ] = ()
    served_model_name: Annotated[tuple[str, ...], About(_HTTP, "what HTTP requests call the model (auto: MODEL)")] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        About(
            _HTTP,
            "origin of web pages that may ask over HTTP (CORS), such as https://example.org, or *",
            metavar="ORIGIN",
        ),
    ] = ()
    ssl_certfile: Annotated[str | None, About(_HTTP, "certificate (PEM) for HTTPS", metavar="FILE", unset="off")] = None
    ssl_keyfile: Annotated[str | None, About(_HTTP, "its private key (PEM)", metavar="FILE", unset="off")] = None

    listen: Annotated[
        str | None,
        About(
            _TCP,
            "take clients on tcp://ADDRESS:PORT too, and on the port after it (outputs); 0 takes two that are free",
            metavar="tcp://ADDRESS:PORT",
            unset="off",
        ),
    ] = None
    curve_keys: Annotated[
        str | None,
        About(
            _TCP,
            "file or name of keys (`procengine keys new`): tcp clients need keys; demanded beyond the loopback",
            metavar="KEYS",
            unset="off",
        ),
    ] = None

    max_queued_requests: Annotated[
        int, About(_LOAD, "most requests that wait or run; one more is refused as overload", 1)
    ] = 8192
    max_queued_tokens: Annotated[
        int,
        About(
            _LOAD,
            "most prompt tokens that wait for their first step; a request of more is refused as overload",
            1,
            unit="tokens",
        ),
    ] = 1 << 22
    max_clients: Annotated[
        int | None,
        About(
            _LOAD,
            "most clients at once; one more is refused as overload (auto: 4096, or what `ulimit -Hn` allows)",
            1,
            1 << 20,
        ),
    ] = None
    max_client_requests: Annotated[
        int | None, About(_LOAD, "most unfinished requests of one client (auto: --max-queued-requests)", 1)
    ] = None
    max_client_bytes: Annotated[
        int,
        About(
            _LOAD,
            "most bytes that wait for one client to read them; beyond, it is dropped with its requests",
            1024,
            unit="bytes",
        ),
    ] = 64 << 20
    max_unsent_bytes: Annotated[
        int, About(_LOAD, "the same for all clients together; beyond, the one with most is dropped", 1024, unit="bytes")
    ] = 1 << 30
    request_timeout: Annotated[
        float | None,
        About(
            _LOAD, "time after which a request that names no timeout_s is aborted", 0.001, 86_400, unit="s", unset="off"
        ),
    ] = None
    queue_timeout: Annotated[
        float | None,
        About(
            _LOAD,
            "time that a request may wait for its first step before it is refused as overload",
            0.001,
            86_400,
            unit="s",
            unset="off",
        ),
    ] = None

    max_request_bytes: Annotated[int, About(_REQUEST, "most bytes of one request", 1024, 1 << 30, unit="bytes")] = (
        4 << 20
    )
    max_n: Annotated[int, About(_REQUEST, "most choices of one request (n)", 1, 1 << 16)] = 128
    max_stop_strings: Annotated[int, About(_REQUEST, "most stop strings of one request", 0, 1 << 16)] = 16
    max_stop_bytes: Annotated[
        int,
        About(
            _REQUEST, "most bytes of a request's stop strings together, and of its bad words", 0, 1 << 20, unit="bytes"
        ),
    ] = 4096
    max_stop_token_ids: Annotated[int, About(_REQUEST, "most stop_token_ids of one request", 0, 1 << 16)] = 64
    max_logprobs: Annotated[
        int,
        About(
            _REQUEST,
            "most alternatives a token (logprobs, prompt_logprobs); beam search takes twice its width",
            0,
            1 << 16,
        ),
    ] = 20
    max_bad_words: Annotated[int, About(_REQUEST, "most bad_words of one request", 0, 1 << 16)] = 128
    max_logit_bias: Annotated[int, About(_REQUEST, "most entries of a request's logit_bias", 0, 1 << 20)] = 1024
    max_grammar_bytes: Annotated[
        int, About(_REQUEST, "most bytes of a request's structured_outputs", 0, 1 << 24, unit="bytes")
    ] = 65536
    grammar_timeout: Annotated[
        float, About(_REQUEST, "time that compiling a request's structured_outputs may take", 0.01, 3600, unit="s")
    ] = 10.0
    template_timeout: Annotated[
        float, About(_REQUEST, "time that the model's chat template may take for a conversation", 0.01, 3600, unit="s")
    ] = 5.0

    start_timeout: Annotated[
        float, About(_LIFE, "time until a group that is not ready counts as failed", 0.1, 86_400, unit="s")
    ] = 300.0
    drain_timeout: Annotated[
        float,
        About(_LIFE, "time that running requests have to finish once the group is told to end", 0, 86_400, unit="s"),
    ] = 10.0
    max_restarts: Annotated[
        int,
        About(
            _LIFE,
            "deaths of one process within --restart-window after which the group gives up; 0 restarts none",
            0,
            1 << 16,
        ),
    ] = 5
    restart_window: Annotated[float, About(_LIFE, "time in which restarts are counted", 0.1, 86_400, unit="s")] = 60.0
    step_timeout: Annotated[
        float,
        About(
            _LIFE,
            "time after which a process counts as hung: a worker without a result, any without an answer",
            0.1,
            86_400,
            unit="s",
        ),
    ] = 300.0

    span_records: Annotated[
        int,
        About(
            _WATCHING,
            "newest spans that each thread keeps for `trace`, `profile` and `top`: a power of two; 0 is none",
            0,
            1 << 24,
        ),
    ] = 1 << 14
    nvtx: Annotated[bool, About(_WATCHING, "name what a GPU worker does for Nsight Systems (NVTX ranges)")] = False
    metrics_port: Annotated[
        int | None,
        About(
            _WATCHING,
            "serve Prometheus metrics over HTTP on this port; 0 takes one that is free (see the ready line)",
            0,
            65535,
            metavar="PORT",
            unset="off",
        ),
    ] = None
    metrics_host: Annotated[str, About(_WATCHING, "address that --metrics-port listens on", metavar="ADDRESS")] = (
        "127.0.0.1"
    )
    otlp_endpoint: Annotated[
        str | None,
        About(
            _WATCHING,
            "send a trace of each request to this URL (OTLP over HTTP); needs procengine[otel]",
            metavar="URL",
            unset="off",
        ),
    ] = None

    crash_dir: Annotated[
        str | None,
        About(
            _CRASHES,
            "folder for records of what ran when a process died (auto: crashes/ in the cache directory)",
            metavar="DIR",
        ),
    ] = None
    crash_seconds: Annotated[
        float, About(_CRASHES, "length of the history of steps in a crash record; 0 writes none", 0, 3600, unit="s")
    ] = 30.0
    crash_records: Annotated[int, About(_CRASHES, "most crash records in the folder; the oldest go", 1, 10_000)] = 8
    redact_prompts: Annotated[
        bool, About(_CRASHES, "leave texts and token ids out of crash records: their lengths and digests stay")
    ] = False


OPTIONS: Final[Mapping[str, Option]] = options_of(EngineArgs)


def check_ranges(args: EngineArgs) -> None:
    """Raises ConfigError: an option is out of its range, whatever the others are."""
    for name, option in OPTIONS.items():
        option.check_range(getattr(args, name))
    if args.span_records & (args.span_records - 1):
        raise ConfigError(f"span_records: must be a power of two or 0, got {args.span_records}")


def nearest_option(name: str) -> str | None:
    """The option that somebody may have meant, if any is alike."""
    return next(iter(get_close_matches(name, OPTIONS, n=1)), None)
