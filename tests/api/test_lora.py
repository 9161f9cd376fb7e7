"""Adapters over HTTP, on the mock device: every API names them as models; loading is for groups that allow it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.api.http_client import HttpClient
from tests.procs.harness import Served, cli, wait_until

_MESSAGES = [{"role": "user", "content": "x"}]
# path, body, and where the answer says its model
_GENERATION: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [5, 6], "max_tokens": 2},
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 2},
}


@pytest.fixture(scope="module")
def adapted(serve_module: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> HttpClient:
    """A group with an adapter, two HTTP processes, and a place for one adapter more."""
    folder: Path = tmp_path_factory.mktemp("adapter")
    (folder / "adapter_config.json").write_text(json.dumps({}))
    group = serve_module(
        *("--port", 0, "--api-workers", 2, "--enable-lora", "--lora-modules", f"sql={folder}", "--max-loras", 2),
        "--allow-runtime-lora-updating",
        name="adapted",
    )
    return HttpClient(group.ready["http"])


@pytest.mark.parametrize("path", _GENERATION)
def test_an_adapter_is_a_model_of_every_api(adapted: HttpClient, path: str) -> None:
    answer = adapted.post(path, _GENERATION[path] | {"model": "sql"})
    assert (answer.status, answer.json["model"]) == (200, "sql")
    assert adapted.post(path, _GENERATION[path] | {"model": "other"}).status == 404


def test_every_http_process_knows_what_was_loaded_and_unloaded(adapted: HttpClient) -> None:
    def names() -> set[tuple[str, ...]]:
        """As any of the processes says: a connection a question, accepted by whoever is free."""
        lists = [adapted.get("/v1/models").json["data"] for _ in range(20)]
        return {tuple(one["id"] for one in listed[1:]) for listed in lists}

    assert names() == {("sql",)}
    answer = adapted.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/x"})
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'new' added successfully.")
    wait_until(lambda: names() == {("sql", "new")}, "both know it")
    assert adapted.get("/v1/models/new").json["root"] == "/x"
    answer = adapted.post("/v1/unload_lora_adapter", {"lora_name": "new"})
    assert (answer.status, answer.body) == (200, b"Success: LoRA adapter 'new' removed successfully.")
    wait_until(lambda: names() == {("sql",)}, "both have forgotten it")


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("load", {"lora_name": "a"}, 400, "lora_path: must be given"),
        ("load", {"lora_name": "", "lora_path": "/x"}, 400, "lora_name: must not be empty"),
        ("load", {"lora_name": "a", "lora_path": ""}, 400, "lora_path: must not be empty"),
        ("load", {"lora_name": "a", "lora_path": "/x", "load_inplace": True}, 400, "load_inplace: is not supported"),
        ("load", {"lora_name": "a", "lora_path": "/x", "y": 1}, 400, "y: there is no such field"),
        ("load", {"lora_name": "a b", "lora_path": "/x"}, 400, "lora_name: must be 1 to 128 letters"),
        ("load", {"lora_name": "sql", "lora_path": "/x"}, 400, "lora_name: sql is loaded already"),
        ("unload", {"lora_name": "none"}, 404, "lora_name: there is no adapter 'none' here; there are: sql"),
    ],
)
def test_wrong_changes_are_refused(
    adapted: HttpClient, path: str, body: dict[str, Any], status: int, text: str
) -> None:
    answer = adapted.post(f"/v1/{path}_lora_adapter", body)
    assert answer.status == status and text in answer.error["message"]


def test_a_group_that_does_not_allow_it_is_left_as_it_is(http: HttpClient) -> None:
    answer = http.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/x"})
    assert answer.status == 403 and "--allow-runtime-lora-updating" in answer.error["message"]


def test_the_command_line_loads_and_unloads(adapted: HttpClient) -> None:
    def lora(*arguments: str) -> tuple[int, str]:
        command = cli("lora", *arguments, "--group", "adapted")
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout + done.stderr

    assert lora("load", "mine", "/x") == (0, "adapter mine is loaded, in group adapted\n")
    wait_until(lambda: adapted.get("/v1/models/mine").status == 200, "it is a model")
    assert lora("unload", "mine") == (0, "adapter mine is unloaded, in group adapted\n")
    status, text = lora("unload", "mine")
    assert status == 1 and "there is no adapter 'mine' here; there are: sql" in text
    assert lora("load", "mine") == (1, "procengine: error: path: must be given to load an adapter, and only then\n")
