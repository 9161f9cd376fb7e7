"""Random requests of a soak run, each with what must come of it: the mock device's tokens are arithmetic.

Owns: the mix of requests and the check of one. Never does: send or receive.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from procengine.delta_cursor import DeltaCursor
from procengine.messages import Delta, Embedding, Submit, TokenLogprobs, encode
from tests.procs.harness import as_ids, tokens_of
from tests.procs.raw_client import body

__all__ = ["SoakRequest", "TextOf", "make_request"]

TextOf = Callable[[list[int]], str]
_STOPS: Final = ("e", "q", "zz", "Q7", "~", "no such text")
_CHOICES: Final = (1, 1, 1, 1, 1, 1, 2, 3)


@dataclass
class _Choice:
    """What has come of one choice."""

    cursor: DeltaCursor
    key: int = -1
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Delta | Embedding | None = None


class SoakRequest:
    """One request: its bytes, and all that came of it so far."""

    def __init__(
        self, name: str, kind: str, prompt: list[int], fields: dict[str, Any], aborts_after: int | None
    ) -> None:
        self.name = name
        self.kind = kind
        self.aborts_after = aborts_after  # messages, after which it is aborted; None: it is not
        self.is_abort_due = False
        self._prompt = prompt
        self._fields = fields
        self._num_messages = 0
        cumulative = fields.get("output_kind") == "cumulative"
        self._choices = [_Choice(DeltaCursor(is_cumulative=cumulative)) for _ in range(fields.get("n", 1))]
        is_embed = kind == "embed"
        content = {"prompt_token_ids": prompt} if is_embed else body(prompt, **fields)
        self.frame = encode(Submit(name, "embed" if is_embed else "generate", msgspec.Raw(encode(content))))

    @property
    def is_over(self) -> bool:
        """Whether each choice has its end."""
        return all(choice.end is not None for choice in self._choices)

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return sum(len(choice.token_ids) for choice in self._choices)

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices that have ended."""
        return [str(choice.end.finish_reason) for choice in self._choices if choice.end is not None]

    def describe(self) -> str:
        """For whoever wants to know what was lost."""
        came = [(choice.key, len(choice.token_ids), choice.end is not None) for choice in self._choices]
        return f"{self.kind} {self._fields}, prompt of {len(self._prompt)}; (key, tokens, ended): {came}"

    def take(self, item: Delta | Embedding) -> None:
        """A message for it."""
        self._num_messages += 1
        self.is_abort_due = self._num_messages == self.aborts_after
        choice = self._choices[item.index if isinstance(item, Delta) else 0]
        assert choice.key in (-1, item.key), f"{self.name}: two keys: {choice.key}, {item.key}"
        choice.key = item.key
        if isinstance(item, Embedding):
            assert choice.end is None or choice.end.data == item.data  # type: ignore[union-attr]
            choice.end = item
            return
        new = choice.cursor.take(item)
        if new is None:
            return
        if self._fields.get("output_kind") == "cumulative":
            choice.token_ids, choice.text, choice.logprobs = list(new.token_ids), new.text, list(new.logprobs or ())
        else:
            choice.token_ids += new.token_ids
            choice.text += new.text
            choice.logprobs += new.logprobs or ()
        if new.finish_reason is not None:
            choice.end = new

    def check(self, text_of: TextOf) -> None:
        """It is over: whether all that came is right, and nothing else."""
        assert len({choice.key for choice in self._choices}) == len(self._choices), self.describe()
        for choice in self._choices:
            if isinstance(choice.end, Embedding):
                is_aborted = self.aborts_after is not None and choice.end.finish_reason == "abort"
                assert is_aborted or (choice.end.finish_reason == "stop" and choice.end.data), choice.end
            else:
                self._check_choice(choice, text_of)

    def _check_choice(self, choice: _Choice, text_of: TextOf) -> None:
        end, count = choice.end, len(choice.token_ids)
        assert isinstance(end, Delta)
        assert choice.token_ids == tokens_of(choice.key, len(self._prompt), count), self.describe()
        whole = text_of(choice.token_ids)
        stops = [at for stop in self._fields.get("stop", ()) if (at := whole.find(stop)) >= 0]
        match end.finish_reason:
            case "length":
                assert count == self._fields["max_tokens"] and not stops, self.describe()
            case "stop":
                assert stops and end.stop_reason in self._fields["stop"], self.describe()
                whole = whole[: min(stops)]
            case "abort":
                assert self.aborts_after is not None, self.describe()
            case _:
                raise AssertionError(f"{end}: {self.describe()}")
        if self._fields.get("detokenize", True):
            assert choice.text == whole, (choice.text, whole, self.describe())
        if "logprobs" in self._fields:  # those of a few tokens may have died with a process; then they are empty
            assert len(choice.logprobs) == count, self.describe()
            shown = zip(choice.logprobs, choice.token_ids, strict=True)
            assert all(not entry.token_ids or entry.token_ids[0] == token for entry, token in shown), self.describe()


def make_request(name: str, draw: random.Random) -> SoakRequest:
    """The next one: short or long, streamed or not, with everything that changes its way through the processes."""
    prompt = as_ids(draw.choice((1, 3, 8, 15, 16, 17, 40, draw.randint(1, 120))), draw.randrange(64))
    aborts_after = draw.choice((0, 1, 2, 3)) if draw.random() < 0.05 else None
    if draw.random() < 0.04:
        return SoakRequest(name, "embed", prompt, {}, aborts_after)
    kind = draw.choice(("delta", "delta", "final", "cumulative"))
    fields: dict[str, Any] = {"max_tokens": draw.choice((1, 2, 4, 8, 16, draw.randint(1, 60))), "output_kind": kind}
    fields["n"] = draw.choice(_CHOICES)
    if fields["n"] > 1:
        fields["seed"] = draw.randrange(1000)
    if draw.random() < 0.2:
        fields["stop"] = draw.sample(_STOPS, draw.randint(1, 2))
    elif draw.random() < 0.1:
        fields["detokenize"] = False
    if draw.random() < 0.1:
        fields["logprobs"] = draw.randint(0, 2)
    if draw.random() < 0.1:
        fields["stream_interval"] = draw.randint(2, 5)
    return SoakRequest(name, kind, prompt, fields, aborts_after)
