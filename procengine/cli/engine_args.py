"""The options of a group as flags, derived from `EngineArgs`, so that no option is written twice.

Owns: the help text of each option. Never does: decide or check a value (`resolve` does).
"""

from __future__ import annotations

import argparse
import types
import typing
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

import msgspec

from procengine.resolve import EngineArgs

__all__ = ["add_engine_arguments", "engine_args_from"]

_MODEL_HELP: Final = "a folder (Hugging Face layout), a .gguf file, an alias such as smollm2-135m, or a hub id"

_HELP: Final[Mapping[str, str]] = {
    "name": "name of the group (auto: the model's)",
    "device": "where the model runs; mock runs none and makes up tokens, to measure everything else",
    "dtype": "number format of weights and cache (auto: what the device is fast at)",
    "kernels": "what computes on a CPU: native, compiled for it, or torch (auto: native with dtype bfloat16, if built)",
    "quantization": "weights rounded to groups of 8 or 4 bits; none is bfloat16 (auto: as the files have them)",
    "kv_cache_dtype": "number format of keys and values; int8, half of bfloat16, takes native kernels (auto: dtype)",
    "workers": "data-parallel workers, each with its own weights and KV pool",
    "threads": "CPU threads of one worker (auto: the cores, shared)",
    "block_size": "tokens in one block of the KV cache",
    "num_blocks": "blocks in the KV pool of one worker (auto: what fits --kv-cache-memory)",
    "kv_cache_memory": "bytes of KV cache of all workers together (auto: a quarter of what there is, at most 2 GiB)",
    "enable_prefix_caching": "keep the KV blocks of finished prompts, and reuse them for equal beginnings",
    "max_num_seqs": "most requests that run at once in one worker",
    "max_num_batched_tokens": "token budget of one step (auto: 2048, on a CPU 256; more for many rows, whole prompts)",
    "max_model_len": "most tokens of prompt and answer together (auto: what the model was made for)",
    "enable_chunked_prefill": "cut long prompts into pieces, so that running requests go on meanwhile",
    "scheduling_policy": "who starts first: fcfs, in order of arrival, or priority, smaller numbers first",
    "async_depth": "steps planned ahead of the device; 1 waits for each result",
    "decode_steps": "tokens a running request gets per step",
    "speculative_tokens": "most tokens to propose a step, from earlier text (n-grams); 0 is no speculation",
    "pooling": "how embed reduces hidden states to one vector (auto: what the model says)",
    "tool_call_parser": "how the model writes tool calls, which clients read (auto: what its chat template shows)",
    "mock_step_ms": "time a step of the mock device takes, in milliseconds",
    "logits_processors": "callables of the operator that change logits, as module:name (see docs/PLUGINS.md)",
    "max_queued_requests": "most requests that wait or run; one more is refused as overload",
    "max_queued_tokens": "most prompt tokens that wait for their first step; a request of more is refused as overload",
    "max_clients": "most clients at once; one more is refused as overload (auto: 4096, or what `ulimit -Hn` allows)",
    "max_client_requests": "most unfinished requests of one client (auto: --max-queued-requests)",
    "max_client_bytes": "most bytes that wait for one client to read them; beyond, it is dropped with its requests",
    "max_unsent_bytes": "the same for all clients together; beyond, the one with most is dropped",
    "request_timeout": "seconds after which a request that names no timeout_s is aborted",
    "queue_timeout": "seconds that a request may wait for its first step before it is refused as overload",
    "max_request_bytes": "most bytes of one request",
    "max_n": "most choices of one request (n)",
    "max_stop_strings": "most stop strings of one request",
    "max_stop_bytes": "most bytes of a request's stop strings together, and of its bad words",
    "max_stop_token_ids": "most stop_token_ids of one request",
    "max_logprobs": "most alternatives a token (logprobs, prompt_logprobs); beam search takes twice its width",
    "max_bad_words": "most bad_words of one request",
    "max_logit_bias": "most entries of a request's logit_bias",
    "max_grammar_bytes": "most bytes of a request's structured_outputs",
    "grammar_timeout": "seconds that compiling a request's structured_outputs may take",
    "template_timeout": "seconds that the model's chat template may take for one conversation",
    "start_timeout": "seconds until a group that is not ready counts as failed",
    "drain_timeout": "seconds that running requests may take to finish once the group is told to end",
    "max_restarts": "deaths of one process within --restart-window after which the group gives up; 0 restarts none",
    "restart_window": "seconds in which restarts are counted",
    "step_timeout": "seconds after which a process counts as hung: a worker without a result, any without an answer",
    "span_records": "newest spans that each thread keeps for `trace`, `profile` and `top`: a power of two; 0 is none",
    "metrics_port": "serve Prometheus metrics over HTTP on this port; 0 takes one that is free (see the ready line)",
    "metrics_host": "address that --metrics-port listens on",
    "port": "serve OpenAI-compatible HTTP on this port; 0 takes one that is free (see the ready line)",
    "host": "address that --port listens on; 0.0.0.0 is every one of this machine",
    "uds": "serve HTTP on a Unix socket of this path instead of a port",
    "api_workers": "processes that serve HTTP, on the one port",
    "api_key": "key that HTTP clients must send (auto: the variable PROCENGINE_API_KEY; none: all are let in)",
    "served_model_name": "what HTTP requests call the model (auto: MODEL)",
    "allowed_origins": "origin of web pages that may ask over HTTP (CORS), such as https://example.org, or *",
    "ssl_certfile": "certificate (PEM) for HTTPS",
    "ssl_keyfile": "its private key (PEM)",
    "listen": "take clients on tcp://ADDRESS:PORT too, and on the port after it (outputs); 0 takes two that are free",
    "curve_keys": "file or name of keys (`procengine keys new`): tcp clients need keys; demanded beyond the loopback",
    "crash_dir": "folder for records of what ran when a process died (auto: crashes/ in the cache directory)",
    "crash_seconds": "seconds of steps in a crash record; 0 writes none",
    "crash_records": "most crash records in the folder; the oldest go",
    "redact_prompts": "leave texts and token ids out of crash records: their lengths and digests stay",
    "otlp_endpoint": "send a trace of each request to this URL (OTLP over HTTP); needs procengine[otel]",
}

