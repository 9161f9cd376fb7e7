"""What the output process was told is kept as long as another one may have to be told, within bounds."""

from __future__ import annotations

import numpy as np

from procengine.messages import Admitted, Finish, Register, encode
from procengine.output_ledger import OutputLedger


def register(key: int, num_logprobs: int = -1) -> Register:
    return Register(key, b"c", f"r{key}", 0, "generate", [1, 2], 9, num_logprobs=num_logprobs)


def tokens(count: int, value: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.full(count, value, np.int32)


def ledger_of(*keys: int, max_tokens: int = 1000, num_delivered: int = 2) -> OutputLedger:
    ledger = OutputLedger(max_tokens, num_delivered)
    for key in keys:
        ledger.register(register(key))
    return ledger


def ended_keys(ledger: OutputLedger) -> list[int]:
    return [key for key, _ in ledger.ended()]


def test_running_requests_are_kept_with_their_registers() -> None:
    ledger = ledger_of(3, 4)
    assert ledger.registered(3) == encode(register(3))
    assert [(key, entry.num_prompt_tokens) for key, entry in ledger.running()] == [(3, 2), (4, 2)]
    assert ended_keys(ledger) == []


def test_ended_ones_are_kept_until_they_are_delivered_and_the_newest_of_those_too() -> None:
    ledger = ledger_of(*range(5))
    for key in range(5):
        ledger.end(key, tokens(3))
    assert (ended_keys(ledger), ledger.num_undelivered) == ([0, 1, 2, 3, 4], 5)
    ledger.deliver([1, 3])
    assert (sorted(ended_keys(ledger)), ledger.num_undelivered) == ([0, 1, 2, 3, 4], 3)
    ledger.deliver([4, 99])
    assert (sorted(ended_keys(ledger)), ledger.num_undelivered) == ([0, 2, 3, 4], 2)
    assert ledger.ended_tokens(1) is None


def test_an_end_may_be_delivered_before_the_frontend_sees_it() -> None:
    ledger = ledger_of(0)
    ledger.deliver([0])
    assert [key for key, _ in ledger.running()] == [0]
    ledger.end(0, tokens(3))
    assert (ended_keys(ledger), ledger.num_undelivered) == ([0], 0)


def test_no_more_than_so_many_tokens_delivered_ones_go_first() -> None:
    ledger = ledger_of(*range(5), max_tokens=10, num_delivered=9)
    for key in range(3):
        ledger.end(key, tokens(3, key))
    ledger.deliver([1])
    ledger.end(3, tokens(3))
    assert ended_keys(ledger) == [0, 2, 3]
    ledger.end(4, tokens(4))
    assert ended_keys(ledger) == [2, 3, 4]
    found = ledger.ended_tokens(2)
    assert found is not None and found.tolist() == [2, 2, 2]


def test_one_with_too_many_tokens_is_not_kept() -> None:
    ledger = ledger_of(0, 1, max_tokens=3)
    ledger.end(0, tokens(4))
    ledger.end(1, tokens(3))
    assert ended_keys(ledger) == [1]


def test_admissions_are_told_again_in_one_message() -> None:
    ledger = ledger_of(0, 1)
    ledger.admit(Admitted([0, 1], [16, 0], 5, (0, 0)))
    ledger.admit(Admitted([0], [32], 7, (1,)))  # it was preempted in between
    ledger.admit(Admitted([0], [32], 9, (1,)))  # and its worker died
    entries = dict(ledger.running())
    assert entries[0].admitted(0) == Admitted([0], [16], 5, (1,))
    assert entries[1].admitted(1) == Admitted([1], [0], 5, (0,))
    ledger.register(register(2))
    assert dict(ledger.running())[2].admitted(2) is None


def test_ends_from_outside_and_wishes_are_remembered() -> None:
    ledger = ledger_of(0)
    assert not ledger.wants_logprobs
    ledger.register(register(1, num_logprobs=0))
    ledger.end(1, tokens(3), Finish(1, "abort"))
    assert ledger.wants_logprobs
    assert [entry.finish for _, entry in ledger.ended()] == [Finish(1, "abort")]


def test_nothing_of_a_condemned_request_is_told_but_whose_it_was_and_its_end() -> None:
    ledger = ledger_of(0, 1, max_tokens=10)
    ledger.register(
        Register(2, b"c", "r2", 3, "generate", [1, 2], 9, stop=("x",), echo=True, num_logprobs=1, output_kind="final")
    )
    ledger.end(2, tokens(6))
    finish = Finish(2, "error", "why")
    ledger.condemn(finish)
    ((key, entry),) = ledger.ended()
    assert (key, entry.finish, entry.is_condemned, entry.token_ids.size, entry.wants_logprobs) == (
        2,
        finish,
        True,
        0,
        False,
    )
    bare = Register(2, b"c", "r2", 3, "generate", [], 9, detokenize=False, output_kind="final")
    assert entry.registered == encode(bare)
    ledger.end(0, tokens(10))
    assert ended_keys(ledger) == [2, 0], "its tokens do not count any more"
    ledger.condemn(Finish(77, "error", "of a request that is not kept"))
