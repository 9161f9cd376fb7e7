"""Key files: who may read them, what is wrong with others, and that no secret is shown."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from procengine.curve_keys import ClientKeys, add_client, client_keys, load_client_keys, load_server_keys, new_keys
from procengine.errors import ConfigError
from procengine.listen import reachable_from, resolve_listen


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROCENGINE_HOME", str(tmp_path))
    return tmp_path


def test_new_keys_know_each_other_and_are_their_owners_alone() -> None:
    server_file, client_file = new_keys("a")
    server, client = load_server_keys("a"), load_client_keys("a")
    assert client.server == server.public and server.clients == {"a": client.public}
    assert len({server.secret, client.secret, server.public, client.public}) == 4
    assert load_server_keys(str(server_file)) == server and load_client_keys(str(client_file)) == client
    for path in (server_file, client_file):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(server_file.parent.stat().st_mode) == 0o700


def test_further_clients_are_on_the_servers_list() -> None:
    server_file, _ = new_keys("a")
    path = add_client("a", "b")
    before = load_server_keys("a")
    assert before.clients.keys() == {"a", "b"} and before.clients["b"] == load_client_keys("b").public
    assert load_client_keys(str(path)).server == before.public
    assert stat.S_IMODE(server_file.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="'b' already"):
        add_client("a", "b")
    with pytest.raises(ConfigError, match="exists already"):
        new_keys("a")
    assert load_server_keys("a") == before


def test_files_that_others_may_read_are_refused() -> None:
    for path, load in zip(new_keys("a"), (load_server_keys, load_client_keys), strict=True):
        for mode in (0o640, 0o604, 0o666):
            path.chmod(mode)
            with pytest.raises(ConfigError, match=rf"{path.name} must be this user's and nobody else's"):
                load("a")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"secret": "short"}, "secret is no key"),
        ({"secret": "é" * 40}, "secret is no key"),
        ({"secret": '"' * 40}, "secret is no key"),
        ({"clients": {"x": "y"}}, r"clients\.x is no key"),
        ({"clients": ["x"]}, r"no server file .*clients"),
        ({"more": 1}, "no server file .*more"),
        ({"public": None}, "no server file .*public"),
    ],
)
def test_what_is_no_key_file_is_named_without_its_secret(changes: dict[str, Any], named: str) -> None:
    path, _ = new_keys("a")
    secret = load_server_keys("a").secret
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=named) as raised:
        load_server_keys("a")
    assert secret not in str(raised.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_client_keys("nobody")


def test_what_a_client_is_given() -> None:
    new_keys("a")
    keys, other = load_client_keys("a"), zmq.curve_keypair()[0].decode()
    assert client_keys(None, None) is None
    assert client_keys("a", None) == client_keys(keys, None) == keys
    assert client_keys(keys, other) == msgspec.structs.replace(keys, server=other)
    for arguments, named in (((None, other), "takes curve_keys"), ((keys, "x"), "server_key: must be a public key")):
        with pytest.raises(ConfigError, match=named):
            client_keys(*arguments)
    assert keys.secret not in repr(keys) and keys.public in repr(keys)
    assert load_server_keys("a").secret not in f"{load_server_keys('a')}"


def test_a_library_without_curve_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    new_keys("a")
    keys: ClientKeys = load_client_keys("a")
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "curve")
    for use in (lambda: new_keys("b"), lambda: client_keys(keys, None), lambda: resolve_listen("tcp://1.2.3.4:5", "a")):
        with pytest.raises(ConfigError, match="built without CURVE"):
            use()


def test_listening_beyond_the_loopback_takes_keys() -> None:
    new_keys("a")
    for host in ("127.0.0.1", "127.8.8.8", "[::1]", "localhost"):
        assert resolve_listen(f"tcp://{host}:5", None) is not None
    for host in ("0.0.0.0", "192.168.0.1", "[::]", "[::ffff:127.0.0.1]", "[::ffff:127.0.0.1%x]"):
        with pytest.raises(ConfigError, match="listen: "):
            resolve_listen(f"tcp://{host}:5", None)
    config = resolve_listen("tcp://0.0.0.0:5555", "a")
    assert config is not None and (config.frontend, config.output) == ("tcp://0.0.0.0:5555", "tcp://0.0.0.0:5556")
    assert load_server_keys("a").secret not in repr(config) and str(config.curve_keys).endswith("a.server.json")


@pytest.mark.parametrize(
    ("connected_to", "named", "expected"),
    [
        ("tcp://box:5", "tcp://0.0.0.0:6", "tcp://box:6"),
        ("tcp://[fe80::1]:5", "tcp://[::]:6", "tcp://[fe80::1]:6"),
        ("tcp://box:5", "tcp://10.0.0.1:6", "tcp://10.0.0.1:6"),
        ("ipc:///a", "ipc:///b", "ipc:///b"),
    ],
)
def test_an_address_that_means_all_is_the_one_the_client_knows(connected_to: str, named: str, expected: str) -> None:
    assert reachable_from(connected_to, named) == expected
