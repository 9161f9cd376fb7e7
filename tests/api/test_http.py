"""HTTP itself: connections that are kept, requests behind one another, heads, ids, keys, origins."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from procengine.api.all_routes import all_routes
from tests.api.http_client import HttpClient, strict_json
from tests.procs.harness import Served

BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 3}


def read_until(connection: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        piece = connection.recv(65536)
        assert piece, data
        data += piece
    return data


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


def request(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    head = b"POST /v1/completions HTTP/%b\r\nHost: x\r\nContent-Type: application/json\r\n" % version
    lines = b"".join(b"%b\r\n" % line for line in headers)
    return head + lines + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def test_connections_are_kept_and_answers_come_in_order(http: HttpClient) -> None:
    bodies = [b'{"prompt": "a", "max_tokens": %d}' % count for count in (40, 2, 20)]
    with http.raw() as connection:
        connection.sendall(b"".join(map(request, bodies)))  # all at once
        connection.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answers = read_all(connection).split(b"HTTP/1.1 200 OK")[1:]
    counts = [strict_json(answer.partition(b"\r\n\r\n")[2]).get("usage") for answer in answers]
    assert [count and count["completion_tokens"] for count in counts] == [40, 2, 20, None]


def test_a_request_may_come_byte_by_byte(http: HttpClient) -> None:
    with http.raw() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in request(b'{"prompt": "a", "max_tokens": 2}', b"Connection: close"):
            connection.sendall(bytes([byte]))
        assert b'"completion_tokens":2' in read_all(connection)


def test_old_clients_get_a_stream_without_chunks(http: HttpClient) -> None:
    with http.raw() as connection:
        connection.sendall(request(b'{"prompt": "a", "max_tokens": 3, "stream": true}', version=b"1.0"))
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"chunked" not in head and b"Connection: close" in head
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")


def test_who_asks_whether_to_go_on_is_told(http: HttpClient) -> None:
    body = b'{"prompt": "a", "max_tokens": 2}'
    with http.raw() as connection:
        data = request(body, b"Expect: 100-continue", b"Connection: close")
        connection.sendall(data[: -len(body)])
        assert read_until(connection, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_upgrades_are_passed_over(http: HttpClient, size: int) -> None:
    # Java's client asks for h2c in every request, those with a body too.
    body = b'{"prompt": "a", "max_tokens": 2}'
    upgrade = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAARAAAAAAAIAAAAA")
    chunked = request(body, *upgrade, b"Transfer-Encoding: chunked").replace(b"Content-Length: %d\r\n" % len(body), b"")
    chunked = chunked.replace(body, b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    last = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    data = request(body, *upgrade) + request(body) + chunked + last
    with http.raw() as connection:
        for at in range(0, len(data), size):
            connection.sendall(data[at : at + size])
        answers = read_all(connection).split(b"HTTP/1.1 200 OK")
    assert len(answers) == 5 and answers[0] == b"" and answers[4].endswith(b'{"status":"ok"}')
    assert all(b'"completion_tokens":2' in answer for answer in answers[1:4])


def test_heads_can_be_asked_for_alone(http: HttpClient) -> None:
    answer = http.ask("HEAD", "/v1/models")
    assert (answer.status, answer.body) == (200, b"") and int(answer.headers["content-length"]) > 10


def test_request_ids_are_kept_or_given(http: HttpClient) -> None:
    answer = http.post("/v1/completions", BODY, {"X-Request-Id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1" and "mine-1" in answer.json["id"]
    ids = {
        http.post("/v1/completions", {}, {"X-Request-Id": given}).headers["x-request-id"] for given in ("", "x" * 200)
    }
    assert len(ids) == 2 and all(len(one) == 32 for one in ids)


def test_probes_and_pages(group: Served, http: HttpClient) -> None:
    assert http.get("/live").json == {"status": "ok"}
    assert http.get("/ready").status == 200
    health = http.get("/health").json
    assert health["status"] == "ok" and health["processes"]["api-0"] == "ready"
    assert set(http.get("/version").json) == {"version"}
    models = http.get("/v1/models").json["data"]
    assert [one["id"] for one in models] == [group.ready["model"]]
    http.post("/v1/completions", BODY)
    page = http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert b"procengine:generation_tokens_total" in page.body


def test_the_page_asks_for_nothing_from_elsewhere(http: HttpClient) -> None:
    texts = {}
    for path, kind in (("/", "text/html"), ("/page.css", "text/css"), ("/page.js", "text/javascript")):
        answer = http.get(path)
        assert answer.status == 200 and answer.headers["content-type"] == f"{kind}; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        texts[path] = answer.body.decode()
    for text in texts.values():
        assert set(re.findall(r"https?://[^'\" )]*", text)) <= {"http://www.w3.org/2000/svg"}  # a name, not an address
        assert not re.search(r"""["'(]//[a-z]|@import|<[^>]* (?:style|on[a-z]+)=""", text)
    # Paths are relative: it works below any prefix of a proxy.
    links = re.findall(r'(?:href|src)="([^"]+)"', texts["/"])
    assert {link for link in links if link[0] != "#" and not link.startswith("data:")} == {"page.css", "page.js"}
    assert not re.search(r"""(?:ask|post|fetch)\(["'`]/""", texts["/page.js"])


