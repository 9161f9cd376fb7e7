"""Keys of tcp connections (ZeroMQ's CURVE): who a group is, and which clients it lets in.

Owns: the two kinds of key files, their names, modes and checks. Never does: open a socket, or show a secret key: not
in an error, not in a repr.

A server file holds the group's pair of keys and the public keys of the clients that may connect; a client file holds
one of those pairs and the group's public key. Keys are 40 characters of Z85, as ZeroMQ writes them.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import zmq
from zmq.utils import z85

from procengine.errors import ConfigError
from procengine.paths import procengine_home

__all__ = [
    "ClientKeys",
    "ServerKeys",
    "add_client",
    "client_keys",
    "client_path",
    "load_client_keys",
    "load_server_keys",
    "new_keys",
    "require_curve",
    "server_file",
    "server_path",
]

_KEY_CHARS: Final = 40
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_FILE_BYTES: Final = 1 << 20


class ServerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A group's pair, and the public keys of its clients by their names."""

    public: str
    secret: str
    clients: dict[str, str]

    def __repr__(self) -> str:
        return f"ServerKeys(public={self.public!r}, clients={sorted(self.clients)})"


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A client's pair, and the public key of the group it connects to."""

    server: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ClientKeys(server={self.server!r}, public={self.public!r})"


_Keys = TypeVar("_Keys", ServerKeys, ClientKeys)


def require_curve(what: str) -> None:
    """Refuse what needs CURVE where libzmq was built without it.

    Raises:
        ConfigError: it was; names the option `what`.
    """
    if not zmq.has("curve"):
        raise ConfigError(
            f"{what}: this libzmq ({zmq.zmq_version()}) was built without CURVE; install pyzmq from a wheel"
        )


def server_path(name: str) -> Path:
    """Where the server file called `name` lies."""
    return _keys_dir() / f"{name}.server.json"


def client_path(name: str) -> Path:
    """Where the client file called `name` lies."""
    return _keys_dir() / f"{name}.client.json"


def new_keys(name: str) -> tuple[Path, Path]:
    """Make the keys of a group and of a first client, both called `name`. Returns the server's and the client's file.

    Raises:
        ConfigError: the name cannot be a file's, the files exist, or cannot be written.
    """
    require_curve("keys")
    _check_name(name)
    for path in (server_path(name), client_path(name)):
        if path.exists():
            raise ConfigError(f"keys: {path} exists already; remove it, or choose another name")
    public, secret = _new_pair()
    client_public, client_secret = _new_pair()
    _write_new(client_path(name), ClientKeys(public, client_public, client_secret))
    _write_new(server_path(name), ServerKeys(public, secret, {name: client_public}))
    return server_path(name), client_path(name)


def add_client(name: str, client: str) -> Path:
    """Make keys for one more client of the group whose server file is `name`. Returns the client's file.

    Raises:
        ConfigError: as `new_keys`.
    """
    require_curve("keys")
    _check_name(client)
    server = load_server_keys(name)
    path = client_path(client)
    if path.exists() or client in server.clients:
        raise ConfigError(f"keys: there is a client {client!r} already ({path})")
    public, secret = _new_pair()
    _write_new(path, ClientKeys(server.public, public, secret))
    changed = msgspec.structs.replace(server, clients={**server.clients, client: public})
    draft = server_file(name).with_suffix(".new")
    draft.unlink(missing_ok=True)
    _write_new(draft, changed)
    draft.replace(server_file(name))
    return path


def load_server_keys(path_or_name: str) -> ServerKeys:
    """A server file: a path, or a name that `procengine keys new` was given.

    Raises:
        ConfigError: it is missing, readable by others, or not what it should be.
    """
    path = _path_of(path_or_name, server_path)
    keys = _load(path, ServerKeys)
    _check_keys(path, {"public": keys.public, "secret": keys.secret}, keys.clients)
    return keys


def load_client_keys(path_or_name: str) -> ClientKeys:
    """A client file: a path, or a name. Raises as `load_server_keys`."""
    path = _path_of(path_or_name, client_path)
    keys = _load(path, ClientKeys)
    _check_keys(path, {"server": keys.server, "public": keys.public, "secret": keys.secret}, {})
    return keys


def client_keys(curve_keys: str | os.PathLike[str] | ClientKeys | None, server_key: str | None) -> ClientKeys | None:
    """What a client's two arguments mean together; None is a connection without keys.

    Raises:
        ConfigError: `server_key` is no key, or stands alone: a group lets nobody in whom it does not know.
    """
    if curve_keys is None:
        if server_key is not None:
            raise ConfigError("server_key: takes curve_keys too, the keys of this client (`procengine keys new NAME`)")
        return None
    require_curve("curve_keys")
    keys = curve_keys if isinstance(curve_keys, ClientKeys) else load_client_keys(os.fspath(curve_keys))
    if server_key is None:
        return keys
    if not _is_key(server_key):
        raise ConfigError(f"server_key: must be a public key of {_KEY_CHARS} characters, got {server_key!r:.80}")
    return msgspec.structs.replace(keys, server=server_key)


def server_file(path_or_name: str) -> Path:
    """The absolute path of a server file, by its path or its name."""
    return _path_of(path_or_name, server_path).absolute()


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _keys_dir() -> Path:
    return procengine_home() / "keys"


def _path_of(path_or_name: str, by_name: Callable[[str], Path]) -> Path:
    """What has a slash or ends in .json is a path, anything else a name."""
    is_name = "/" not in path_or_name and not path_or_name.endswith(".json")
    return by_name(path_or_name) if is_name else Path(path_or_name).expanduser()


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"keys: a name has 1 to 64 letters, digits, '.', '_' or '-', got {name!r:.80}")


def _write_new(path: Path, keys: ServerKeys | ClientKeys) -> None:
    """Write a file that must not exist yet, for its owner's eyes only from its first moment on."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"keys: {path} cannot be written: {error.strerror or error}") from error


def _load(path: Path, kind: type[_Keys]) -> _Keys:
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"curve_keys: {path} cannot be read: {error.strerror or error}") from error
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"curve_keys: {path} must be this user's and nobody else's to read (chmod 600)")
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        what = "server" if kind is ServerKeys else "client"
        raise ConfigError(f"curve_keys: {path} is no {what} file of `procengine keys`: {error}") from error


def _check_keys(path: Path, own: dict[str, str], clients: dict[str, str]) -> None:
    for field, key in (*own.items(), *((f"clients.{name}", key) for name, key in clients.items())):
        if not _is_key(key):
            raise ConfigError(f"curve_keys: {path}: {field} is no key of {_KEY_CHARS} characters in Z85")


def _is_key(text: str) -> bool:
    if len(text) != _KEY_CHARS or not text.isascii():
        return False
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError):
        return False
