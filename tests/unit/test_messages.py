"""The wire format, pinned byte by byte: a client in another language is written from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from procengine import messages as m

Message = Any

# One message each with every field set: (message, its bytes as written on the wire).
GOLDEN: list[tuple[Message, bytes]] = [
    (m.Hello(1, 5), b"\x93\xa5hello\x01\x05"),
    (
        m.Submit("r", "generate", msgspec.Raw(b"\x80"), 5, "t", 2),
        b"\x97\xa6submit\xa1r\xa8generate\x80\x05\xa1t\x02",
    ),
    (m.Abort("r"), b"\x92\xa5abort\xa1r"),
    (m.GetStats(True), b"\x92\xa9get_stats\xc3"),
    (
        m.Welcome(1, "g", "m", "ipc://o", 256, 1000, ("generate", "embed"), 4096, "hermes", 2, 5, ("no",), 9),
        b"\x9e\xa7welcome\x01\xa1g\xa1m\xa7ipc://o\xcd\x01\x00\xcd\x03\xe8\x92\xa8generate\xa5embed\xcd\x10\x00"
        b"\xa6hermes\x02\x05\x91\xa2no\x09",
    ),
    (m.Received("r", 2), b"\x93\xa8received\xa1r\x02"),
    (m.Lost(2, ["r", "s"], "why"), b"\x94\xa4lost\x02\x92\xa1r\xa1s\xa3why"),
    (
        m.Rejected("r", "overloaded", "full", 0.5),
        b"\x95\xa8rejected\xa1r\xaaoverloaded\xa4full\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00",
    ),
    (m.Stats({"num_steps": 3, "x": None}), b"\x92\xa5stats\x82\xa9num_steps\x03\xa1x\xc0"),
    (m.Attach(1), b"\x92\xa6attach\x01"),
    (m.Attached(1), b"\x92\xa8attached\x01"),
    (
        m.Outputs(
            [
                m.Delta(
                    "r",
                    0,
                    "é",
                    [5],
                    "stop",
                    7,
                    [m.TokenLogprobs((5,), (-0.5,), (1,))],
                    [1, 2],
                    16,
                    "e",
                    [None, m.TokenLogprobs((2,), (-1.5,), (3,))],
                    m.RequestTimes(1, 2, 3, 4, 5, 6, 7),
                    8,
                    30,
                    2,
                ),
                m.Embedding("s", b"\x00\x00\x80\x3f", [1], "stop", None, m.RequestTimes(), 3),
            ],
            9,
        ),
        b"\x93\xa7outputs\x92"
        b"\xdc\x00\x10\xa5delta\xa1r\x00\xa2\xc3\xa9\x91\x05\xa4stop\x07\x91\x93\x91\x05\x91\xcb\xbf\xe0\x00\x00\x00\x00\x00\x00\x91\x01"
        b"\x92\x01\x02\x10\xa1e\x92\xc0\x93\x91\x02\x91\xcb\xbf\xf8\x00\x00\x00\x00\x00\x00\x91\x03"
        b"\x97\x01\x02\x03\x04\x05\x06\x07\x08\x1e\x02"
        b"\x98\xa9embedding\xa1s\xc4\x04\x00\x00\x80\x3f\x91\x01\xa4stop\xc0\x97\x00\x00\x00\x00\x00\x00\x00\x03\x09",
    ),
    (
        m.Register(
            3,
            b"c",
            "r",
            1,
            "generate",
            [1, 2],
            9,
            (2,),
            ("x",),
            True,
            False,
            (2,),
            5,
            7,
            1,
            False,
            True,
            "final",
            4,
            5,
            6,
            7,
        ),
        b"\xdc\x00\x17\xa8register\x03\xc4\x01c\xa1r\x01\xa8generate\x92\x01\x02\x09\x91\x02\x91\xa1x\xc3\xc2\x91\x02\x05"
        b"\x07\x01\xc2\xc3\xa5final\x04\x05\x06\x07",
    ),
    (m.Admitted([3, 4], [16, 0], 9, (1, 0)), b"\x95\xa8admitted\x92\x03\x04\x92\x10\x00\x09\x92\x01\x00"),
    (m.Finish(3, "error", "why", True), b"\x95\xa6finish\x03\xa5error\xa3why\xc3"),
    (m.Replay(3, 9, [5, 6]), b"\x94\xa6replay\x03\x09\x92\x05\x06"),
    (m.Resume(2), b"\x92\xa6resume\x02"),
    (m.TextStop(3), b"\x92\xa9text_stop\x03"),
    (m.ClientGone(b"c"), b"\x92\xabclient_gone\xc4\x01c"),
    (m.Delivered([3, 4]), b"\x92\xa9delivered\x92\x03\x04"),
    (m.Resync(3, 9), b"\x93\xa6resync\x03\x09"),
    (
        m.StepInput(1, 0, 2, 1, 5, 2, 1, 4, 20, 3, -1, (2, 3)),
        b"\x9d\xa4step\x01\x00\x02\x01\x05\x02\x01\x04\x14\x03\xff\x92\x02\x03",
    ),
    (m.Begin(2), b"\x92\xa5begin\x02"),
    (m.LoadAdapter(7, 3, "/a"), b"\x94\xacload_adapter\x07\x03\xa2\x2fa"),
    (m.AdapterLoaded(1, 0, 7, "e"), b"\x95\xaeadapter_loaded\x01\x00\x07\xa1e"),
    (
        m.EmbedInput(1, 0, 2, 5, 4, (4, 3), "score", (1,), 90),
        b"\x9a\xa5embed\x01\x00\x02\x05\x04\x92\x04\x03\xa5score\x91\x01\x5a",
    ),
    (m.StepFailed(1, 0, 5, [7, 8], "e"), b"\x96\xabstep_failed\x01\x00\x05\x92\x07\x08\xa1e"),
    (m.WorkerReady(1, 0, 64), b"\x94\xacworker_ready\x01\x00\x40"),
    (
        m.StepResult(1, 0, 5, 2, True, 3, 1000, (6, 3)),
        b"\x99\xa6result\x01\x00\x05\x02\xc3\x03\xcd\x03\xe8\x92\x06\x03",
    ),
    (
        m.EmbedResult(1, 0, 5, 2, 1000, (4, 16)),
        b"\x98\xacembed_result\x01\x00\x05\x02\xcd\x03\xe8\x92\x04\x10\xa5embed",
    ),
    (
        m.Ready("worker", 1, 42, {"num_blocks": 64, "device": "cpu"}),
        b"\x95\xa5ready\xa6worker\x01\x2a\x82\xaanum_blocks\x40\xa6device\xa3cpu",
    ),
    (m.Failed("worker", 1, "why", "tb"), b"\x95\xa6failed\xa6worker\x01\xa3why\xa2tb"),
    (m.Query(7), b"\x92\xa5query\x07"),
    (
        m.ChildStats(7, "ready", 3, (0.0, 1.5)),
        b"\x95\xabchild_stats\x07\xa5ready\x03\x92\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00",
    ),
    (m.Drain(1.5), b"\x92\xa5drain\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"),
    (m.Drained(5, 2), b"\x93\xa7drained\x05\x02"),
    (m.RetireWorker(1, 2), b"\x93\xadretire_worker\x01\x02"),
    (m.WorkerRetired(1, 2), b"\x93\xaeworker_retired\x01\x02"),
    (m.Leave(1.5), b"\x92\xa5leave\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"),
    (m.Stays(3), b"\x92\xa5stays\x03"),
    (m.Restart("output", 1.5), b"\x93\xa7restart\xa6output\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"),
    (m.WriteRecord(), b"\x91\xacwrite_record"),
    (m.RecordWritten("/a", "why"), b"\x93\xaerecord_written\xa2/a\xa3why"),
    (m.LoadLora(4, "a", "/a"), b"\x94\xa9load_lora\x04\xa1a\xa2\x2fa"),
    (m.UnloadLora(4, "a"), b"\x93\xabunload_lora\x04\xa1a"),
    (m.LoraChanged(4, "model", "e"), b"\x94\xaclora_changed\x04\xa5model\xa1e"),
    (m.ChangeAdapter(5, "a", None), b"\x94\xaechange_adapter\x05\xa1a\xc0"),
    (m.AdapterChanged(5, "a", "model", "e"), b"\x95\xafadapter_changed\x05\xa1a\xa5model\xa1e"),
    (m.Adapters([("a", "/a")]), b"\x92\xa8adapters\x91\x92\xa1a\xa2\x2fa"),
    (m.TakeRecord(7), b"\x92\xabtake_record\x07"),
    (m.RecordedRequests(7, b"\x90"), b"\x93\xb1recorded_requests\x07\xc4\x01\x90"),
    (m.Restarted("output", 42, "why"), b"\x94\xa9restarted\xa6output\x2a\xa3why"),
    (m.EndGroup(1.5), b"\x92\xa9end_group\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"),
    (m.Ended(5, 2, "why"), b"\x94\xa5ended\x05\x02\xa3why"),
    (m.WorkerHung(1, 2), b"\x93\xabworker_hung\x01\x02"),
    (m.WorkerLost(1, 2), b"\x93\xabworker_lost\x01\x02"),
    (m.OutputLost(2, 7), b"\x93\xaboutput_lost\x02\x07"),
    (m.FrontendLost(2, "why"), b"\x93\xadfrontend_lost\x02\xa3why"),
    (m.Shutdown("why"), b"\x92\xa8shutdown\xa3why"),
    (m.GetStatus(), b"\x91\xaaget_status"),
    (
        m.Status("g", "m", [m.ProcessStatus("worker", 1, 42, "ready", 1.5, 1000, 0.5, 3, 2, True, False, True, 1.5)]),
        b"\x94\xa6status\xa1g\xa1m\x91\x9d\xa6worker\x01\x2a\xa5ready\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00"
        b"\xcd\x03\xe8\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00\x03\x02\xc3\xc2\xc3"
        b"\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00",
    ),
]

DECODERS: dict[str, tuple[Callable[[bytes], Message], set[type]]] = {
    "client": (m.decode_from_client, {m.Hello, m.Submit, m.Abort, m.GetStats}),
    "output_peer": (m.decode_from_output_peer, {m.Attach}),
    "to_client": (m.decode_to_client, {m.Welcome, m.Received, m.Rejected, m.Stats, m.Attached, m.Lost, m.Outputs}),
    "frontend": (m.decode_from_frontend, {m.Register, m.Admitted, m.Finish, m.Replay, m.Resume}),
    "output": (m.decode_from_output, {m.TextStop, m.ClientGone, m.Resync, m.Delivered}),
    "step": (m.decode_step, {m.Begin, m.LoadAdapter, m.StepInput, m.EmbedInput}),
    "worker": (m.decode_from_worker, {m.WorkerReady, m.AdapterLoaded, m.StepFailed, m.StepResult, m.EmbedResult}),
    "supervisor": (
        m.decode_from_supervisor,
        {
            *(m.Query, m.Drain, m.WorkerLost, m.OutputLost, m.FrontendLost, m.RetireWorker, m.Leave, m.Shutdown),
            *(m.TakeRecord, m.ChangeAdapter, m.Adapters),
        },
    ),
    "control_peer": (
        m.decode_from_control_peer,
        {
            *(m.Ready, m.Failed, m.ChildStats, m.Drained, m.WorkerHung, m.WorkerRetired, m.Stays),
            *(m.RecordedRequests, m.GetStatus, m.Restart, m.EndGroup, m.WriteRecord),
            *(m.LoadLora, m.UnloadLora, m.AdapterChanged),
        },
    ),
    "lora_changed": (m.decode_lora_changed, {m.LoraChanged}),
    "record_written": (m.decode_record_written, {m.RecordWritten}),
    "restarted": (m.decode_restarted, {m.Restarted}),
    "ended": (m.decode_ended, {m.Ended}),
    "status": (m.decode_status, {m.Status}),
}

# Fields that a peer of an older version leaves out, and what they mean then.
WITHOUT_TRAILING_FIELDS: list[tuple[str, list[Any], Message]] = [
    ("client", ["get_stats"], m.GetStats(False)),
    ("client", ["hello", 1], m.Hello(1, 0)),
    ("client", ["submit", "r", "embed", {}], m.Submit("r", "embed", msgspec.Raw(b"\x80"), 0, "", -1)),
    ("frontend", ["admitted", [3], [0]], m.Admitted([3], [0], 0)),
    (
        "to_client",
        ["welcome", 1, "g", "m", "ipc://o", 256, 1000, ["generate"], 4096],
        m.Welcome(1, "g", "m", "ipc://o", 256, 1000, ("generate",), 4096, "none", 0, 0, (), 0),
    ),
    ("to_client", ["outputs", [["delta", "r", 0, "t", [5]]]], m.Outputs([m.Delta("r", 0, "t", [5])])),
    ("to_client", ["outputs", [["embedding", "r", b"", [1]]]], m.Outputs([m.Embedding("r", b"", [1], "stop", None)])),
    (
        "frontend",
        ["register", 3, b"c", "r", 0, "generate", [1], 9],
        m.Register(3, b"c", "r", 0, "generate", [1], 9, (), (), False, True, (), -1, 0, -1, True, False, "delta", 1),
    ),
    ("frontend", ["finish", 3, "abort"], m.Finish(3, "abort", None)),
    ("worker", ["adapter_loaded", 1, 0, 7], m.AdapterLoaded(1, 0, 7, None)),
    ("lora_changed", ["lora_changed", 4], m.LoraChanged(4, "", "")),
    ("control_peer", ["adapter_changed", 4, "a"], m.AdapterChanged(4, "a", "", "")),
    ("supervisor", ["shutdown"], m.Shutdown(None)),
    ("record_written", ["record_written", "/a"], m.RecordWritten("/a", "")),
    ("control_peer", ["drained"], m.Drained(0, 0)),
    ("control_peer", ["child_stats", 7, "ready", 3], m.ChildStats(7, "ready", 3, ())),
    ("control_peer", ["restart", "output"], m.Restart("output", None)),
    ("control_peer", ["end_group"], m.EndGroup(None)),
]


def name_of(value: object) -> str:
    return type(value).__name__ if isinstance(value, msgspec.Struct) else ""


def decoder_of(message: Message) -> Callable[[bytes], Message]:
    return next(decode for decode, kinds in DECODERS.values() if type(message) in kinds)


@pytest.mark.parametrize(("message", "data"), GOLDEN, ids=name_of)
def test_golden_bytes(message: Message, data: bytes) -> None:
    assert m.encode(message) == data
    assert decoder_of(message)(data) == message
    assert m.encode(decoder_of(message)(data)) == data


def test_every_message_has_golden_bytes_and_a_decoder() -> None:
    public = {
        value for name in m.__all__ if isinstance(value := getattr(m, name), type) and issubclass(value, msgspec.Struct)
    }
    inside_others = {m.Delta, m.Embedding, m.RequestTimes, m.TokenLogprobs, m.ProcessStatus}
    assert public - inside_others == {type(message) for message, _ in GOLDEN}
    assert public - inside_others == set().union(*(kinds for _, kinds in DECODERS.values()))


def test_tags_are_unique() -> None:
    tags = [msgspec.inspect.type_info(type(message)).tag for message, _ in GOLDEN]  # type: ignore[attr-defined]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("end", DECODERS)
def test_decoder_refuses_every_message_of_another_end(end: str) -> None:
    decode, kinds = DECODERS[end]
    foreign = [data for message, data in GOLDEN if type(message) not in kinds]
    assert len(foreign) == len(GOLDEN) - len(kinds)
    for data in foreign:
        with pytest.raises(msgspec.ValidationError):
            decode(data)


@pytest.mark.parametrize("end", DECODERS)
@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x90", b"\xc0", b"\x91\xa3who", b"\x80", b"\x91\x05", b"GET / HTTP/1.1", b"\x93\xa5hello"]
)
def test_garbage_is_a_decode_error_and_nothing_else(end: str, data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        DECODERS[end][0](data)


@pytest.mark.parametrize(("message", "data"), GOLDEN, ids=name_of)
def test_cut_and_trailing_bytes_are_refused(message: Message, data: bytes) -> None:
    decode = decoder_of(message)
    for end in range(len(data)):
        with pytest.raises(msgspec.DecodeError):
            decode(data[:end])
    with pytest.raises(msgspec.DecodeError, match="trailing"):
        decode(data + b"\x00")


@pytest.mark.parametrize(("end", "fields", "message"), WITHOUT_TRAILING_FIELDS, ids=str)
def test_missing_trailing_fields_have_defaults(end: str, fields: list[Any], message: Message) -> None:
    assert DECODERS[end][0](msgspec.msgpack.encode(fields)) == message


@pytest.mark.parametrize(("message", "data"), GOLDEN, ids=name_of)
def test_fields_of_a_newer_version_are_passed_over(message: Message, data: bytes) -> None:
    fields = msgspec.msgpack.decode(data)
    assert decoder_of(message)(msgspec.msgpack.encode([*fields, "new", 5])) == message


@pytest.mark.parametrize(
    ("end", "fields", "path"),
    [
        ("client", ["hello", "one"], r"\$\[1\]"),
        ("client", ["submit", 5, "generate", {}], r"\$\[1\]"),
        ("client", ["hello", True], r"\$\[1\]"),
        ("client", ["submit", "r", "generate"], "length"),
        ("worker", ["result", 1, 0, 5, 2, True, 3, 1000, [1.5]], r"\$\[8\]\[0\]"),
    ],
)
def test_wrong_types_are_refused_with_their_place(end: str, fields: list[Any], path: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=path):
        DECODERS[end][0](msgspec.msgpack.encode(fields))


def test_messages_are_frozen_and_unknown_to_the_garbage_collector() -> None:
    for message, _ in GOLDEN:
        config = type(message).__struct_config__
        assert config.frozen
        assert config.array_like
        assert not config.gc


def test_submitted_body_is_passed_on_undecoded() -> None:
    body = msgspec.msgpack.encode({"prompt": "x", "nested": [1, {"a": None}]})
    decoded = m.decode_from_client(m.encode(m.Submit("r", "generate", msgspec.Raw(body))))
    assert isinstance(decoded, m.Submit)
    assert bytes(decoded.body) == body


@pytest.mark.parametrize(
    ("message", "workflow"),
    [
        (m.StepInput(1, 0, 2, 1, 5, 2, 1, 4, 20, 3, -1, ()), "generate"),
        (m.EmbedInput(1, 0, 2, 5, 4, ()), "embed"),
        (m.StepResult(1, 0, 5, 2, True, 3, 1000, ()), "generate"),
        (m.EmbedResult(1, 0, 5, 2, 1000, ()), "embed"),
    ],
    ids=name_of,
)
def test_headers_say_whose_payload_they_carry(message: Message, workflow: str) -> None:
    assert message.workflow == workflow
