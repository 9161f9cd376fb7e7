"""The tcp addresses of a group: which are allowed, and what they are called.

Owns: `tcp://HOST:PORT` in and out, and the rule that beyond the loopback interface nothing listens without keys. Never
does: listen.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

import msgspec

from procengine.config import ListenConfig
from procengine.errors import ConfigError

__all__ = ["host_port", "reachable_from", "resolve_listen", "tcp_endpoint", "with_ports"]

_ENDPOINT: Final = re.compile(r"tcp://(?:\[([^\]]+)\]|([^:/\[\]]+)):(\d{1,5})")
_LAST_PORT: Final = 65535
_ANY_HOST: Final = ("0.0.0.0", "::")  # noqa: S104 - compared with, not listened on


def resolve_listen(listen: str | None, curve_keys: str | None) -> ListenConfig | None:
    """What --listen and --curve-keys ask for.

    Raises:
        ConfigError: the address is none, needs keys that are not there, or the keys are not what they should be.
    """
    if listen is None:
        if curve_keys is not None:
            raise ConfigError("curve_keys: is for tcp clients; name an address with listen, such as tcp://0.0.0.0:5555")
        return None
    host, port = _checked(listen)
    if curve_keys is None and not _is_loopback(host):
        raise ConfigError(
            f"listen: {listen} can be reached from other machines, so it needs curve_keys (made by `procengine keys "
            "new NAME`); without keys only a loopback address is allowed, such as tcp://127.0.0.1:5555"
        )
    if curve_keys is not None:
        from procengine.curve_keys import load_server_keys, require_curve, server_file  # who has no keys needs no zmq

        require_curve("curve_keys")
        load_server_keys(curve_keys)
        curve_keys = str(server_file(curve_keys))
    return ListenConfig(tcp_endpoint(host, port), tcp_endpoint(host, port and port + 1), curve_keys)


def host_port(endpoint: str) -> tuple[str, int]:
    """The two parts of `tcp://HOST:PORT`.

    Raises:
        ConfigError: it is no such thing.
    """
    match = _ENDPOINT.fullmatch(endpoint)
    if match is None or int(match[3]) > _LAST_PORT:
        raise ConfigError(
            f"endpoint: must be tcp://HOST:PORT with a port of at most {_LAST_PORT}, got {endpoint!r:.200}"
        )
    return match[1] or match[2], int(match[3])


def tcp_endpoint(host: str, port: int) -> str:
    """`tcp://HOST:PORT`."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def with_ports(listen: ListenConfig, frontend: int, output: int) -> ListenConfig:
    """The same addresses with the ports that were taken for them."""
    host, _ = host_port(listen.frontend)
    return msgspec.structs.replace(listen, frontend=tcp_endpoint(host, frontend), output=tcp_endpoint(host, output))


def reachable_from(connected_to: str, named: str) -> str:
    """The endpoint that a group has named, for a client that is connected to `connected_to`: a host of "all addresses"
    is the one that the client knows already.
    """
    if not (named.startswith("tcp://") and connected_to.startswith("tcp://")):
        return named
    host, port = host_port(named)
    return tcp_endpoint(host_port(connected_to)[0], port) if host in _ANY_HOST else named


def _is_loopback(host: str) -> bool:
    """The same in every Python: 3.13 counts IPv4 addresses mapped into IPv6 among them, older ones do not."""
    address = ipaddress.ip_address(host)
    is_mapped = isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None
    return address.is_loopback and not is_mapped


def _checked(listen: str) -> tuple[str, int]:
    try:
        host, port = host_port(listen)
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError as error:  # ConfigError is one too
        raise ConfigError(
            f"listen: must be tcp://ADDRESS:PORT with an IP address (or localhost), such as tcp://127.0.0.1:5555, "
            f"got {listen!r:.200}"
        ) from error
    if port == _LAST_PORT:
        raise ConfigError(f"listen: the port after {port} is taken too (for outputs), and there is none")
    return str(address), port
