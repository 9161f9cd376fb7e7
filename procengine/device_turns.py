"""`DeviceTurns`: whose step goes next where several workflows want one device: start-time fair queuing. Pure.

Owns: each workflow's share of the device's time (Goyal, Vin, Cheng 1996). Never does: read a clock; what a step took is
told it when its result is back.

Each workflow that has work gets the same time, whatever its steps take: against embedding steps of 200 ms a generation
whose steps take 20 ms gets ten in a row. Between any two that both have work all the while, the difference never grows
beyond what is in flight. Who was idle gets no credit for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["DeviceTurns"]


class DeviceTurns:
    """The workflows, by name."""

    def __init__(self) -> None:
        self._order: list[str] = []  # whoever was served longest ago is first
        self._used_ns: dict[str, int] = {}  # virtual: of device time, idle times filled up
        self._expected_ns: dict[str, int] = {}  # of a step: what the newest took
        self._now_ns = 0  # virtual: where the newest step began

    def order(self, names: Collection[str]) -> Sequence[str]:
        """Who should be asked for a step, the first one first. `names`: all, those that are new among them."""
        if len(names) > len(self._order):
            self._take_in([name for name in names if name not in self._used_ns])
        if len(self._order) == 1:
            return self._order
        return sorted(self._order, key=lambda name: max(self._used_ns[name], self._now_ns))

    def serve(self, name: str) -> int:
        """A step of `name` goes to the device. Returns what it is charged with for now, for `settle`."""
        self._order.remove(name)
        self._order.append(name)
        charged_ns = self._expected_ns[name]
        self._now_ns = max(self._used_ns[name], self._now_ns)
        self._used_ns[name] = self._now_ns + charged_ns
        return charged_ns

    def settle(self, name: str, charged_ns: int, busy_ns: int) -> None:
        """The device was busy with a step for so long."""
        self._expected_ns[name] = busy_ns
        self._used_ns[name] += busy_ns - charged_ns

    def _take_in(self, names: Sequence[str]) -> None:
        """New ones begin where the newest step did: no later than anybody with work, and without credit for before."""
        self._order[:0] = names
        self._used_ns |= dict.fromkeys(names, self._now_ns)
        self._expected_ns |= dict.fromkeys(names, 0)
