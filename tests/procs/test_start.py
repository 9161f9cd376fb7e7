"""A group starts, wherever it is told to live, or says in one clear message why not, and leaves nothing (IPC-04)."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from procengine import LLM, Client, SamplingParams
from procengine.errors import ConfigError, EngineDeadError, GroupNotFoundError, StartupError
from procengine.groups import running_groups
from tests.procs.harness import (
    PATIENCE_S,
    VOCAB_SIZE,
    Served,
    as_ids,
    children_of,
    cli,
    descendants,
    has_line,
    is_running,
    key_of,
    make_model,
    num_open_fds,
    tokens_of,
    wait_until,
)

Serve = Callable[..., Served]


def expect_answers(group: Served) -> None:
    with group.client() as client:
        token_ids = client.generate(as_ids(5), SamplingParams(temperature=0, max_tokens=9)).outputs[0].token_ids
        assert token_ids == tokens_of(key_of(token_ids[0], 5), 5, 9)


def expect_clear_failure(*arguments: object, env: dict[str, str] | None = None) -> str:
    """The command ends soon, with status 1 and one line. Returns the line."""
    done = subprocess.run(
        cli(*arguments), capture_output=True, timeout=PATIENCE_S, env=os.environ | (env or {}), text=True, check=False
    )
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("procengine: error: ")
    return line


# --- where it lives


def test_the_ready_line_says_where_everything_is(serve: Serve, model: Path) -> None:
    group = serve(name="lives-here")
    run_dir = Path(os.environ["PROCENGINE_RUN_DIR"]) / "lives-here"
    assert set(group.ready) >= {"event", "name", "endpoint", "model", "pids", "num_blocks"}
    assert group.ready["name"] == "lives-here"
    assert group.ready["endpoint"] == f"ipc://{run_dir}/frontend.sock"
    assert group.ready["model"] == str(model)
    assert set(group.pids) == {"supervisor", "frontend", "output", "worker-0"}
    assert group.pids["supervisor"] == group.pid
    assert sorted(descendants(group.pid)) == sorted(set(group.pids.values()) - {group.pid})
    assert isinstance(group.ready["num_blocks"], int) and group.ready["num_blocks"] > 0
    assert group.log == "", "a good start is quiet"
    assert run_dir.stat().st_mode & 0o777 == 0o700, "others can reach its sockets"


def test_the_longest_run_directory_that_is_taken_has_room_for_every_socket(serve: Serve, short_dir: Path) -> None:
    """The first length that is refused is found by asking; the one before must work, with the longest name too."""
    length = next(
        length for length in range(30, 108) if _is_refused(short_dir / ("d" * (length - len(str(short_dir)) - 1)))
    )
    root = short_dir / ("d" * (length - 1 - len(str(short_dir)) - 1))
    group = serve(name="n" * 40, env={"PROCENGINE_RUN_DIR": str(root)})
    expect_answers(group)


def _is_refused(root: Path) -> bool:
    from procengine.paths import run_root

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROCENGINE_RUN_DIR", str(root))
        try:
            run_root()
        except ConfigError:
            return True
    return False


def test_a_deep_temporary_directory_does_not_matter(serve: Serve, short_dir: Path) -> None:
    """Sockets then go to another place; that it is found again shows that clients look there too."""
    deep = short_dir / ("t" * 120)
    deep.mkdir(exist_ok=True)
    elsewhere = {"PROCENGINE_RUN_DIR": "", "XDG_RUNTIME_DIR": str(deep), "TMPDIR": str(deep)}
    group = serve(name=f"test-{os.getpid()}", env=elsewhere)
    expect_answers(group)
    done = subprocess.run(
        cli("chat", "--group", group.ready["name"], "--max-tokens", 5, "hi"),
        capture_output=True,
        timeout=PATIENCE_S,
        env=os.environ | elsewhere,
        check=True,
    )
    assert done.stderr == b"" and len(done.stdout) > 5


def test_a_model_with_a_long_path_and_a_strange_name_gives_the_group_a_name(tmp_path: Path) -> None:
    folder = make_model(tmp_path / ("m" * 100) / ("-é ü;$(x)" + "n" * 100))
    with Served(folder, tmp_path, name=None) as group:
        expect_answers(group.wait_ready())
        assert 0 < len(group.ready["name"]) <= 40
        with Client(group.ready["name"]) as client:
            assert client.welcome.model == str(folder)


@pytest.mark.parametrize("root", ["/proc/nowhere", "/dev/null", "/dev/null/x", "/" + "x" * 90, "/tmp/" + "x" * 115])
def test_a_run_directory_that_cannot_be_used_is_named_in_one_message(model: Path, root: str) -> None:
    line = expect_clear_failure("serve", model, "--device", "mock", env={"PROCENGINE_RUN_DIR": root})
    assert "run directory" in line and root in line


@pytest.mark.parametrize("name", ["a/b", "..", "-x", "n" * 41, "a b", "é"])
def test_a_name_that_is_no_file_name_is_refused(model: Path, name: str) -> None:
    assert "name: must be" in expect_clear_failure("serve", model, "--device", "mock", f"--name={name}")


# --- who else is there


def test_a_second_group_of_the_same_name_is_refused_and_does_not_harm_the_first(serve: Serve, model: Path) -> None:
    first = serve(name="taken")
    with first.client() as client:
        stream = client.stream(as_ids(5), SamplingParams(temperature=0, max_tokens=500))
        token_ids = [*next(stream).token_ids]
        line = expect_clear_failure("serve", model, "--device", "mock", "--name", "taken")
        assert "taken" in line and "running already" in line
        with pytest.raises(StartupError, match=r"taken.*running already"):
            LLM(str(model), device="mock", name="taken")
        for delta in stream:
            token_ids += delta.token_ids
        assert token_ids == tokens_of(key_of(token_ids[0], 5), 5, 500)
    expect_answers(first)
    with Client("taken") as again:
        assert again.welcome.group == "taken"


def test_two_groups_side_by_side_are_told_apart(serve: Serve) -> None:
    with pytest.raises(GroupNotFoundError, match="no group is running"):
        Client()
    one = serve(name="one")
    with Client() as only:
        assert only.welcome.group == "one"
    two = serve(name="two", waits=False)
    two.wait_ready()
    assert [info.name for info in running_groups()] == ["one", "two"]
    with pytest.raises(GroupNotFoundError, match="one, two"):
        Client()
    with pytest.raises(GroupNotFoundError, match=r"'three'.*one, two"):
        Client("three")
    for group in (one, two):
        expect_answers(group)
        with Client(group.ready["name"]) as by_name:
            assert by_name.welcome.group == group.ready["name"]
    one.signal(signal.SIGKILL)
    one.expect_gone()
    with Client() as only:
        assert only.welcome.group == "two"
    expect_answers(two)


def test_a_group_takes_over_the_directory_of_a_killed_one_and_sweeps_the_others(serve: Serve) -> None:
    root = Path(os.environ["PROCENGINE_RUN_DIR"])
    killed = serve(name="killed")
    killed.signal(signal.SIGKILL)
    killed.expect_gone()
    shutil.copytree(root / "killed", root / "stale", ignore=shutil.ignore_patterns("*.sock"))
    (root / "no group").mkdir(exist_ok=True)
    assert (root / "killed" / "group.json").exists()
    assert running_groups() == []
    expect_answers(serve(name="killed"))
    assert not (root / "stale").exists()
    assert (root / "no group").exists(), "what is no group's is not ours to remove"
    (root / "no group").rmdir()


def test_of_two_that_start_at_once_under_one_name_one_wins(model: Path, tmp_path: Path) -> None:
    groups = [Served(model, tmp_path, name="contested") for _ in range(2)]
    try:
        wait_until(lambda: any(group.process.poll() is not None for group in groups), "one has given up", 20)
        (winner,) = (group for group in groups if group.process.poll() is None)
        expect_answers(winner.wait_ready())
        assert [group.process.returncode for group in groups if group is not winner] == [1]
    finally:
        for group in groups:
            group.stop()


# --- what goes wrong


def test_a_worker_that_cannot_start_is_reported_with_its_reason(serve: Serve, model: Path) -> None:
    """No CUDA here. If there is, the weights are missing, and that is the reason."""
    group = serve("--device", "cuda", waits=False)
    event = group.next_event()
    assert event["event"] == "failed"
    assert event["error"].startswith("worker-0 (pid ")
    assert "exited with status 1: " in event["error"].splitlines()[0]
    assert "last log lines" in event["error"]
    assert group.finish() == 1
    assert has_line(group.log, "procengine: worker-0", "exited with status 1")


def test_broken_weights_are_reported_through_python(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(model, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    children = descendants(os.getpid())
    with pytest.raises(StartupError, match=r"worker-0 .*exited with status 1: .*model\.safetensors"):
        LLM(str(folder), device="cpu", dtype="float32")
    assert descendants(os.getpid()) == children
    assert "Traceback" in capfd.readouterr().err, "the log is on our stderr"


def test_a_start_that_takes_too_long_is_given_up(serve: Serve) -> None:
    group = serve("--start-timeout", 0.1, waits=False)
    event = group.next_event()
    assert event["event"] == "failed"
    assert "worker-0" in event["error"] and "0.1 s" in event["error"]
    assert group.finish(5) == 1
    assert not descendants(group.pid)


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--workers", 0, "workers: must be between 1 and 64, got 0"),
        ("--async-depth", 4, "async_depth"),
        ("--max-model-len", 4096, "max_model_len: 4096"),
        ("--max-num-batched-tokens", 8, "max_num_batched_tokens"),
        ("--start-timeout", "nan", "start_timeout"),
        ("--mock-step-ms", -1, "mock_step_ms"),
    ],
)
def test_options_out_of_range_are_refused_before_anything_starts(
    model: Path, option: str, value: object, named: str
) -> None:
    assert named in expect_clear_failure("serve", model, "--device", "mock", option, value)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no-such-model" in expect_clear_failure("serve", "no-such-model", "--device", "mock")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in expect_clear_failure("generate", empty, "hi", "--device", "mock")


# --- in this very process


def test_llm_in_process_answers_and_leaves_nothing(model: Path) -> None:
    """Warnings are errors here: what it does not close would be reported as it is collected."""
    children, num_fds = descendants(os.getpid()), num_open_fds(os.getpid())
    with LLM(str(model), device="mock", max_num_seqs=8) as llm, LLM(str(model), device="mock") as other:
        assert llm.config.group.name != other.config.group.name
        results = llm.generate([as_ids(3), as_ids(9)], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        assert [r.outputs[0].token_ids for r in results] == [tokens_of(0, 3, 5), tokens_of(1, 9, 5)]
        (chat,) = llm.chat(
            [{"role": "user", "content": "hi"}], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False
        )
        assert len(chat.outputs[0].token_ids) == 5
        assert [len(v.embedding) for v in llm.embed(["a", "b"], use_tqdm=False)] == [8, 8]
        assert other.generate("x", use_tqdm=False)[0].outputs[0].token_ids == tokens_of(0, 1, 16)
        assert llm.generate([], use_tqdm=False) == []
        with pytest.raises(ValueError, match=str(VOCAB_SIZE)):
            llm.generate([[VOCAB_SIZE]], use_tqdm=False)
        assert llm.stats()["output_tokens"] >= 15
    llm.close()  # twice is fine
    gc.collect()
    assert descendants(os.getpid()) == children
    assert num_open_fds(os.getpid()) == num_fds


def test_llm_hears_of_a_death_and_ends_with_its_last_reference(model: Path) -> None:
    others = set(descendants(os.getpid()))  # groups of other tests
    llm = LLM(str(model), device="mock", mock_step_ms=5, max_restarts=0)
    pids = [pid for pid in descendants(os.getpid()) if pid not in others]
    with Client(llm.config.group.name) as client:
        stream = client.stream([70], SamplingParams(max_tokens=1000))
        next(stream)
        os.kill(children_of(pids[0])[0], signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"worker-0|is gone"):
            llm.generate([70], SamplingParams(max_tokens=1000), use_tqdm=False)
        with pytest.raises(EngineDeadError, match="worker-0"):
            list(stream)
    del llm
    gc.collect()
    assert not any(map(is_running, pids)), "it was waited for"


def test_options_of_llm_are_checked_by_name_and_type(model: Path) -> None:
    with pytest.raises(ConfigError, match="max_seqs"):
        LLM(str(model), device="mock", max_seqs=8)
    with pytest.raises(ConfigError, match=r"int.*max_num_seqs"):
        LLM(str(model), device="mock", max_num_seqs="8")
