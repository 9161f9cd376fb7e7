"""A worker dies and is restarted in place: every stream goes on, with every token once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from procengine.groups import find_group
from procengine.messages import Delta, Embedding
from tests.procs.harness import Served, as_ids, is_running, key_of, num_open_fds, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body

NUM_REQUESTS, NUM_TOKENS = 12, 100
SLOW = ("--mock-step-ms", "5")
POISON = 63  # the mock device makes up larger tokens only

# Run by every Python of the group: a worker dies, or sleeps, when a step holds the poisoned token.
KILLER = f"""
import os, sys
if any("procengine.procs.worker" in word for word in sys.orig_argv):
    from procengine import mock_runner
    from procengine.step_payload import STEP_SECTIONS, cut_sections
    run = mock_runner.MockRunner.run
    def run_or_die(self, header, payload):
        if {POISON} in cut_sections(STEP_SECTIONS, header.sizes, payload)["input_ids"]:
            os._exit(9)
        return run(self, header, payload)
    mock_runner.MockRunner.run = run_or_die
"""
SLEEPER = KILLER.replace("run_or_die", "run_or_sleep").replace("os._exit(9)", "__import__('time').sleep(3600)")


def submit_load(raw: RawClient, prefix: str = "r", count: int = NUM_REQUESTS, **params: object) -> list[str]:
    names = [f"{prefix}{number}" for number in range(count)]
    for number, name in enumerate(names):
        raw.submit(name, body(as_ids(3 + number, number), max_tokens=NUM_TOKENS, **params))
    return names


def wait_tokens(raw: RawClient, names: list[str], count: int) -> None:
    wait_heard(raw, lambda: all(len(raw.token_ids(name)) >= count for name in names), f"{count} tokens each")


def wait_heard(raw: RawClient, condition: Callable[[], bool], what: str) -> None:
    """Take in messages until the condition holds."""

    def holds() -> bool:
        raw.receive(0.01)
        return condition()

    wait_until(holds, what)


def expect_exact(raw: RawClient, names: list[str], num_tokens: int = NUM_TOKENS) -> None:
    """Each ended once, with its own tokens."""
    raw.wait_ends(*names)
    for name in names:
        end = raw.wait_end(name)
        assert isinstance(end, Delta) and end.finish_reason == "length", end
        token_ids, num_prompt_tokens = raw.token_ids(name), len(raw.deltas(name)[0].prompt_token_ids or ())
        assert token_ids == tokens_of(key_of(token_ids[0], num_prompt_tokens), num_prompt_tokens, num_tokens)
        assert raw.num_ends(name) == 1


def kill(group: Served, role: str = "worker-0", number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(current_pids(group)[role], number)


def current_pids(group: Served) -> dict[str, int]:
    return find_group(group.name).pids


def wait_restarted(group: Served, before: int, role: str = "worker-0") -> None:
    wait_until(lambda: current_pids(group)[role] != before, f"{role} has a new process")


@pytest.mark.parametrize(
    "options",
    [("--async-depth", "1"), ("--async-depth", "2"), ("--async-depth", "3", "--decode-steps", "4"), ("--workers", "2")],
    ids=" ".join,
)
def test_streams_go_on_token_by_token(serve: Callable[..., Served], options: tuple[str, ...]) -> None:
    group = serve(*SLOW, *options)
    old = dict(group.pids)
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 10)
        kill(group)
        expect_exact(raw, names)
        wait_restarted(group, old["worker-0"])
        expect_exact(raw, submit_load(raw, "again"))
    assert not is_running(old["worker-0"])
    assert "its requests go on" in group.log


def test_survivors_take_over_at_once(serve: Callable[..., Served]) -> None:
    """Nothing waits for the restart, which comes after a pause because it is the second one."""
    group = serve(*SLOW, "--workers", "2")
    with RawClient(group.endpoint) as raw:
        kill(group)
        wait_restarted(group, group.pids["worker-0"])
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        second = current_pids(group)["worker-0"]
        kill(group)
        wait_tokens(raw, names, 30)
        assert current_pids(group)["worker-0"] == second, "the streams moved on before there was a new worker"
        expect_exact(raw, names)


def test_logprobs_choices_and_embeddings_survive(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--max-num-seqs", "8")
    with RawClient(group.endpoint) as raw:
        raw.submit("n", body(as_ids(5), max_tokens=NUM_TOKENS, n=4, logprobs=2, seed=1))
        embedded = [f"e{number}" for number in range(20)]
        for name in embedded:
            raw.submit(name, {"prompt_token_ids": as_ids(4)}, "embed")
        names = submit_load(raw)
        wait_heard(raw, lambda: len(raw.token_ids("n")) > 40, "tokens of the choices")
        kill(group)
        expect_exact(raw, names)
        raw.wait_ends(*embedded)
        assert all(isinstance(end := raw.wait_end(name), Embedding) and len(end.data) for name in embedded)
        wait_heard(raw, lambda: raw.num_ends("n") == 4, "the end of each choice")
        for deltas in raw.deltas_by_index("n").values():
            token_ids = [token for delta in deltas for token in delta.token_ids]
            assert token_ids == tokens_of(key_of(token_ids[0], 5), 5, NUM_TOKENS)
            shown = [entry.token_ids[0] for delta in deltas for entry in delta.logprobs or ()]
            assert shown == token_ids


def test_prompt_logprobs_survive_a_death_in_the_middle_of_the_prompt(serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", "50", "--max-num-batched-tokens", "64", "--max-num-seqs", "64")
    prompt = as_ids(600)
    with RawClient(group.endpoint) as raw:
        raw.submit("r", body(prompt, max_tokens=3, prompt_logprobs=0))
        wait_until(lambda: raw.stats()["num_steps"] >= 3, "some chunks are computed")
        kill(group)
        expect_exact(raw, ["r"], 3)
        logprobs = raw.deltas("r")[0].prompt_logprobs
        assert logprobs is not None and logprobs[0] is None
        assert [entry.token_ids[0] for entry in logprobs[1:] if entry is not None] == prompt[1:]


def test_idle_worker_is_restarted_too_and_nothing_leaks(serve: Callable[..., Served]) -> None:
    group = serve("--restart-window", "0.1")
    with RawClient(group.endpoint) as raw:
        expect_exact(raw, submit_load(raw, "first"))
        fds: dict[str, int] = {}
        for round_ in range(4):
            before = current_pids(group)["worker-0"]
            kill(group)
            wait_restarted(group, before)
            expect_exact(raw, submit_load(raw, f"round {round_} "))
            roles = ("supervisor", "frontend", "output")
            fds = fds or {role: num_open_fds(group.pids[role]) for role in roles}
        for role, count in fds.items():
            wait_until(lambda role=role, count=count: num_open_fds(group.pids[role]) <= count, f"{role} leaks")  # type: ignore[misc]


def test_a_death_while_draining_loses_nothing(serve: Callable[..., Served]) -> None:
    group = serve(*SLOW, "--drain-timeout", "30")
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        group.signal(signal.SIGTERM)
        wait_until(lambda: "draining" in refusal(raw) or "shutting down" in refusal(raw), "it is draining")
        kill(group)
        expect_exact(raw, names)
    assert group.finish(30) == 0


def refusal(raw: RawClient) -> str:
    name = f"probe {len(raw.messages)}"
    raw.submit(name, body(as_ids(2), max_tokens=1))
    return str(raw.wait_end(name))


def test_too_many_deaths_are_the_end_and_everybody_hears_why(serve: Callable[..., Served]) -> None:
    group = serve("--mock-step-ms", "50", "--max-restarts", "2")
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        for _ in range(3):
            before = current_pids(group)["worker-0"]
            kill(group)
            if _ < 2:
                wait_restarted(group, before)
        raw.wait_for(lambda m: "worker-0" in getattr(m, "message", ""), 10)
        assert names
    assert group.finish() == 1
    assert "worker-0 died 3 times within 60 s (max_restarts is 2)" in group.log


def injected(folder: Path, program: str) -> dict[str, str]:
    """An environment in which every Python process runs that program first."""
    (folder / "sitecustomize.py").write_text(program)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_a_request_that_kills_its_workers_ends_and_its_batch_mates_live(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    group = serve(*SLOW, "--restart-window", "2", env=injected(tmp_path, KILLER))
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        raw.submit("poison", body([POISON, 100, 101], max_tokens=5))
        end = raw.wait_end("poison", 30)
        assert isinstance(end, Delta) and end.finish_reason == "error"
        assert end.error == "the worker died 3 times while this request was running"
        expect_exact(raw, names)
        assert raw.num_ends("poison") == 1
        expect_exact(raw, submit_load(raw, "again"))


@pytest.mark.parametrize("hang", ["stopped", "asleep in a step"])
def test_a_worker_that_hangs_is_replaced(serve: Callable[..., Served], tmp_path: Path, hang: str) -> None:
    env = injected(tmp_path, SLEEPER) if hang != "stopped" else {}
    group = serve(*SLOW, "--step-timeout", "1", env=env)
    old = group.pids["worker-0"]
    with RawClient(group.endpoint) as raw:
        names = submit_load(raw)
        wait_tokens(raw, names, 5)
        if hang == "stopped":
            kill(group, number=signal.SIGSTOP)
        else:
            raw.submit("sleeper", body([POISON, 100, 101], max_tokens=5))
            names.append("sleeper")
        wait_restarted(group, old)
        if hang == "stopped":
            expect_exact(raw, names)
        assert f"worker-0 (pid {old}) has made no progress for 1 s" in group.log
        assert hang == "stopped" or "run_or_sleep" in group.log, "where it hung is in the log"


def test_a_slow_worker_is_not_taken_for_hung(serve: Callable[..., Served]) -> None:
    """Steps that take almost as long as is allowed, and a pause of idleness longer than that."""
    group = serve("--mock-step-ms", "300", "--step-timeout", "1")
    with RawClient(group.endpoint) as raw:
        for round_ in range(2):
            names = [f"{round_}-{number}" for number in range(3)]
            for name in names:
                raw.submit(name, body(as_ids(3), max_tokens=6))
            expect_exact(raw, names, 6)
            raw.receive_for(1.5)
    assert current_pids(group) == group.pids