def test_top_is_the_group_in_figures(group: Served, http: HttpClient) -> None:
    http.post("/v1/completions", BODY | {"max_tokens": 40})
    frame = http.get("/top").json
    assert frame["group"] == group.ready["name"] and len(frame["workers"]) == len(frame["window"]["workers"]) == 1
    assert {one["name"]: one["pid"] for one in frame["processes"]} == group.pids
    assert frame["totals"]["output_tokens"] >= 40 and frame["window"]["output_tokens"] > 0
    assert 0 <= frame["workers"][0]["kv_usage"] <= 1 and 0 <= frame["window"]["workers"][0]["bubble"] <= 1


def test_the_openapi_document_tells_every_route_and_what_is_decoded(http: HttpClient) -> None:
    document = http.get("/openapi.json").json
    told = {(method.upper(), path.partition("{")[0]) for path, at in document["paths"].items() for method in at}
    pages = {("GET", path) for path in ("/", "/page.css", "/page.js", "/openapi.json")}
    assert told | pages == {(route.method, route.path) for route in all_routes().routes}
    schemas = document["components"]["schemas"]

    def schema_of(path: str) -> dict[str, Any]:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return dict(schemas[body["$ref"].rpartition("/")[2]])

    chat = schema_of("/v1/chat/completions")
    assert chat["required"] == ["messages"] and chat["additionalProperties"] is False and "top_k" in chat["properties"]
    validator = jsonschema.Draft202012Validator({**schemas["ErrorAnswer"], "components": document["components"]})
    validator.validate(http.post("/v1/completions", {}).json)
    jsonschema.Draft202012Validator.check_schema({"$defs": schemas})


def test_every_route_but_live_health_and_the_page_wants_the_key(serve: Callable[..., Served]) -> None:
    url = serve("--port", 0, "--api-key", "s3cret", "--api-key", "other").ready["http"]
    stranger = HttpClient(url)
    open_routes = set()
    for route in all_routes().routes:
        answer = stranger.ask(route.method, route.path, b"{}" if route.method == "POST" else None)
        if answer.status != 401:
            open_routes.add(route.path)
        else:
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in ({"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}, {"X-Api-Key": "s3cre"}):
            asked = stranger.ask(route.method, route.path, b"{}" if route.method == "POST" else None, wrong)
            assert (asked.status == 401) == (answer.status == 401), route
    # The page is the same everywhere and tells nothing; what it shows, it asks for with a key.
    assert open_routes == {"/live", "/health", "/", "/page.css", "/page.js"}
    assert stranger.get("/nothing").status == 401  # nor does it tell what there is
    for headers in ({"Authorization": "Bearer s3cret"}, {"authorization": "bearer other"}, {"X-API-Key": "s3cret"}):
        assert stranger.get("/v1/models", headers).status == 200


@pytest.mark.slow
def test_pages_of_named_origins_may_ask(serve: Callable[..., Served], http: HttpClient) -> None:
    url = serve("--port", 0, "--allowed-origins", "https://a.example").ready["http"]
    client = HttpClient(url)
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    preflight = client.ask("OPTIONS", "/v1/chat/completions", None, ask)
    assert preflight.status == 200
    assert preflight.headers["access-control-allow-origin"] == "https://a.example"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert client.get("/v1/models", {"Origin": "https://a.example"}).headers["access-control-allow-origin"]
    for each, origin in ((client, "https://b.example"), (http, "https://a.example")):
        assert "access-control-allow-origin" not in each.get("/v1/models", {"Origin": origin}).headers


@pytest.mark.slow
def test_names_unix_sockets_and_several_processes(serve: Callable[..., Served], short_dir: Path) -> None:
    path = short_dir / "http.sock"
    names = ("--served-model-name", "good/model", "--served-model-name", "alias")
    group = serve("--uds", path, "--api-workers", 2, *names)
    assert {"api-0", "api-1"} <= set(group.pids)
    for _ in range(5):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(request(b'{"prompt": "a", "model": "alias", "max_tokens": 2}', b"Connection: close"))
            answer = read_all(connection)
        assert answer.startswith(b"HTTP/1.1 200") and b'"model":"good/model"' in answer
    group.stop()
    with socket.socket(socket.AF_UNIX) as connection, pytest.raises(OSError, match=r"refused|No such"):
        connection.connect(str(path))


@pytest.mark.slow
def test_https(serve: Callable[..., Served], tmp_path: Path) -> None:
    import ssl
    import urllib.request

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    group = serve("--port", 0, "--ssl-certfile", certificate, "--ssl-keyfile", key)
    url = group.ready["http"]
    assert url.startswith("https://")
    context = ssl.create_default_context(cafile=str(certificate))
    with urllib.request.urlopen(f"{url}/v1/models", context=context, timeout=30) as response:
        assert response.status == 200
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:  # plain HTTP is none of its business
        connection.sendall(b"GET /live HTTP/1.1\r\n\r\n")
        assert not connection.recv(10).startswith(b"HTTP")
    with urllib.request.urlopen(f"{url}/live", context=context, timeout=30) as response:
        assert response.status == 200


def test_a_port_that_is_taken_is_said_before_anything_starts(serve: Callable[..., Served]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        group = serve("--port", taken.getsockname()[1], waits=False)
        assert group.process.wait(30) == 1
        assert f"port: cannot listen on 127.0.0.1, port {taken.getsockname()[1]}" in group.log
