"""The protocol as a client sees it, without sockets: what is sent, and what each incoming message ends."""

from __future__ import annotations

import msgspec
import pytest

from procengine.client_bodies import generate_body, prompt_body
from procengine.client_core import ClientCore, Pending
from procengine.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    ProcengineError,
    ProtocolError,
    RequestFailedError,
)
from procengine.messages import (
    PROTOCOL_VERSION,
    Abort,
    Attach,
    Attached,
    Delta,
    Embedding,
    GetStats,
    Hello,
    Outputs,
    Rejected,
    Stats,
    Submit,
    Welcome,
    decode_from_client,
    decode_from_output_peer,
    encode,
)
from procengine.sampling_params import SamplingParams

MAX_BYTES = 1000


def welcome(version: int = PROTOCOL_VERSION) -> bytes:
    return encode(Welcome(version, "g", "m", "ipc://out", 100, 50, ("generate", "embed"), MAX_BYTES))


def welcome_of(instance: int, mark: int) -> bytes:
    return encode(
        Welcome(PROTOCOL_VERSION, "g", "m", "ipc://out", 9, 9, ("generate",), 99, mark=mark, instance=instance)
    )


def outputs(*items: Delta | Embedding) -> bytes:
    return encode(Outputs(list(items)))


@pytest.fixture
def core() -> ClientCore:
    """A core that has shaken hands."""
    made = ClientCore()
    made.hello()
    made.receive(welcome())
    made.attach()
    made.receive(encode(Attached(PROTOCOL_VERSION)))
    assert not made.has_pending
    return made


def submit(core: ClientCore, request_id: str | None = None, n: int = 1) -> Pending:
    return core.submit("generate", generate_body(prompt_body("hi"), SamplingParams(n=n)), request_id)[0]


def end_of(pending: Pending, index: int, finish_reason: str = "stop") -> bytes:
    return outputs(Delta(pending.request_id, index, "", [], finish_reason))


def test_hands_are_shaken_with_both_processes() -> None:
    core = ClientCore()
    question, frame = core.hello()
    assert decode_from_client(frame) == Hello(PROTOCOL_VERSION)
    core.receive(welcome())
    assert question.answer(Welcome).output_endpoint == "ipc://out"
    question, frame = core.attach()
    assert decode_from_output_peer(frame) == Attach(PROTOCOL_VERSION)
    core.receive(encode(Attached(PROTOCOL_VERSION)))
    assert question.answer(Attached) == Attached(PROTOCOL_VERSION)


def test_group_of_another_version_is_an_error() -> None:
    core = ClientCore()
    question, _ = core.hello()
    core.receive(welcome(PROTOCOL_VERSION + 1))
    with pytest.raises(ProtocolError, match="speaks protocol version 2, this client speaks 1"):
        question.answer(Welcome)


def test_refused_hello_is_an_error() -> None:
    core = ClientCore()
    question, _ = core.hello()
    core.receive(encode(Rejected("", "protocol", "too old")))
    with pytest.raises(ProtocolError, match="too old"):
        question.answer(Welcome)


def test_submit_is_encoded_as_the_frontend_reads_it(core: ClientCore) -> None:
    pending, frame = core.submit("generate", generate_body({"prompt": "hi"}, None))
    message = decode_from_client(frame)
    assert isinstance(message, Submit)
    assert (message.request_id, message.workflow) == (pending.request_id, "generate")
    assert msgspec.msgpack.decode(message.body) == {"prompt": "hi", "sampling_params": {}}


def test_deltas_go_to_their_requests_in_order(core: ClientCore) -> None:
    a, b = submit(core), submit(core)
    core.receive(outputs(Delta(a.request_id, 0, "1", [1]), Delta(b.request_id, 0, "x", [9])))
    core.receive(outputs(Delta(a.request_id, 0, "2", [2], "length")))
    assert [d.text for d in a.take_deltas()] == ["1", "2"]
    assert [d.text for d in b.take_deltas()] == ["x"]
    assert (a.is_done, b.is_done, core.running_ids()) == (True, False, [b.request_id])


def test_callbacks_tell_of_items_and_of_the_end(core: ClientCore) -> None:
    events: list[str] = []
    pending, _ = core.submit(
        "generate", prompt_body("hi"), None, lambda p: events.append(f"end {p.is_done}"), lambda: events.append("item")
    )
    core.receive(outputs(Delta(pending.request_id, 0, "1", [1])))
    core.receive(outputs(Delta(pending.request_id, 0, "2", [2], "stop")))
    assert events == ["item", "end True"]


def test_rejection_ends_one_request_with_the_error_it_means(core: ClientCore) -> None:
    a, b = submit(core), submit(core)
    core.receive(encode(Rejected(a.request_id, "overloaded", "full")))
    assert (a.is_done, b.is_done) == (True, False)
    with pytest.raises(OverloadedError, match="full"):
        a.raise_error()


