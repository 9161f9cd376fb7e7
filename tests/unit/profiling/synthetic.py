"""Span tables made by hand, and made up at random by a frontend, a worker and an output process of numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from procengine.profiling.records import COLUMNS, RecordKind, id_words
from procengine.profiling.snapshot import SpanTables
from procengine.profiling.span_ring import RECORD_WORDS

__all__ = ["Recorder", "random_run"]

MIN_HOP_NS, MAX_HOP_NS = 10, 200


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
            self.add(kind, step_id, **values, micro_step=micro_step, **counts)

    def tables(self, num_lost: int = 0) -> SpanTables:
        return SpanTables.of([np.array(self.records, np.int64).reshape(-1, RECORD_WORDS)], num_lost)


def random_run(seed: int, num_steps: int = 12, num_workers: int = 2) -> SpanTables:
    """What a group with some workers might write: steps of one or two passes, at depth one or two, requests that come
    and go, records in an order that no process would mind. All times are those of some possible run.
    """
    draw = random.Random(seed)
    recorder, clock = Recorder(), draw.randint(10**6, 10**9)
    key = 0
    for rank in range(num_workers):
        now = clock
        worker_free = sender_free = frontend_free = output_free = now
        for step_id in range(num_steps):

            def after(*times: int, most: int = 100) -> int:
                return max(times) + draw.randint(0, most)

            if draw.random() < 0.3:  # a request comes, and finds nothing running
                received = after(frontend_free, most=3000)
                recorder.accept(
                    key,
                    f"request-{key}",
                    client_sent_ns=max(received - draw.randint(0, 100), 1),
                    received_ns=received,
                    prepared_ns=(prepared := received + draw.randint(0, 500)),
                    accepted_ns=(accepted := prepared + draw.randint(0, 20)),
                    rank=rank,
                )
                plan = after(accepted)
                recorder.add(RecordKind.REQUEST_ADMITTED, key, rank=rank, step_id=step_id, sent_ns=plan)
                key += 1
            else:
                plan = after(frontend_free)
            sent_times = [plan]
            for _ in range(4):
                sent_times.append(after(sent_times[-1]))
            received = sent_times[-1] + draw.randint(-5, MAX_HOP_NS)  # who sends may read the clock late
            received = max(received, sent_times[-2])
            decoded = after(received, most=10)
            num_passes, applied = draw.randint(1, 2), [0]
            for micro_step in range(num_passes):
                started = after(decoded, worker_free)
                run = [received, decoded, started]
                for _ in range(3):
                    run.append(after(run[-1], most=300))
                worker_free = run[-1]
                back = [after(worker_free, sender_free)]
                for _ in range(4):
                    back.append(after(back[-1]))
                sender_free = back[-1]
                applied = [after(back[3], frontend_free if draw.random() < 0.5 else 0, most=MAX_HOP_NS)]
                taken = [after(back[4], output_free, most=MAX_HOP_NS)]
                for _ in range(2):
                    applied.append(after(applied[-1]))
                    taken.append(after(taken[-1]))
                output_free = taken[-1]
                recorder.one_pass(
                    step_id, [*sent_times, *run, *back, *applied, *taken], rank=rank, micro_step=micro_step
                )
                received = decoded = worker_free
            # Depth 1 waits for the result, depth 2 goes on.
            frontend_free = applied[-1] if draw.random() < 0.5 else sent_times[-1]
    draw.shuffle(recorder.records)
    return recorder.tables()
