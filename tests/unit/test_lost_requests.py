"""A frontend dies, as a client sees it without sockets: what is sent again, what ends with an error, what goes on."""

from __future__ import annotations

import pytest

from procengine.client_bodies import generate_body, prompt_body
from procengine.client_core import ClientCore, Pending
from procengine.errors import EngineDeadError, RequestLostError
from procengine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Attached,
    Delta,
    GetStats,
    Hello,
    Lost,
    Outputs,
    Received,
    Stats,
    Submit,
    Welcome,
    decode_from_client,
    encode,
)
from procengine.numbering import first_number
from procengine.sampling_params import SamplingParams

WHY = "frontend (pid 7) was killed by SIGKILL"


def welcome(epoch: int = 0, mark: int = 0) -> bytes:
    return encode(Welcome(PROTOCOL_VERSION, "g", "m", "ipc://o", 100, 50, ("generate",), 1000, "none", epoch, mark))


def connected(*, resubmits: bool = True) -> ClientCore:
    core = ClientCore(resubmits=resubmits)
    core.hello()
    core.receive(welcome())
    core.attach()
    core.receive(encode(Attached(PROTOCOL_VERSION)))
    return core


def submit(core: ClientCore, name: str = "r", *, is_collected: bool = False, n: int = 1) -> Pending:
    body = generate_body(prompt_body("hi"), SamplingParams(n=n))
    return core.submit("generate", body, name, is_collected=is_collected)[0]


def delta(name: str, token: int, finish_reason: str | None = None, key: int = 0, index: int = 0) -> bytes:
    return encode(Outputs([Delta(name, index, "x", [token], finish_reason, key=key)]))


def hello_again(core: ClientCore) -> int:
    hello = decode_from_client(core.hello_again())
    assert isinstance(hello, Hello) and hello.mark > 0
    return hello.mark


def sent_again(core: ClientCore) -> list[tuple[str, int]]:
    frames = [decode_from_client(frame) for frame in core.take_frames()]
    assert all(isinstance(frame, Submit) for frame in frames)
    return [(frame.request_id, frame.epoch) for frame in frames if isinstance(frame, Submit)]


def lost(*names: str, epoch: int = 0) -> bytes:
    return encode(Lost(epoch, list(names), WHY))


def test_what_has_shown_nothing_is_sent_again_and_ends_as_if_nothing_had_been() -> None:
    core = connected()
    pending = submit(core)
    core.receive(lost("r"))
    assert sent_again(core) == [("r", 0)]  # nobody of epoch 1 has spoken to us
    core.receive(delta("r", 5, "stop", key=3))  # of the dead one, late
    assert not pending.is_done and not pending.items
    core.receive(delta("r", 6, "stop", key=first_number(1)))
    assert [d.token_ids for d in pending.take_deltas()] == [[6]]
    pending.raise_error()


def test_a_stream_of_which_something_was_shown_ends_with_an_error() -> None:
    core = connected()
    pending = submit(core)
    core.receive(delta("r", 5))
    core.receive(lost("r"))
    assert sent_again(core) == []
    with pytest.raises(RequestLostError, match="SIGKILL"):
        pending.raise_error()
    assert isinstance(pending.error, EngineDeadError)
    assert core.abandon(pending) is None
    assert not submit(core).is_done  # the id is free


def test_what_is_looked_at_as_a_whole_begins_anew_although_parts_are_here() -> None:
    core = connected()
    pending = submit(core, is_collected=True, n=2)
    core.receive(delta("r", 5, "stop", key=0))
    core.receive(lost("r"))
    assert sent_again(core) == [("r", 0)]
    key = first_number(1)
    core.receive(delta("r", 7, "stop", key=key + 1, index=1))
    assert not pending.is_done
    core.receive(delta("r", 6, "stop", key=key))
    assert pending.is_done
    assert [(d.index, d.token_ids) for d in pending.take_deltas()] == [(1, [7]), (0, [6])]


@pytest.mark.parametrize("how", ["does not want it", "aborted"])
def test_what_must_not_run_twice_ends_with_an_error(how: str) -> None:
    core = connected(resubmits=how == "aborted")
    pending = submit(core)
    if how == "aborted":
        assert decode_from_client(core.abort("r") or b"") == Abort("r")
    core.receive(lost("r"))
    assert sent_again(core) == []
    with pytest.raises(RequestLostError):
        pending.raise_error()


def test_silence_about_what_was_sent_before_means_that_it_is_lost() -> None:
    core = connected()
    taken, waited, later = submit(core, "taken"), submit(core, "waited"), None
    mark = hello_again(core)
    later = submit(core, "later")  # behind the question: nothing is known of it yet
    core.receive(encode(Received("waited", 1)))
    core.receive(welcome(1, mark))
    assert sent_again(core) == [("taken", 1)]
    core.receive(encode(Received("later", 1)))
    core.receive(welcome(1, hello_again(core)))
    assert sent_again(core) == []
    assert not any(pending.is_done for pending in (taken, waited, later))


def test_the_second_frontend_may_die_with_what_was_sent_again() -> None:
    core = connected()
    submit(core)
    core.receive(lost("r"))
    assert sent_again(core) == [("r", 0)]
    mark = hello_again(core)  # it was sent into the end of a connection
    core.receive(welcome(1, mark))
    assert sent_again(core) == [("r", 1)]
    core.receive(welcome(2, hello_again(core)))
    assert sent_again(core) == [("r", 2)]


def test_the_same_loss_told_twice_is_one_loss() -> None:
    core = connected()
    pending = submit(core)
    core.receive(lost("r"))
    core.receive(lost("r"))
    assert sent_again(core) == [("r", 0)]
    core.receive(welcome(1, hello_again(core)))
    assert sent_again(core) == [("r", 1)]
    core.receive(lost("r"))
    assert sent_again(core) == [] and not pending.is_done


def test_old_connection_that_broke_without_a_death_changes_nothing() -> None:
    core = connected()
    pending = submit(core)
    core.receive(welcome(0, hello_again(core)))
    assert sent_again(core) == [] and not pending.is_done


def test_questions_to_the_dead_are_asked_again_and_a_second_answer_does_no_harm() -> None:
    core = connected()
    question, _ = core.get_stats(reset=False)
    core.receive(welcome(1, hello_again(core)))
    assert [decode_from_client(frame) for frame in core.take_frames()] == [GetStats()]
    core.receive(encode(Stats({"n": 1})))
    core.receive(encode(Stats({"n": 2})))
    assert question.answer(Stats).values == {"n": 1}
    assert not core.has_pending


def test_ids_of_abandoned_requests_are_free_when_their_frontend_is_gone() -> None:
    core = connected()
    pending = submit(core)
    assert core.abandon(pending) is not None
    core.receive(welcome(1, hello_again(core)))
    assert sent_again(core) == []
    submit(core)
