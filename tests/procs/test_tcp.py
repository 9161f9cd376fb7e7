"""Clients over tcp: with and without keys, wrong ones, none, and what a group refuses to listen on."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq

from procengine import AccessDeniedError, AsyncClient, Client, EngineDeadError, SamplingParams
from procengine.curve_keys import ClientKeys, load_client_keys, load_server_keys, new_keys
from procengine.refusal import why_refused
from tests.procs.harness import Served, as_ids, finish, has_line, key_of, tokens_of
from tests.procs.raw_client import RawClient, body

_GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def keys(_own_places: None) -> ClientKeys:
    """Of the group `locked`."""
    return load_client_keys(str(new_keys("door")[1]))


@pytest.fixture(scope="module")
def locked(serve_module: Callable[..., Served], keys: ClientKeys) -> Served:
    return serve_module("--listen", "tcp://127.0.0.1:0", "--curve-keys", "door", name="locked")


def check_client(client: Client) -> None:
    for length in (5, 17):
        token_ids = list(client.generate({"prompt_token_ids": as_ids(length, 200)}, _GREEDY).outputs[0].token_ids)
        assert token_ids == tokens_of(key_of(token_ids[0], length), length, 8)


def test_without_keys_on_the_loopback_interface_and_beside_unix_sockets(serve: Callable[..., Served]) -> None:
    group = serve("--listen", "tcp://127.0.0.1:0")
    endpoint = group.ready["tcp"]
    assert endpoint.startswith("tcp://127.0.0.1:") and not endpoint.endswith(":0")
    with Client(endpoint) as remote, Client(group.endpoint) as local:
        assert remote.welcome.output_endpoint.startswith("tcp://127.0.0.1:")
        assert local.welcome.output_endpoint.startswith("ipc://")
        check_client(remote)
        check_client(local)
    with pytest.raises(AccessDeniedError, match="or it has no keys at all"):
        Client(endpoint, curve_keys=ClientKeys("0" * 40, *(key.decode() for key in zmq.curve_keypair())))


@pytest.mark.slow
def test_ipv6(serve: Callable[..., Served]) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    group = serve("--listen", "tcp://[::1]:0")
    with Client(group.ready["tcp"]) as client:
        check_client(client)


def test_the_same_routing_id_on_both_transports_is_two_clients(serve: Callable[..., Served]) -> None:
    group = serve("--listen", "tcp://127.0.0.1:0")
    with RawClient(group.endpoint) as local, RawClient(group.ready["tcp"], identity=local.identity) as remote:
        for client, prompt in ((local, as_ids(5, 1)), (remote, as_ids(9, 2))):
            client.submit("same", body(prompt, max_tokens=6))
        for client, length in ((local, 5), (remote, 9)):
            client.wait_end("same")
            token_ids = client.token_ids("same")
            assert token_ids == tokens_of(key_of(token_ids[0], length), length, 6)


@pytest.mark.slow
def test_what_ran_on_a_group_that_another_replaced_at_its_address_ends(serve: Callable[..., Served]) -> None:
    """A service manager starts a killed group again at once; a client on another host sees no more than this."""
    options = ("--mock-step-ms", 10)
    first = serve(*options, "--listen", "tcp://127.0.0.1:0")
    with Client(first.ready["tcp"]) as client:
        stream = client.stream({"prompt_token_ids": as_ids(5)}, SamplingParams(max_tokens=2000))
        next(stream)
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
        serve(*options, "--listen", first.ready["tcp"], name="second")
        with pytest.raises(EngineDeadError, match="another one has taken its place"):
            list(stream)
        with pytest.raises(EngineDeadError):
            client.generate("hello", _GREEDY)


def test_with_keys(locked: Served, keys: ClientKeys) -> None:
    endpoint = locked.ready["tcp"]
    for given in (keys, "door"):
        with Client(endpoint, curve_keys=given) as client:
            check_client(client)
    with Client(endpoint, curve_keys=keys, server_key=load_server_keys("door").public) as client:
        check_client(client)

    async def ask() -> int:
        async with AsyncClient(endpoint, curve_keys=keys) as client:
            return len((await client.generate({"prompt_token_ids": as_ids(5)}, _GREEDY)).outputs[0].token_ids)

    assert asyncio.run(ask()) == 8
    with Client(locked.endpoint) as local:  # who may open the Unix socket needs no key
        check_client(local)


def stranger(keys: ClientKeys) -> ClientKeys:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    return ClientKeys(keys.server, public, secret)


def impostor(keys: ClientKeys) -> ClientKeys:
    return msgspec.structs.replace(keys, server=zmq.curve_keypair()[0].decode())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (stranger, "it does not know this client's key"),
        (impostor, "its key is not the one that this client was told"),
        (lambda keys: None, "it demands keys, and this client has none"),
    ],
    ids=["a key that is not on the list", "another server's key", "no key"],
)
def test_who_is_not_let_in_hears_why(
    locked: Served, keys: ClientKeys, change: Callable[[ClientKeys], ClientKeys | None], reason: str
) -> None:
    endpoint = locked.ready["tcp"]
    with pytest.raises(AccessDeniedError, match=reason):
        Client(endpoint, curve_keys=change(keys))

    async def connect() -> None:
        async with AsyncClient(endpoint, curve_keys=change(keys)):
            pass

    with pytest.raises(AccessDeniedError, match=reason):
        asyncio.run(connect())
    with Client(endpoint, curve_keys=keys) as client:
        assert reason in str(why_refused(client.welcome.output_endpoint, change(keys)))  # the second door is as shut
        check_client(client)


def test_noise_on_a_locked_port_does_no_harm(locked: Served, keys: ClientKeys) -> None:
    host, port = "127.0.0.1", int(locked.ready["tcp"].rpartition(":")[2])
    for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(500), b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL", b""):
        with socket.create_connection((host, port)) as connection:
            connection.sendall(noise)
    with Client(locked.ready["tcp"], curve_keys=keys) as client:
        check_client(client)


def test_secret_keys_are_nowhere_to_be_read(locked: Served, keys: ClientKeys, short_dir: Path) -> None:
    secret = load_server_keys("door").secret
    texts = [locked.log, repr(locked.ready), repr(keys), repr(load_server_keys("door"))]
    texts += [path.read_text() for path in (short_dir / "run" / "locked").glob("*.json")]
    for pid in locked.pids.values():
        texts += [Path(f"/proc/{pid}/{name}").read_text(errors="replace") for name in ("cmdline", "environ")]
    assert not any(secret in text or keys.secret in text for text in texts)


def test_clients_wait_while_the_output_process_is_started_again(serve: Callable[..., Served], keys: ClientKeys) -> None:
    group = serve("--listen", "tcp://127.0.0.1:0", "--curve-keys", "door", "--mock-step-ms", 5)
    with Client(group.ready["tcp"], curve_keys=keys) as client:
        stream = client.stream({"prompt_token_ids": as_ids(7)}, SamplingParams(temperature=0.0, max_tokens=200))
        token_ids = list(next(stream).token_ids)
        os.kill(group.pids["output"], signal.SIGKILL)
        for delta in stream:
            token_ids += delta.token_ids
        assert token_ids == tokens_of(key_of(token_ids[0], 7), 7, 200)
        check_client(client)


@pytest.mark.slow
def test_a_group_elsewhere_that_is_gone_is_missed(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("client_link", "async_client"):
        monkeypatch.setattr(f"procengine.{module}.CUT_OFF_S", 0.5)
    group = serve("--listen", "tcp://127.0.0.1:0", "--mock-step-ms", 50)
    with Client(group.ready["tcp"]) as client:
        stream = client.stream({"prompt_token_ids": as_ids(7)}, SamplingParams(temperature=0.0, max_tokens=200))
        next(stream)
        group.stop()
        with pytest.raises(EngineDeadError, match="is gone"):
            list(stream)


def test_a_port_that_is_taken_is_an_error_before_anything_is_started(serve: Callable[..., Served]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        group = serve("--listen", f"tcp://127.0.0.1:{port}", waits=False)
        assert finish(group.process) == 1
    assert has_line(group.log, "error: listen: cannot listen on 127.0.0.1", str(port), "in use")
    assert len(group.log.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--listen", "tcp://0.0.0.0:0"), ("needs curve_keys", "keys new")),
        (("--listen", "tcp://10.1.2.3:5555"), ("needs curve_keys",)),
        (("--listen", "tcp://[2001:db8::1]:5555"), ("needs curve_keys",)),
        (("--listen", "tcp://*:5555"), ("IP address",)),
        (("--listen", "tcp://example.org:5555"), ("IP address",)),
        (("--listen", "ipc:///tmp/x"), ("tcp://ADDRESS:PORT",)),
        (("--listen", "tcp://127.0.0.1"), ("tcp://ADDRESS:PORT",)),
        (("--listen", "tcp://127.0.0.1:99999"), ("tcp://ADDRESS:PORT",)),
        (("--listen", "tcp://127.0.0.1:65535"), ("the port after",)),
        (("--curve-keys", "door"), ("listen",)),
        (("--listen", "tcp://127.0.0.1:0", "--curve-keys", "nobody"), ("nobody.server.json", "cannot be read")),
    ],
)
def test_what_a_group_does_not_listen_on(
    serve: Callable[..., Served], keys: ClientKeys, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    group = serve(*options, waits=False)
    assert finish(group.process) == 1
    (line,) = group.log.splitlines()
    assert line.startswith("procengine: error: ") and all(word in line for word in words), line
