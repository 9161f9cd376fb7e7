"""A request that may have killed workers runs alone, until it is past where they died."""

from __future__ import annotations

import numpy as np

from procengine.request import Request, RowSampling
from procengine.scheduler.lone_suspects import LoneSuspects
from procengine.scheduler.slot_table import SlotTable


def request(key: int, num_worker_deaths: int = 0, death_position: int = 0) -> Request:
    return Request(
        key=key,
        client=b"",
        request_id=str(key),
        prompt_token_ids=np.arange(10, dtype=np.int32),
        end_position=32,
        sampling=RowSampling(seed=0),
        num_worker_deaths=num_worker_deaths,
        death_position=death_position,
    )


class Worker:
    """A table of four slots and who may have one."""

    def __init__(self) -> None:
        self.table = SlotTable(4, 64, 16)
        self.suspects = LoneSuspects()

    def admit(self, newcomer: Request) -> bool:
        if not self.suspects.let_in(newcomer, self.table):
            return False
        self.table.place(newcomer)
        self.suspects.enter(newcomer)
        return True

    def append(self, resident: Request, num_tokens: int) -> None:
        for _ in range(num_tokens):
            slots = np.array([resident.slot])
            self.table.append_tokens(slots, self.table.num_tokens[slots], np.zeros(1, np.int32))


def test_others_run_side_by_side_after_one_death() -> None:
    worker = Worker()
    assert [worker.admit(request(key, num_worker_deaths=1, death_position=20)) for key in range(4)] == [True] * 4


def test_a_suspect_waits_until_nobody_else_runs() -> None:
    worker, neighbour, suspect = Worker(), request(1), request(2, num_worker_deaths=2, death_position=12)
    assert worker.admit(neighbour)
    assert not worker.admit(suspect)
    worker.table.vacate(neighbour)
    assert worker.admit(suspect)


def test_nobody_joins_a_suspect_before_it_is_past_its_place() -> None:
    worker, suspect = Worker(), request(1, num_worker_deaths=2, death_position=12)
    assert worker.admit(suspect)
    worker.append(suspect, 1)
    assert not worker.admit(request(2)) and suspect.is_suspect
    worker.append(suspect, 1)
    assert worker.admit(request(2)) and not suspect.is_suspect


def test_a_suspect_that_has_ended_or_was_preempted_keeps_nobody_out() -> None:
    worker, suspect = Worker(), request(1, num_worker_deaths=2, death_position=12)
    assert worker.admit(suspect)
    worker.table.vacate(suspect)
    assert worker.admit(request(2))
