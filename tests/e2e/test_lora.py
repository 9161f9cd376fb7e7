"""LoRA adapters in running groups: many in one batch, cached prefixes apart, loaded and unloaded while serving."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from procengine import SamplingParams
from procengine.client_bodies import generate_body, prompt_body
from procengine.errors import EngineDeadError, RequestFailedError, StartupError, UnknownAdapterError
from procengine.groups import find_group
from tests.api.http_client import HttpClient
from tests.e2e.oracle import best_tokens
from tests.e2e.running_group import RunningGroup
from tests.e2e.tiny_folders import build_tiny_model, save_folder
from tests.e2e.tiny_prompts import random_prompts
from tests.lora_adapters import ATTENTION, MLP, merged, save_adapter
from tests.procs.harness import wait_until

_NUM_ADAPTERS = 64
_NUM_TOKENS = 12
_PARAMS = SamplingParams(temperature=0.0, max_tokens=_NUM_TOKENS, ignore_eos=True)
_LONG = SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True)
_MODULES = [(*ATTENTION, *MLP), ("q_proj", "v_proj"), MLP, ("k_proj", "o_proj", "down_proj")]
_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "threads": 1,
    "num_blocks": 512,
    "max_num_seqs": 72,
    "max_num_batched_tokens": 2048,
    "enable_lora": True,
    "allow_runtime_lora_updating": True,
    "port": 0,
}


class Adapters:
    """A tiny model with as many adapters as are to be in one batch, of different ranks and modules."""

    def __init__(self, root: Path) -> None:
        self.model = build_tiny_model("llama")
        self.folder = save_folder(self.model, root / "model")
        self.root = root
        self.paths = {
            f"a{index}": save_adapter(
                self.model,
                root / f"a{index}",
                index,
                rank=1 + index % 8,
                modules=_MODULES[index % 4],
                use_rslora=index % 3 == 1,
            )
            for index in range(_NUM_ADAPTERS)
        }
        self.prompts = random_prompts([5 + index % 19 for index in range(_NUM_ADAPTERS)], seed=9)

    def check(self, name: str, prompt: list[int], token_ids: Sequence[int]) -> None:
        """The tokens are those of the model with the adapter's weights in its own ("": without)."""
        model = merged(self.model, self.root / name) if name else self.model
        assert list(token_ids) == best_tokens(model, prompt, token_ids).token_ids, name


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def group(adapters: Adapters) -> Iterator[RunningGroup]:
    """All adapters are there, with room for two more."""
    modules = tuple(f"{name}={path}" for name, path in adapters.paths.items())
    with RunningGroup(adapters.folder, **_OPTIONS, lora_modules=modules, max_loras=_NUM_ADAPTERS + 2) as group:
        yield group


@pytest.fixture(scope="module")
def http(group: RunningGroup) -> HttpClient:
    return HttpClient(group.ready["http"])


def generate(
    group: RunningGroup, rows: Sequence[tuple[str, list[int]]], params: SamplingParams = _PARAMS, salt: str = ""
) -> list[list[int]]:
    """Tokens of (adapter, prompt) rows, sent at once."""
    bodies = [generate_body(prompt_body(prompt), params, cache_salt=salt, lora_name=name) for name, prompt in rows]
    return [list(one.outputs[0].token_ids) for one in group.client.generate_bodies(bodies)]


def load(http: HttpClient, name: str, path: Path) -> tuple[int, str]:
    answer = http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    return answer.status, answer.body.decode()


def unload(http: HttpClient, name: str) -> int:
    return http.post("/v1/unload_lora_adapter", {"lora_name": name}).status


