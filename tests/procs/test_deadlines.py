"""How long a request may take, and how long it may wait: `timeout_s`, --request-timeout, --queue-timeout."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from procengine import SamplingParams
from procengine.errors import OverloadedError, RequestFailedError
from procengine.messages import Delta
from tests.procs.canary import expect_idle
from tests.procs.harness import Served, as_ids, key_of, make_model, tokens_of, wait_until
from tests.procs.raw_client import RawClient, body

LONG = SamplingParams(temperature=0, max_tokens=2000)  # 4 s and more


@pytest.fixture(scope="module")
def group(serve_module: Callable[..., Served]) -> Served:
    """Two requests at a time, 2 ms a step."""
    return serve_module("--max-num-seqs", 2, "--mock-step-ms", 2)


@pytest.fixture(scope="module")
def impatient(serve_module: Callable[..., Served]) -> Served:
    """One request at a time; the others wait half a second for their first step, and run for three."""
    return serve_module(
        *("--max-num-seqs", 1, "--mock-step-ms", 2, "--queue-timeout", 0.5, "--request-timeout", 3), name="impatient"
    )


def expect_timeout(raw: RawClient, name: str, seconds: float) -> list[int]:
    """One end, "abort", that names the field and the limit, behind right tokens, which are returned."""
    end = raw.wait_end(name, 30)
    assert isinstance(end, Delta) and end.finish_reason == "abort", end
    assert end.error == f"the request took too long, the limit (timeout_s) is {seconds:g} s"
    token_ids = raw.token_ids(name)
    assert token_ids == tokens_of(key_of(token_ids[0], 3), 3, len(token_ids)) if token_ids else True
    return token_ids


def test_a_request_ends_after_its_timeout_with_what_it_has(group: Served) -> None:
    with RawClient(group.endpoint) as raw:
        began_s = time.monotonic()
        raw.submit("short", body(as_ids(3), max_tokens=2000) | {"timeout_s": 0.3})
        raw.submit("other", body(as_ids(3, 7), max_tokens=300))
        token_ids = expect_timeout(raw, "short", 0.3)
        assert time.monotonic() - began_s >= 0.3
        assert 0 < len(token_ids) < 2000
        raw.wait_end("other", 30)
        assert len(raw.token_ids("other")) == 300
        assert raw.num_ends("short") == 1


def test_waiting_counts_and_all_choices_end(group: Served) -> None:
    with RawClient(group.endpoint) as raw:
        raw.submit("n", body(as_ids(3), max_tokens=2000, n=4, seed=1) | {"timeout_s": 0.3})
        wait_until(lambda: raw.num_ends("n") == 4, "each choice ends", 30)
        ends = [delta for delta in raw.deltas("n") if delta.finish_reason]
        assert {(end.finish_reason, end.error) for end in ends} == {
            ("abort", "the request took too long, the limit (timeout_s) is 0.3 s")
        }
        assert sorted(end.index for end in ends) == [0, 1, 2, 3]
    expect_idle(group)


def test_clients_see_the_reason_and_keep_the_text(group: Served) -> None:
    with group.client() as client:
        output = client.generate(as_ids(3), LONG, timeout_s=0.3).outputs[0]
        assert output.finish_reason == "abort" and output.token_ids and output.text
        assert output.error is not None and "timeout_s" in output.error
        last = list(client.stream(as_ids(3), LONG, timeout_s=0.3))[-1]
        assert last.finish_reason == "abort" and last.error == output.error
        with group.paused("worker-0"), pytest.raises(RequestFailedError, match="timeout_s"):
            client.embed("never computed", timeout_s=0.2)
        assert (
            client.generate(as_ids(3), SamplingParams(temperature=0, max_tokens=4), timeout_s=60).outputs[0].error
            is None
        )


def test_time_spent_in_the_tokenizer_counts(short_dir: Path, tmp_path: Path) -> None:
    """It works on one batch at a time; nobody waits for it longer than asked."""
    model = make_model(short_dir / "long", max_position_embeddings=1 << 20)  # else the text is refused by its length
    with Served(model, tmp_path) as group, RawClient(group.wait_ready().endpoint) as raw:
        raw.submit("busy", body("a" * 1_500_000))
        raw.submit("waiting", {"prompt": "abc", "timeout_s": 0.001})
        raw.submit("patient", {"prompt": "abc", "timeout_s": 60})
        answer = raw.rejection("waiting", 30)
        assert (answer.code, "(timeout_s) is 0.001 s" in answer.message) == ("overloaded", True)
        raw.submit("waiting", {"prompt": "abc"})  # the name is free, also while the tokenizer still has its text
        raw.wait_ends("busy", "patient")
        wait_until(lambda: raw.num_ends("waiting") == 2, "the second one of that name ends", 30)
        assert raw.num_ends("patient") == 1
        expect_idle(group)


def test_the_group_has_a_default_and_a_request_may_differ(impatient: Served) -> None:
    with RawClient(impatient.endpoint) as raw:
        raw.submit("default", body(as_ids(3), max_tokens=2000))
        assert len(expect_timeout(raw, "default", 3)) > 100
        raw.submit("own", body(as_ids(3), max_tokens=2000) | {"timeout_s": 3.7})
        assert len(expect_timeout(raw, "own", 3.7)) > 100


def test_one_that_waits_too_long_for_its_first_step_is_refused(impatient: Served) -> None:
    with RawClient(impatient.endpoint) as raw, impatient.client() as client:
        raw.submit("running", body(as_ids(3), max_tokens=600))  # 1.2 s and more
        raw.wait_for(lambda m: isinstance(m, Delta))
        raw.submit("waiting", body(as_ids(3), max_tokens=4, n=2, seed=1))
        answer = raw.rejection("waiting", 30)
        assert answer.code == "overloaded"
        assert answer.message == "the request had no first step in time, the limit (queue_timeout) is 0.5 s"
        assert 0 < answer.retry_after_s <= 60
        with pytest.raises(OverloadedError, match="queue_timeout") as caught:
            client.generate(as_ids(3))
        assert 0 < caught.value.retry_after_s <= 60
        raw.wait_end("running", 30)
        assert len(raw.token_ids("running")) == 600, "it had begun in time"
        raw.submit("waiting", body(as_ids(3), max_tokens=4))
        wait_until(lambda: raw.num_ends("waiting") == 2, "the name is free again", 30)
    expect_idle(impatient)


def test_deadlines_of_what_has_ended_wake_nobody(serve: Callable[..., Served]) -> None:
    group = serve("--request-timeout", 1.2, "--queue-timeout", 1)
    with group.client() as client:
        for _ in range(3):
            client.generate(as_ids(3))
        before = num_switches(group.pids["frontend"])
        time.sleep(1.5)  # the deadlines pass
        assert num_switches(group.pids["frontend"]) - before <= 1


def num_switches(pid: int) -> int:
    """How often a process' first thread went to sleep so far."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))


@pytest.mark.parametrize("value", [0, -1, 86_401, float("nan"), float("inf"), "5", True])
@pytest.mark.parametrize("workflow", ["generate", "embed"])
def test_a_timeout_out_of_range_is_refused(group: Served, value: object, workflow: str) -> None:
    with RawClient(group.endpoint) as raw:
        raw.submit("bad", {"prompt": "abc", "timeout_s": value}, workflow)
        answer = raw.rejection("bad")
        assert answer.code == "invalid_request" and answer.message.startswith("timeout_s: "), answer