def test_rejection_without_an_id_ends_everything(core: ClientCore) -> None:
    a, b = submit(core), submit(core)
    question, _ = core.get_stats(reset=False)
    core.receive(encode(Rejected("", "engine_dead", "worker-0 died")))
    for pending in (a, b, question):
        with pytest.raises(EngineDeadError, match="worker-0 died"):
            pending.raise_error()
    assert not core.has_pending


def test_error_as_finish_reason_is_raised(core: ClientCore) -> None:
    pending = submit(core)
    core.receive(outputs(Delta(pending.request_id, 0, "", [], "error", error="it broke")))
    with pytest.raises(RequestFailedError, match="it broke"):
        pending.raise_error()


def test_request_ends_when_the_last_of_its_choices_has_ended(core: ClientCore) -> None:
    pending = submit(core, n=3)
    for index in (1, 0):
        core.receive(end_of(pending, index))
        assert not pending.is_done
    core.receive(outputs(Delta(pending.request_id, 2, "more", [5])))
    core.receive(end_of(pending, 2, "length"))
    assert pending.is_done
    pending.raise_error()
    assert [delta.index for delta in pending.take_deltas()] == [1, 0, 2, 2]
    assert core.abandon(pending) is None  # nothing runs: no useless abort
    assert not core.has_pending


def test_all_choices_may_end_in_one_message(core: ClientCore) -> None:
    pending = submit(core, n=2)
    core.receive(outputs(*(Delta(pending.request_id, index, "x", [1], "stop") for index in (0, 1))))
    assert pending.is_done
    assert len(pending.take_deltas()) == 2


def test_owner_hears_of_a_choice_that_ends_before_the_others(core: ClientCore) -> None:
    events: list[str] = []
    body = generate_body(prompt_body("hi"), SamplingParams(n=2))
    pending, _ = core.submit("generate", body, None, lambda _: events.append("end"), lambda: events.append("item"))
    core.receive(end_of(pending, 0))
    core.receive(end_of(pending, 1))
    assert events == ["item", "end"]


def test_error_of_one_choice_ends_the_request_and_its_id_is_free_when_all_have_ended(core: ClientCore) -> None:
    ends: list[Pending] = []
    body = generate_body(prompt_body("hi"), SamplingParams(n=3))
    pending, _ = core.submit("generate", body, "mine", ends.append)
    core.receive(outputs(Delta("mine", 1, "", [], "error", error="it broke")))
    assert pending.is_done
    assert decode_from_client(core.abandon(pending) or b"") == Abort("mine")  # the other two run on
    core.receive(outputs(Delta("mine", 0, "late", [1]), Delta("mine", 0, "", [], "abort")))
    with pytest.raises(InvalidRequestError, match="'mine' is in use"):
        submit(core, "mine")
    core.receive(end_of(pending, 2, "abort"))
    with pytest.raises(RequestFailedError, match="it broke"):
        pending.raise_error()
    assert ends == [pending]
    assert [delta.text for delta in pending.take_deltas()] == [""]
    assert core.abandon(pending) is None
    submit(core, "mine")


def test_error_of_the_last_choice_is_raised_too(core: ClientCore) -> None:
    pending = submit(core, n=2)
    core.receive(end_of(pending, 0))
    core.receive(outputs(Delta(pending.request_id, 1, "", [], "error", error="it broke")))
    with pytest.raises(RequestFailedError, match="it broke"):
        pending.raise_error()
    assert core.abandon(pending) is None


def test_rejection_ends_all_choices_at_once(core: ClientCore) -> None:
    pending = submit(core, "mine", n=10**6)
    core.receive(encode(Rejected("mine", "invalid_request", "n: at most 128 choices are allowed, got 1000000")))
    with pytest.raises(InvalidRequestError, match="n: at most 128"):
        pending.raise_error()
    assert core.abandon(pending) is None
    submit(core, "mine")


def test_abandoned_request_of_several_choices_keeps_its_id_until_all_have_ended(core: ClientCore) -> None:
    pending = submit(core, "mine", n=2)
    core.receive(end_of(pending, 1))
    assert decode_from_client(core.abandon(pending) or b"") == Abort("mine")
    with pytest.raises(InvalidRequestError, match="'mine' is in use"):
        submit(core, "mine")
    core.receive(end_of(pending, 0, "abort"))
    again = submit(core, "mine")
    assert not again.is_done


def test_death_of_the_group_leaves_nothing_to_stop(core: ClientCore) -> None:
    running, failed = submit(core, n=2), submit(core, n=2)
    core.receive(outputs(Delta(failed.request_id, 0, "", [], "error", error="it broke")))
    core.die(EngineDeadError("gone"))
    for pending, error in ((running, EngineDeadError), (failed, RequestFailedError)):
        with pytest.raises(error):
            pending.raise_error()
        assert core.abandon(pending) is None