def test_64_adapters_in_one_batch_give_what_each_gives_alone(group: RunningGroup, adapters: Adapters) -> None:
    rows = [*zip(adapters.paths, adapters.prompts, strict=True), ("", adapters.prompts[0]), ("a7", adapters.prompts[1])]
    group.client.stats(reset=True)
    with group.held_until_queued(len(rows)):
        together = generate(group, rows, salt=group.new_salt())
    assert group.client.stats()["num_steps"] < 2 * _NUM_TOKENS  # they did share steps
    for (name, prompt), token_ids in zip(rows, together, strict=True):
        adapters.check(name, prompt, token_ids)
    for index in (0, 1, 2, 3, 63):
        assert generate(group, [rows[index]], salt=group.new_salt()) == [together[index]]
    assert len({tuple(generate(group, [(name, rows[0][1])])[0]) for name in ("", "a0", "a1", "a2")}) == 4


def test_prefixes_are_found_under_their_own_adapter_only(group: RunningGroup, adapters: Adapters) -> None:
    prompt, salt = random_prompts([100], seed=4)[0], group.new_salt()

    def run(name: str) -> int | None:
        output = group.client.generate(prompt, _PARAMS, lora_name=name, cache_salt=salt)
        adapters.check(name, prompt, output.outputs[0].token_ids)
        return output.num_cached_tokens

    assert [run(name) for name in ("a1", "a2", "", "a1", "a2", "")] == [0, 0, 0, 96, 96, 96]


def test_another_adapter_of_the_same_name_finds_no_block_of_the_first(
    group: RunningGroup, http: HttpClient, adapters: Adapters, tmp_path: Path
) -> None:
    prompt = random_prompts([100], seed=5)[0]
    for source in ("a5", "a6"):
        shutil.copytree(adapters.paths[source], tmp_path / "now", dirs_exist_ok=True)
        assert load(http, "same", tmp_path / "now")[0] == 200
        outputs = [group.client.generate(prompt, _PARAMS, lora_name="same") for _ in range(2)]
        assert [one.num_cached_tokens for one in outputs] == [0, 96]
        for output in outputs:
            adapters.check(source, prompt, output.outputs[0].token_ids)
        assert unload(http, "same") == 200


def test_an_adapter_is_unloaded_when_those_that_have_it_have_ended(
    group: RunningGroup, http: HttpClient, adapters: Adapters
) -> None:
    prompt, statuses = adapters.prompts[3], list[int]()
    assert load(http, "leaving", adapters.paths["a3"])[0] == 200
    stream = group.client.stream(prompt, _LONG, lora_name="leaving")
    token_ids = list(next(stream).token_ids)
    unloading = threading.Thread(target=lambda: statuses.append(unload(http, "leaving")))
    unloading.start()
    wait_until(lambda: refuses(group, "leaving", prompt), "the name is known no more")
    status, text = load(http, "leaving", adapters.paths["a4"])
    assert status == 400 and "leaving is being unloaded" in text
    token_ids += [one for delta in stream for one in delta.token_ids]
    unloading.join()
    assert statuses == [200] and len(token_ids) == 600
    adapters.check("a3", prompt, token_ids)
    assert load(http, "leaving", adapters.paths["a4"])[0] == 200  # into the place that is vacant now
    adapters.check("a4", prompt, generate(group, [("leaving", prompt)])[0])
    assert unload(http, "leaving") == 200


def refuses(group: RunningGroup, name: str, prompt: list[int]) -> bool:
    try:
        group.client.generate(prompt, SamplingParams(max_tokens=1), lora_name=name)
    except UnknownAdapterError as error:
        return name in str(error)
    return False


