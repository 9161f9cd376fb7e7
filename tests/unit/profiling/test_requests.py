"""Stages of requests, and which id belongs to which key."""

from __future__ import annotations

from procengine.profiling.records import RecordKind
from procengine.profiling.requests import REQUEST_STAGES, finished_requests, ids_by_key, unfinished_requests
from procengine.profiling.snapshot import SpanTables
from tests.unit.profiling.synthetic import Recorder

DONE = {
    "client_sent_ns": 100,
    "received_ns": 110,
    "prepared_ns": 130,
    "admitted_ns": 170,
    "first_token_ns": 250,
    "last_token_ns": 410,
    "detokenized_ns": 730,
    "delivered_ns": 1370,
    "num_output_tokens": 5,
    "finish_code": 2,
}


def test_stages_by_hand() -> None:
    recorder = Recorder()
    recorder.accept(3, "request-ü", received_ns=110, prepared_ns=130, rank=1)
    recorder.add(RecordKind.REQUEST_DONE, 3, **DONE)
    requests = finished_requests(recorder.tables())
    assert (requests.keys.tolist(), requests.ids, requests.ranks.tolist()) == ([3], ["request-ü"], [1])
    assert len(REQUEST_STAGES) == 7
    assert requests.stages_ns.tolist() == [[10, 20, 40, 80, 160, 320, 640]]
    assert requests.e2e_ns.tolist() == [1270]
    assert requests.finish_reasons == ["length"]
    assert requests.counts["num_output_tokens"].tolist() == [5]


def test_what_did_not_happen_takes_no_time() -> None:
    recorder = Recorder()
    # Aborted while it waited: never admitted, no token. The client said no time.
    recorder.add(
        RecordKind.REQUEST_DONE,
        3,
        received_ns=110,
        prepared_ns=130,
        detokenized_ns=150,
        delivered_ns=160,
        finish_code=3,
    )
    requests = finished_requests(recorder.tables())
    assert requests.stages_ns.tolist() == [[0, 20, 0, 0, 0, 20, 10]]
    assert requests.e2e_ns.tolist() == [50]
    assert (requests.ids, requests.ranks.tolist(), requests.finish_reasons) == ([""], [-1], ["abort"])


def test_choices_of_a_request_share_its_id() -> None:
    recorder = Recorder()
    for key, request_id in enumerate(["a", "b", "b"]):
        recorder.accept(key, request_id, received_ns=1)
        recorder.add(RecordKind.REQUEST_DONE, key, **DONE)
    tables = recorder.tables()
    assert ids_by_key(tables) == {0: "a", 1: "b", 2: "b"}
    requests = finished_requests(tables)
    assert requests.named("b").keys.tolist() == [1, 2]
    assert len(requests.named("c")) == 0


def test_requests_that_have_not_ended_last_until_now() -> None:
    recorder = Recorder()
    recorder.accept(0, "done", received_ns=110, prepared_ns=130)
    recorder.add(RecordKind.REQUEST_DONE, 0, **DONE)
    recorder.accept(1, "waits", client_sent_ns=90, received_ns=110, prepared_ns=130)
    recorder.accept(2, "runs", client_sent_ns=90, received_ns=110, prepared_ns=130)
    recorder.add(RecordKind.REQUEST_ADMITTED, 2, sent_ns=200)
    recorder.add(RecordKind.REQUEST_ADMITTED, 2, sent_ns=700)  # again, after a preemption
    requests = unfinished_requests(recorder.tables(), 1000)
    assert requests.ids == ["waits", "runs"]
    assert requests.stages_ns.tolist() == [[20, 20, 870, 0, 0, 0, 0], [20, 20, 70, 800, 0, 0, 0]]
    assert requests.finish_reasons == ["", ""]


def test_nothing_to_say_of_nothing() -> None:
    tables = SpanTables.of([])
    assert len(finished_requests(tables)) == len(unfinished_requests(tables, 5)) == 0
    assert finished_requests(tables).stages_ns.shape == (0, 7)
