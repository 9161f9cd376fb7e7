"""The conversation of `procengine chat`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from procengine.cli.chat import Conversation
from procengine.client import Client
from procengine.errors import InvalidRequestError
from procengine.outputs import StreamDelta
from procengine.sampling_params import SamplingParams


class FakeClient:
    """Answers every question with two pieces; notes what it was asked and whether it was read to the end."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[list[dict[str, Any]]] = []
        self.num_complete = 0
        self._error = error

    def stream(self, *, messages: list[dict[str, Any]], params: SamplingParams) -> Iterator[StreamDelta]:
        self.asked.append(list(messages))
        if self._error is not None:
            raise self._error
        yield StreamDelta("r", 0, "yes", [1])
        yield StreamDelta("r", 0, " sir", [2], "stop")
        self.num_complete += 1


def conversation(client: FakeClient, system: str | None = None) -> Conversation:
    return Conversation(cast(Client, client), SamplingParams(), system)


def test_history_is_sent_with_each_question() -> None:
    client = FakeClient()
    chat = conversation(client, system="be brief")
    assert "".join(chat.ask("one")) == "yes sir"
    assert "".join(chat.ask("two")) == "yes sir"
    assert [(m["role"], m["content"]) for m in client.asked[1]] == [
        ("system", "be brief"),
        ("user", "one"),
        ("assistant", "yes sir"),
        ("user", "two"),
    ]


def test_stopped_answer_is_kept_as_far_as_it_was_seen() -> None:
    client = FakeClient()
    chat = conversation(client)
    answer = chat.ask("one")
    assert next(answer) == "yes"
    answer.close()
    assert client.num_complete == 0
    assert [m["content"] for m in chat.messages] == ["one", "yes"]


def test_question_without_an_answer_is_taken_back() -> None:
    chat = conversation(FakeClient(InvalidRequestError("prompt: too long")))
    with pytest.raises(InvalidRequestError):
        list(chat.ask("one"))
    assert chat.messages == []


def test_clear_forgets_all_but_the_system_message() -> None:
    chat = conversation(FakeClient(), system="be brief")
    list(chat.ask("one"))
    chat.clear()
    assert [m["role"] for m in chat.messages] == ["system"]