def test_adapters_are_models_over_http(http: HttpClient, adapters: Adapters) -> None:
    models = {one["id"]: one for one in http.get("/v1/models").json["data"]}
    base = next(name for name, one in models.items() if one["parent"] is None)
    assert models["a9"]["parent"] == base and models["a9"]["root"] == str(adapters.paths["a9"])
    body = {"model": "a9", "prompt": adapters.prompts[9], "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = http.post("/v1/completions", body | {"ignore_eos": True}).json
    assert answer["model"] == "a9"
    adapters.check("a9", adapters.prompts[9], answer["choices"][0]["token_ids"])
    assert http.post("/v1/completions", body | {"model": "none"}).status == 404
    assert http.post("/v1/embeddings", {"model": "a9", "input": "x"}).status == 400


def test_bad_adapters_are_refused_and_leave_nothing(http: HttpClient, adapters: Adapters, tmp_path: Path) -> None:
    before = http.get("/v1/models").json
    large = save_adapter(adapters.model, tmp_path / "large", 1, rank=17)
    broken = shutil.copytree(adapters.paths["a0"], tmp_path / "broken")
    (broken / "adapter_model.safetensors").write_bytes(b"no")
    expected = {
        ("x", tmp_path / "nowhere"): "there is no such folder",
        ("x", large): "the limit (max_lora_rank) is 16",
        ("x", broken): "not a safetensors file",
        ("a0", adapters.paths["a0"]): "loaded already",
        ("-x", adapters.paths["a0"]): "lora_name: must be",
    }
    for (name, path), text in expected.items():
        status, shown = load(http, name, path)
        assert status == 400 and text in shown, shown
    for name in ("x", "y"):
        assert load(http, name, adapters.paths["a0"])[0] == 200  # no place was lost by the refusals
    status, shown = load(http, "z", adapters.paths["a0"])
    assert status == 400 and "the limit (max_loras) is 66" in shown
    assert [unload(http, name) for name in ("x", "y", "y")] == [200, 200, 404]
    assert http.get("/v1/models").json == before


def kill(group: RunningGroup, role: str) -> None:
    """One of its processes dies; returns when it is known to be gone."""
    pid = dict(find_group(group.endpoint).pids)[role]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: dict(find_group(group.endpoint).pids).get(role) != pid, f"{role} is another one", 30.0)


@pytest.mark.slow
def test_a_new_worker_gets_its_adapters_and_requests_go_on(
    group: RunningGroup, http: HttpClient, adapters: Adapters
) -> None:
    assert load(http, "late", adapters.paths["a8"])[0] == 200
    stream = group.client.stream(adapters.prompts[8], _LONG, lora_name="late")
    token_ids = list(next(stream).token_ids)
    kill(group, "worker-0")
    token_ids += [one for delta in stream for one in delta.token_ids]
    adapters.check("a8", adapters.prompts[8], token_ids)
    assert unload(http, "late") == 200


@pytest.mark.slow
def test_a_new_frontend_knows_what_was_loaded_meanwhile(
    group: RunningGroup, http: HttpClient, adapters: Adapters
) -> None:
    assert load(http, "late", adapters.paths["a8"])[0] == 200
    assert unload(http, "a63") == 200
    kill(group, "frontend")
    prompt = adapters.prompts[8]
    adapters.check("a8", prompt, generate(group, [("late", prompt)])[0])
    assert refuses(group, "a63", prompt)
    assert unload(http, "late") == 200 and load(http, "a63", adapters.paths["a63"])[0] == 200


@pytest.mark.slow
def test_an_adapter_that_is_gone_when_a_worker_begins_anew_ends_its_requests(
    group: RunningGroup, http: HttpClient, adapters: Adapters, tmp_path: Path
) -> None:
    folder = shutil.copytree(adapters.paths["a2"], tmp_path / "gone")
    assert load(http, "gone", folder)[0] == 200
    stream = group.client.stream(adapters.prompts[2], _LONG, lora_name="gone")
    next(stream)
    shutil.rmtree(folder)
    kill(group, "worker-0")
    with pytest.raises(RequestFailedError, match="its adapter is gone"):
        list(stream)
    adapters.check("a2", adapters.prompts[2], generate(group, [("a2", adapters.prompts[2])])[0])
    assert "gone" not in [one["id"] for one in http.get("/v1/models").json["data"]]


def test_a_group_does_not_start_with_a_bad_adapter(adapters: Adapters, tmp_path: Path) -> None:
    folder = save_adapter(adapters.model, tmp_path / "bad", 1)
    config = json.loads((folder / "adapter_config.json").read_text()) | {"use_dora": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises((StartupError, EngineDeadError), match="use_dora: is not supported"):
        RunningGroup(adapters.folder, **_OPTIONS, lora_modules=(f"bad={folder}",))
