"""What is served over HTTP, from what was asked for: the front door, and the pages of the metrics process.

Owns: the checks of those options. Never does: open a socket.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from procengine.config import ApiConfig, GroupConfig, MetricsConfig, ModelConfig
from procengine.engine_args import OPTIONS, EngineArgs
from procengine.errors import ConfigError

__all__ = ["resolve_api", "resolve_metrics"]


def resolve_metrics(args: EngineArgs, group: GroupConfig, api: ApiConfig) -> MetricsConfig:
    """Raises ConfigError: an option is wrong, or needs another."""
    for field in ("metrics_port", "otlp_endpoint"):
        if getattr(args, field) is not None and not args.span_records:
            raise ConfigError(f"{field}: comes from spans, and span_records is 0")
    if not args.metrics_host:  # to the system it would mean every address
        raise ConfigError("metrics_host: must name an address (0.0.0.0 is every one), got ''")
    # The HTTP processes show the same pages, and get them there: over the port, if there is one.
    is_inner = api.is_on and args.metrics_port is None and bool(args.span_records)
    uds = f"{group.run_dir}/pages.sock" if is_inner else None
    return MetricsConfig(args.metrics_port, args.metrics_host, _otlp_url(args.otlp_endpoint), uds)


def resolve_api(args: EngineArgs, model: ModelConfig) -> ApiConfig:
    """Raises ConfigError: an option is wrong, or does not fit another."""
    if args.port is not None and args.uds is not None:
        raise ConfigError("uds: serves instead of a port, and port was given as well")
    for field in ("host", "uds", "ssl_certfile", "ssl_keyfile"):
        if getattr(args, field) == "":
            raise ConfigError(f"{field}: must not be empty")
    if (args.ssl_certfile is None) != (args.ssl_keyfile is None):
        raise ConfigError("ssl_certfile and ssl_keyfile: must be given together")
    for field in ("ssl_certfile", "ssl_keyfile"):
        path = getattr(args, field)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{field}: there is no file {path}")
    # `serve` reads every option from the environment; without this, a group of `LLM` or `bench` would stand open.
    keys = args.api_key or tuple(filter(None, (os.environ.get(OPTIONS["api_key"].variable),)))
    if any(not key or not key.isascii() or not key.isprintable() for key in keys):
        raise ConfigError("api_key: must be printable ASCII, and not empty")
    return ApiConfig(
        port=args.port,
        host=args.host,
        uds=args.uds,
        num_workers=args.api_workers,
        api_keys=keys,
        served_model_names=args.served_model_name or (model.name,),
        allowed_origins=args.allowed_origins,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
    )


def _otlp_url(endpoint: str | None) -> str | None:
    """Where traces go: what was given, with the path of the standard if it has none."""
    if endpoint is None:
        return None
    wrong = ConfigError(f"otlp_endpoint: must be a URL such as http://localhost:4318, got {endpoint!r}")
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as error:  # a port that is no number
        raise wrong from error
    if not is_url:
        raise wrong
    return endpoint if parts.path.strip("/") else urlunsplit(parts._replace(path="/v1/traces"))