@pytest.mark.parametrize(("finish_reason", "is_error"), [("stop", False), ("abort", True), ("error", True)])
def test_embedding_ends_its_request(core: ClientCore, finish_reason: str, is_error: bool) -> None:
    pending, _ = core.submit("embed", prompt_body([1, 2]))
    core.receive(outputs(Embedding(pending.request_id, b"", [1, 2], finish_reason)))
    if is_error:
        with pytest.raises(RequestFailedError):
            pending.answer(Embedding)
    else:
        assert pending.answer(Embedding).prompt_token_ids == [1, 2]


def test_abort_names_a_running_request_only(core: ClientCore) -> None:
    pending = submit(core, "mine")
    assert decode_from_client(core.abort("mine") or b"") == Abort("mine")
    assert not pending.is_done  # its terminal message is still to come
    assert core.abort("never") is None


def test_what_comes_for_an_abandoned_request_is_dropped(core: ClientCore) -> None:
    pending = submit(core)
    assert decode_from_client(core.abandon(pending) or b"") == Abort(pending.request_id)
    core.receive(outputs(Delta(pending.request_id, 0, "late", [1], "abort")))
    core.receive(encode(Rejected(pending.request_id, "overloaded", "full")))
    assert pending.take_deltas() == []
    assert core.abandon(pending) is None


def test_request_ids_are_unique_among_running_requests(core: ClientCore) -> None:
    chosen = submit(core, "r1")
    assert len({chosen.request_id, submit(core).request_id, submit(core).request_id}) == 3
    with pytest.raises(InvalidRequestError, match="'r1' is in use"):
        submit(core, "r1")
    core.receive(outputs(Delta("r1", 0, "", [], "stop")))
    submit(core, "r1")


@pytest.mark.parametrize("request_id", ["", "a\ud800", "a\nb"])
def test_request_id_that_is_no_text_is_refused(core: ClientCore, request_id: str) -> None:
    with pytest.raises(InvalidRequestError, match="request_id"):
        submit(core, request_id)


def test_request_over_the_limit_is_refused_here(core: ClientCore) -> None:
    with pytest.raises(
        InvalidRequestError, match=rf"prompt: the request has \d+ bytes.*max_request_bytes\) is {MAX_BYTES}"
    ):
        core.submit("generate", prompt_body("x" * MAX_BYTES))
    assert not core.has_pending


def test_stats_are_answered_in_order(core: ClientCore) -> None:
    first, frame = core.get_stats(reset=True)
    second, _ = core.get_stats(reset=False)
    assert decode_from_client(frame) == GetStats(reset=True)
    core.receive(encode(Stats({"n": 1})))
    core.receive(encode(Stats({"n": 2})))
    assert (first.answer(Stats).values, second.answer(Stats).values) == ({"n": 1}, {"n": 2})


def test_unreadable_message_ends_everything(core: ClientCore) -> None:
    pending = submit(core)
    core.receive(b"\xc1")
    with pytest.raises(ProtocolError):
        pending.raise_error()


def test_dead_group_refuses_what_comes_after(core: ClientCore) -> None:
    pending = submit(core)
    core.die(EngineDeadError("gone"))
    for attempt in (pending.raise_error, lambda: submit(core), lambda: core.get_stats(reset=False)):
        with pytest.raises(EngineDeadError, match="gone"):
            attempt()


def test_each_raise_is_a_new_exception(core: ClientCore) -> None:
    pending = submit(core)
    core.die(EngineDeadError("gone"))
    raised: list[ProcengineError] = []
    for _ in range(2):
        try:
            pending.raise_error()
        except ProcengineError as error:
            raised.append(error)
    assert raised[0] is not raised[1]


# --- an output process that begins anew


def delta(request_id: str, offset: int, tokens: list[int], finish_reason: str | None = None, key: int = 0) -> Delta:
    """Each token is one character."""
    text = "".join(chr(96 + token) for token in tokens)
    return Delta(request_id, 0, text, tokens, finish_reason, token_offset=offset, text_offset=offset, key=key)


def test_what_is_sent_again_is_dropped_and_the_rest_taken(core: ClientCore) -> None:
    calls: list[str] = []
    pending, _ = core.submit(
        "generate", prompt_body("hi"), None, lambda _: calls.append("end"), lambda: calls.append("item")
    )
    core.receive(outputs(delta(pending.request_id, 0, [1, 2])))
    core.receive(outputs(delta(pending.request_id, 0, [1])))
    core.receive(outputs(delta(pending.request_id, 0, [1, 2, 3], "stop")))
    core.receive(outputs(delta(pending.request_id, 0, [1, 2, 3], "stop")))
    assert [(one.text, one.token_ids) for one in pending.take_deltas()] == [("ab", [1, 2]), ("c", [3])]
    assert calls == ["item", "end"]


