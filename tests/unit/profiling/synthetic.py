"""Span tables made by hand, and made up at random by a frontend, a worker and an output process of numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from procengine.profiling.records import COLUMNS, RecordKind, id_words
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.span_ring import RECORD_WORDS

__all__ = ["Recorder", "random_run"]

MAX_HOP_NS = 200


@dataclass
class Recorder:
    """Collects records; columns that are not named are 0."""

    records: list[list[int]] = field(default_factory=list)

    def add(self, kind: RecordKind, key: int, **values: int) -> None:
        unknown = set(values) - set(COLUMNS[kind])
        assert not unknown, unknown
        row = [int(kind), key, *(values.get(name, 0) for name in COLUMNS[kind])]
        self.records.append(row + [0] * (RECORD_WORDS - len(row)))

    def accept(self, key: int, request_id: str, **values: int) -> None:
        words = {f"id_word_{at}": word for at, word in enumerate(id_words(request_id))}
        self.add(RecordKind.REQUEST_ACCEPTED, key, **values, **words)

    def one_pass(
        self,
        step_id: int,
        times: list[int],
        *,
        rank: int = 0,
        epoch: int = 0,
        micro_step: int = 0,
        num_rows: int = 1,
        num_tokens: int | None = None,
        num_running: int = 1,
        num_waiting: int = 0,
        num_free_blocks: int = 0,
    ) -> None:
        """All five records of a pass, from 5 + 6 + 5 + 3 + 3 times; no STEP_SENT for passes behind the first."""
        at = {"rank": rank, "epoch": epoch}
        names = {
            kind: [name for name in COLUMNS[kind] if name.endswith("_ns")]
            for kind in (
                RecordKind.STEP_SENT,
                RecordKind.STEP_RUN,
                RecordKind.RESULT_SENT,
                RecordKind.RESULT_APPLIED,
                RecordKind.RESULT_TAKEN,
            )
        }
        assert len(times) == sum(map(len, names.values()))
        left = iter(times)
        for kind, columns in names.items():
            values = at | {name: next(left) for name in columns}
            if kind is RecordKind.STEP_SENT:
                if micro_step == 0:
                    gauges = {"num_running": num_running, "num_waiting": num_waiting, "num_in_flight": 1}
                    self.add(
                        kind,
                        step_id,
                        **values,
                        num_rows=num_rows,
                        num_tokens=num_rows,
                        num_decode_rows=num_rows,
                        num_free_blocks=num_free_blocks,
                        **gauges,
                    )
                continue
            counts = {} if kind is RecordKind.RESULT_SENT else {"num_rows": num_rows}
            if kind is RecordKind.STEP_RUN:
                counts["num_tokens"] = num_rows if num_tokens is None else num_tokens
            self.add(kind, step_id, **values, micro_step=micro_step, **counts)

    def tables(self, num_lost: int = 0) -> SpanTables:
        return SpanTables.of([np.array(self.records, np.int64).reshape(-1, RECORD_WORDS)], num_lost)


class _Run:
    """A frontend and an output process of one thread each, workers of three, and a clock for each thread."""

    def __init__(self, seed: int, num_workers: int) -> None:
        self.draw = random.Random(seed)
        self.recorder = Recorder()
        start = self.draw.randint(10**6, 10**9)
        self.frontend = self.output = start
        self.receiver, self.device, self.sender = ([start] * num_workers for _ in range(3))
        self.under_way: list[list[_Waiting]] = [[] for _ in range(num_workers)]
        self.num_requests = self.num_flushes = 0

    def after(self, *times: int, most: int = 100) -> int:
        return max(times) + self.draw.randint(0, most)

    def chain(self, first: int, count: int, most: int = 100) -> list[int]:
        """`first` and `count` times behind it."""
        times = [first]
        for _ in range(count):
            times.append(self.after(times[-1], most=most))
        return times

    def admit(self, rank: int, step_id: int) -> None:
        """A request comes and finds nothing running."""
        received = self.after(self.frontend, most=3000)
        prepared = self.after(received, most=500)
        self.frontend = accepted = self.after(prepared, most=20)
        key, self.num_requests = self.num_requests, self.num_requests + 1
        times = {"client_sent_ns": received - 30, "received_ns": received, "prepared_ns": prepared}
        self.recorder.accept(key, f"request-{key}", **times, accepted_ns=accepted, rank=rank)
        self.recorder.add(RecordKind.REQUEST_ADMITTED, key, rank=rank, step_id=step_id, sent_ns=accepted)

    def step(self, rank: int, step_id: int) -> None:
        planned = self.chain(self.after(self.frontend), 4)
        self.frontend = planned[-1]
        # Who sends may read the clock late.
        received = self.after(max(planned[-1] - 5, planned[-2]), self.receiver[rank], most=MAX_HOP_NS)
        self.receiver[rank] = decoded = self.after(received, most=10)
        for micro_step in range(self.draw.randint(1, 2)):
            run = [received, decoded, *self.chain(self.after(decoded, self.device[rank]), 3, most=300)]
            self.device[rank] = received = decoded = run[-1]
            back = self.chain(self.after(run[-1], self.sender[rank]), 4)
            self.sender[rank] = back[-1]
            taken = self.chain(self.after(back[-1], self.output, most=MAX_HOP_NS), 2)
            self.output = taken[-1]
            if self.draw.random() < 0.7:
                self.flush()
            self.under_way[rank].append(_Waiting(step_id, micro_step, planned, run, back, taken))

    def flush(self) -> None:
        times = self.chain(self.output, 2)
        self.output = times[-1]
        names = ("started_ns", "detokenized_ns", "delivered_ns")
        self.recorder.add(RecordKind.FLUSHED, self.num_flushes, **dict(zip(names, times, strict=True)))
        self.num_flushes += 1

    def apply(self, rank: int, keeps: int) -> None:
        """Take results in until `keeps` are left on their way."""
        while len(self.under_way[rank]) > keeps:
            one = self.under_way[rank].pop(0)
            applied = self.chain(self.after(one.back[3], self.frontend, most=MAX_HOP_NS), 2)
            self.frontend = applied[-1]
            times = [*one.planned, *one.run, *one.back, *applied, *one.taken]
            self.recorder.one_pass(one.step_id, times, rank=rank, micro_step=one.micro_step)


class _Waiting(NamedTuple):
    step_id: int
    micro_step: int
    planned: list[int]
    run: list[int]
    back: list[int]
    taken: list[int]


def random_run(seed: int, num_steps: int = 12, num_workers: int = 2) -> SpanTables:
    """What a group might write: steps of one or two passes, planned before or after results are back, and requests
    that come when nothing runs. Records of passes are in no order."""
    run = _Run(seed, num_workers)
    for step_id in range(num_steps):
        for rank in range(num_workers):
            run.apply(rank, keeps=run.draw.randint(0, 2))
            if run.draw.random() < 0.3:
                run.apply(rank, keeps=0)
                run.admit(rank, step_id)
            run.step(rank, step_id)
    for rank in range(num_workers):
        run.apply(rank, keeps=0)
    records = run.recorder.records
    is_ordered = [row[0] == RecordKind.FLUSHED for row in records]
    shuffled = [row for row, stays in zip(records, is_ordered, strict=True) if not stays]
    run.draw.shuffle(shuffled)
    return Recorder(shuffled + [row for row, stays in zip(records, is_ordered, strict=True) if stays]).tables()