_OFF: Final = frozenset(
    {
        "curve_keys",
        "listen",
        "metrics_port",
        "otlp_endpoint",
        "port",
        "queue_timeout",
        "request_timeout",
        "ssl_certfile",
        "ssl_keyfile",
        "uds",
    }
)  # for these, no value is not "decide for me"


class _ArgumentType(NamedTuple):
    """What argparse needs to know of a field's type."""

    parse: type | None  # None for bool
    choices: tuple[str, ...] | None
    is_list: bool = False


def add_engine_arguments(parser: argparse.ArgumentParser, *, mentions_model: bool = True) -> None:
    """Add MODEL (unless the command adds it itself) and one flag for each other field of `EngineArgs`."""
    if mentions_model:
        parser.add_argument("model", metavar="MODEL", help=_MODEL_HELP)
    group = parser.add_argument_group("engine options")
    hints = typing.get_type_hints(EngineArgs)
    for field in msgspec.structs.fields(EngineArgs):
        if field.name != "model":
            _add_flag(group, field.name, field.default, _argument_type(hints[field.name]))


def engine_args_from(args: argparse.Namespace, *, default_name: str | None = None) -> EngineArgs:
    """The parsed options. A private group gets `default_name`, so that it does not take the name of a served one."""
    values = {field.name: getattr(args, field.name) for field in msgspec.structs.fields(EngineArgs)}
    return msgspec.convert(values | {"name": args.name or default_name}, EngineArgs)


def _add_flag(group: argparse._ArgumentGroup, name: str, default: Any, kind: _ArgumentType) -> None:
    flag = "--" + name.replace("_", "-")
    shown = f"{_HELP[name]} [{'off' if name in _OFF else _shown(default)}]"
    if kind.parse is None:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default, help=shown)
    elif kind.is_list:
        shown += " (may be given several times)"
        group.add_argument(flag, action="append", type=kind.parse, default=[], metavar=_metavar(kind.parse), help=shown)
    elif kind.choices:
        group.add_argument(flag, choices=kind.choices, default=default, help=shown)
    else:
        group.add_argument(flag, type=kind.parse, default=default, metavar=_metavar(kind.parse), help=shown)


def _argument_type(hint: Any) -> _ArgumentType:
    """`int | None` -> int, `Literal["a", "b"]` -> a choice, `bool` -> a switch, `tuple[str, ...]` -> a list of them."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is Literal:
        return _ArgumentType(str, typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        return _ArgumentType(typing.get_args(hint)[0], None, is_list=True)
    return _ArgumentType(None if hint is bool else hint, None)


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if isinstance(default, tuple):
        return " ".join(default) or "none"
    return "auto" if default is None else f"{default}"


def _metavar(parse: type) -> str:
    return {int: "N", float: "X"}.get(parse, "TEXT")