def test_each_choice_ends_once(core: ClientCore) -> None:
    pending = submit(core, n=3)
    for index in (0, 0, 1, 0, 1):
        core.receive(end_of(pending, index))
    assert not pending.is_done
    core.receive(end_of(pending, 2))
    assert pending.is_done
    assert [one.index for one in pending.take_deltas()] == [0, 1, 2]


def test_each_choice_of_an_abandoned_request_ends_once(core: ClientCore) -> None:
    pending = submit(core, "mine", n=2)
    core.receive(end_of(pending, 0))
    core.abandon(pending)
    core.receive(end_of(pending, 0))
    with pytest.raises(InvalidRequestError, match="in use"):
        submit(core, "mine")
    core.receive(end_of(pending, 1))
    submit(core, "mine")


def test_a_gap_fails_the_request_and_no_other(core: ClientCore) -> None:
    pending, other = submit(core), submit(core)
    core.receive(outputs(delta(pending.request_id, 0, [1]), delta(pending.request_id, 2, [3])))
    with pytest.raises(ProtocolError, match=f"'{pending.request_id}', choice 0: a message begins at token 2"):
        pending.raise_error()
    assert not other.is_done
    assert core.abandon(pending) == encode(Abort(pending.request_id)), "the rest of it is of no use"
    core.receive(outputs(delta(pending.request_id, 3, [4], "abort")))
    assert submit(core, pending.request_id).error is None


def test_the_end_of_a_request_is_not_taken_for_that_of_the_next_one_with_its_name(core: ClientCore) -> None:
    first = submit(core, "mine")
    core.receive(outputs(delta("mine", 0, [1, 2], "stop", key=7)))
    assert first.is_done
    second = submit(core, "mine")
    core.receive(outputs(delta("mine", 0, [1], key=7), delta("mine", 0, [1, 2], "stop", key=7)))
    assert not second.is_done and not second.items
    core.receive(outputs(delta("mine", 0, [5], "stop", key=8)))
    assert [one.token_ids for one in second.take_deltas()] == [[5]]


def test_vectors_and_late_ends_are_told_apart_by_their_keys_too(core: ClientCore) -> None:
    def embed() -> Pending:
        return core.submit("embed", prompt_body([1]), "mine")[0]

    embed()
    core.receive(outputs(Embedding("mine", b"old", [1], key=3)))
    second = embed()
    core.receive(outputs(Embedding("mine", b"old", [1], key=3)))
    assert not second.is_done
    core.abandon(second)
    core.receive(outputs(Embedding("mine", b"old", [1], key=3)))
    with pytest.raises(InvalidRequestError, match="in use"):
        embed()
    core.receive(outputs(Embedding("mine", b"new", [1], key=4)))
    assert embed().error is None


def test_cumulative_messages_never_go_back(core: ClientCore) -> None:
    params = SamplingParams(output_kind="cumulative")
    pending = core.submit("generate", generate_body(prompt_body("hi"), params))[0]
    for count in (1, 3, 1, 2, 3, 4):
        core.receive(outputs(Delta(pending.request_id, 0, "x" * count, [0] * count)))
    assert [len(one.token_ids) for one in pending.take_deltas()] == [1, 3, 4]


def test_one_that_sees_the_ends_only_finds_no_gaps_and_ends_each_choice_once() -> None:
    core = ClientCore(sees_ends_only=True)
    core.hello()
    core.receive(welcome())
    pending = submit(core, n=2)
    for _ in range(2):
        core.receive(outputs(delta(pending.request_id, 5, [1], "stop")))
    assert not pending.is_done
    core.receive(end_of(pending, 1))
    assert pending.is_done and pending.error is None


def test_a_second_answer_to_attach_is_no_answer_to_anything_else(core: ClientCore) -> None:
    question, _ = core.get_stats(reset=False)
    core.receive(encode(Attached(PROTOCOL_VERSION)))
    assert not question.is_done
    core.receive(encode(Stats({"a": 1})))
    assert question.answer(Stats).values == {"a": 1}


def test_another_group_at_the_same_address_is_the_end_of_this_one() -> None:
    core = ClientCore()
    question, _ = core.hello()
    core.receive(welcome_of(3, 0))
    running = submit(core)
    core.receive(welcome_of(3, 1))
    assert question.is_done and not running.is_done, "the same group has said it twice"
    core.receive(welcome_of(4, 2))
    with pytest.raises(EngineDeadError, match="another one has taken its place"):
        running.raise_error()
    with pytest.raises(EngineDeadError):
        submit(core)
