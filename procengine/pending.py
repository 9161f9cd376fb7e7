"""`Pending`: one request or question of a client, and what has come for it.

Owns: how far it has come. Never does: decide what a message means for it (`ClientCore`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from copy import copy
from typing import TypeAlias, TypeVar, cast

from procengine.delta_cursor import DeltaCursor
from procengine.errors import ProcengineError, ProtocolError
from procengine.messages import Attached, Delta, Embedding, Stats, Submit, Welcome

__all__ = ["OnEnd", "OnItem", "Pending"]

Item: TypeAlias = Delta | Embedding | Welcome | Attached | Stats
OnEnd: TypeAlias = Callable[["Pending"], object]
OnItem: TypeAlias = Callable[[], object]
_AnswerT = TypeVar("_AnswerT", bound=Item)


class Pending:
    """A request or a question under way: what has come for it, and whether more will."""

    __slots__ = (
        "arrived_ns",
        "cursors",
        "delivered_ns",
        "epoch",
        "error",
        "first_key",
        "is_aborted",
        "is_collected",
        "is_cumulative",
        "is_done",
        "items",
        "num_choices",
        "num_open",
        "number",
        "on_end",
        "on_item",
        "request_id",
        "submit",
    )

    def __init__(
        self,
        request_id: str,
        on_end: OnEnd | None = None,
        on_item: OnItem | None = None,
        num_choices: int = 1,
        *,
        is_cumulative: bool = False,
        is_collected: bool = False,
        first_key: int = 0,
        submit: Submit | None = None,
    ) -> None:
        self.request_id = request_id
        self.num_choices = num_choices
        self.num_open = num_choices  # choices whose end has not come; an error may have ended the request before
        self.is_cumulative = is_cumulative
        self.first_key = first_key  # items with smaller keys are of requests that ended before this one was sent
        self.cursors: dict[int, DeltaCursor] = {}  # how far its choices have come, by index
        self.items: deque[Item] = deque()  # the owner may take items out while others come in
        self.is_done = False
        self.error: ProcengineError | None = None
        self.on_item = on_item
        self.on_end = on_end
        self.is_collected = is_collected  # nothing is taken out before the end
        self.is_aborted = False
        self.submit = submit  # what was sent, to be sent again
        self.epoch = -1 if submit is None else submit.epoch  # of the frontend that has it, as far as we know
        self.number = 0  # larger than those of all that was sent before, the last time that this was
        self.delivered_ns = 0  # when the group sent the newest end of a choice, and when that was here
        self.arrived_ns = 0

    @property
    def can_restart(self) -> bool:
        """Whether it may begin anew, and nobody will see that it had begun before."""
        return self.submit is not None and not self.is_aborted and (self.is_collected or not self.cursors)

    def restart(self, epoch: int, first_key: int) -> None:
        """Forget what has come: it begins anew, under a key of `first_key` or more; `epoch` is what is sent."""
        self.epoch, self.first_key = epoch, first_key
        self.num_open = self.num_choices
        self.cursors.clear()
        self.items.clear()

    def take_deltas(self) -> list[Delta]:
        """All deltas that are here now, oldest first; afterwards they are not here any more."""
        taken: list[Delta] = []
        while self.items:
            taken.append(cast(Delta, self.items.popleft()))
        return taken

    def answer(self, kind: type[_AnswerT]) -> _AnswerT:
        """The last message that came. Call it when this is done.

        Raises:
            ProcengineError: the request was refused or failed, or the group is gone.
        """
        self.raise_error()
        message = self.items[-1]
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__} from the group, got {type(message).__name__}")
        return message

    def raise_error(self) -> None:
        """Raise what ended this, if an error did. A new exception each time: several threads may raise the same one."""
        if self.error is not None:
            raise copy(self.error)
