"""`GroupTotals`: all that is counted of one group, fed from its spans and its status. Pure.

Owns: that every counter sees every table. Never does: read, ask, or format.
"""

from __future__ import annotations

from typing import Final

from procengine.messages import Status
from procengine.profiling.pass_totals import PassTotals
from procengine.profiling.process_watch import ProcessWatch
from procengine.profiling.request_ledger import RequestLedger, WorkerGauges
from procengine.profiling.request_totals import RequestTotals
from procengine.profiling.snapshot import SpanTables

__all__ = ["GroupTotals"]

_STATUS_AGE_NS: Final = 5 * 10**9  # more than a status may be old when it comes


class GroupTotals:
    """Feed it all tables and statuses, oldest first.

    Attributes:
        num_lost: records that were overwritten before they were read. The counters miss what these said.
    """

    def __init__(self, num_workers: int) -> None:
        self.ledger = RequestLedger()
        self.requests = RequestTotals()
        self.passes = PassTotals()
        self.watch = ProcessWatch()
        self.num_lost = 0
        self._num_workers = num_workers

    @property
    def gauges(self) -> list[WorkerGauges]:
        """Each worker's load now."""
        return self.ledger.gauges(self._num_workers, self.watch.num_unfinished)

    def add_tables(self, tables: SpanTables) -> None:
        """Take in what is new in the rings."""
        self.num_lost += tables.num_lost
        self.ledger.add(tables)
        self.requests.add(tables)
        self.passes.add(tables)

    def add_status(self, status: Status, now_ns: int) -> None:
        """Take in a status that came at `now_ns`."""
        self.watch.add(status, now_ns)
        if not self.ledger.is_complete and self.watch.num_unfinished == 0:
            self.ledger.forget_before(now_ns - _STATUS_AGE_NS)
