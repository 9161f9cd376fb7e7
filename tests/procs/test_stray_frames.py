"""Every socket of a group under bytes that are no message, and messages that are not for it: all is as before."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import numpy as np
import pytest
import zmq

from procengine import messages as m
from procengine.messages import encode
from procengine.step_payload import EMBED_SECTIONS, RESULT_SECTIONS, STEP_SECTIONS
from tests.mangling import mangled
from tests.procs.canary import Canary, ask_status
from tests.procs.harness import Served, as_ids, has_line
from tests.procs.raw_client import RawClient, body

CONTEXT: Final = 256
_CHUNK: Final = 2000
_FAR: Final = 1 << 40  # no key, step or epoch that there is


def words(count: int) -> bytes:
    return np.arange(count, dtype=np.int32).tobytes()


def _sizes(count: int, **named: int) -> tuple[int, ...]:
    sizes = [0] * count
    for at, size in named.items():
        sizes[int(at[1:])] = size
    return tuple(sizes)


_RESULT = m.StepResult(0, 77, _FAR, 0, True, 2, 5, _sizes(len(RESULT_SECTIONS), _0=4, _1=2, _2=2))
_STEP = m.StepInput(
    _FAR, 77, 2, 2, 2, 2, 1, 1, 9, 0, -1, _sizes(len(STEP_SECTIONS), _0=2, _1=3, _2=2, _3=2, _5=2, _6=2)
)
# Whole messages of every socket. What a stranger could really do harm with (a worker that says that it is ready, a
# request that nobody sent) is not among them: who can write there runs as the user whom the group belongs to.
WHOLE: Final[list[list[bytes]]] = [
    [encode(m.Hello(1))],
    [encode(m.Hello(999))],
    [encode(m.Submit("stray", "generate", msgspec.Raw(encode(body(as_ids(4))))))],
    [encode(m.Abort("x"))],
    [encode(m.GetStats())],
    [encode(m.Attach(1))],
    [encode(m.Attach(999))],
    [encode(m.TextStop(_FAR))],
    [encode(m.ClientGone(b"nobody"))],
    [encode(m.Resync(_FAR, 5))],
    [encode(m.Delivered([_FAR, _FAR + 1]))],
    [encode(m.Admitted([_FAR], [0], 5))],
    [encode(m.Admitted([_FAR], [0, 1], 5))],
    [encode(m.Finish(_FAR, "abort"))],
    [encode(m.Replay(_FAR, 3, [1, 2, 3]))],
    [encode(m.Resume(77))],
    [encode(m.Register(_FAR, b"nobody", "r", 0, "no such workflow", [1, 2], 9))],
    [encode(_RESULT), words(8)],
    [encode(m.EmbedResult(0, 77, _FAR, 1, 5, (2, 4, 0))), words(6)],
    [encode(_STEP), words(13)],
    [encode(m.EmbedInput(_FAR, 77, 1, 2, 2, _sizes(len(EMBED_SECTIONS), _0=2, _1=2, _2=2, _3=2))), words(8)],
    [encode(m.Ready("worker", 0, 1, {}))],
    [encode(m.Drained())],
    [encode(m.WorkerHung(0, 0))],
    [encode(m.ChildStats(1, "ready", 5))],
    [encode(m.GetStatus())],
    [encode(m.Query(1))],
    [encode(m.Drain(0.0))],
    [encode(m.Shutdown())],
    [encode(m.Stats({}))],
]
SOCKETS: Final = ("frontend", "output", "results", "feedback", "register", "text", "steps-0", "control")


def random_frames(rnd: random.Random) -> list[bytes]:
    """Whole, spoilt in one way, or noise."""
    frames = list(rnd.choice(WHOLE))
    match rnd.randrange(9):
        case 0:
            return [rnd.randbytes(rnd.choice([0, 1, 8, 60, 400])) for _ in range(rnd.choice([1, 1, 2, 3]))]
        case 1:
            frames[0] = frames[0][: rnd.randrange(len(frames[0]))]
        case 2:
            frames.insert(rnd.randint(0, len(frames)), rnd.randbytes(rnd.choice([0, 0, 4, 8, 50])))
        case 3:
            frames = frames[:1]
        case 4:
            frames[-1] = frames[-1][: rnd.randrange(len(frames[-1]) + 1)]
        case 5 if len(frames) > 1:
            frames[1] += rnd.randbytes(rnd.choice([1, 2, 3, 4, 400]))
        case 6:
            pass
        case _:
            frames[0] = mangled(rnd, frames[0])
    return frames or [b""]


@pytest.fixture
def group(serve: Callable[..., Served]) -> Served:
    return serve("--num-blocks", CONTEXT // 16, "--max-model-len", CONTEXT, "--mock-step-ms", 0, "--max-restarts", 0)


def doors_of(group: Served, context: zmq.Context[zmq.Socket[bytes]]) -> dict[str, zmq.Socket[bytes]]:
    """A socket to each of the group's; those of clients and the supervisor answer, the others only take."""
    doors = {}
    for name in SOCKETS:
        doors[name] = context.socket(zmq.DEALER if name in ("frontend", "output", "control") else zmq.PUSH)
        doors[name].setsockopt(zmq.LINGER, -1)
        doors[name].setsockopt(zmq.SNDHWM, 0)
        doors[name].connect(group.endpoint.replace("frontend.sock", f"{name}.sock"))
    return doors


@pytest.fixture
def doors(group: Served) -> Iterator[dict[str, zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield doors_of(group, context)
    context.destroy(linger=0)


@pytest.mark.parametrize("count", [20_000, pytest.param(240_000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_no_bytes_on_any_socket_change_anything(group: Served, doors: dict[str, zmq.Socket[bytes]], count: int) -> None:
    canary = Canary.of(group, CONTEXT - 1)
    rnd = random.Random(count)
    with RawClient(group.endpoint) as client:
        for start in range(0, count, _CHUNK):
            for _ in range(min(_CHUNK, count - start)):
                doors[rnd.choice(SOCKETS)].send_multipart(random_frames(rnd))
            drain(doors)
            group_answers(group, client)
        num_strays = client.stats()["num_stray_frames"]
    drain(doors, linger_ms=200)
    check = {role: group.log.count(f"procengine: {role}: dropped") for role in ("frontend", "output", "supervisor")}
    assert num_strays > count / len(SOCKETS) / 4
    assert all(check.values()) and has_line(group.log, "procengine: worker: dropped a message on socket steps: ")
    assert len(group.log.splitlines()) < 50, "each peer is in the log once"
    for door in doors.values():
        door.close(linger=0)
    canary.check()


def group_answers(group: Served, client: RawClient) -> None:
    """A request goes through all processes; so what was sent before has been read by all of them."""
    client.submit("beside", body(as_ids(5, 77), max_tokens=2))
    assert isinstance(client.wait_end("beside", 30.0), m.Delta)
    client.messages.clear()
    ask_status(group)
    assert group.process.poll() is None, group.log


def drain(doors: dict[str, zmq.Socket[bytes]], linger_ms: int = 0) -> None:
    for door in doors.values():
        while door.type == zmq.DEALER and door.poll(linger_ms):
            door.recv_multipart()


@pytest.mark.parametrize(
    "name", ["frontend", *(pytest.param(name, marks=pytest.mark.slow) for name in SOCKETS if name != "frontend")]
)
def test_an_oversize_frame_ends_its_connection_alone(group: Served, name: str) -> None:
    canary = Canary.of(group, CONTEXT - 1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        doors = doors_of(group, context)
        for frames in ([bytes(12 << 20)], [b"", bytes(12 << 20)], [bytes(9 << 20), bytes(9 << 20)]):
            doors[name].send_multipart(frames)
        with RawClient(group.endpoint) as client:
            group_answers(group, client)
    finally:
        context.destroy(linger=0)
    canary.check()


def test_a_time_that_no_clock_shows_is_refused(group: Served) -> None:
    canary = Canary.of(group, CONTEXT - 1)
    with RawClient(group.endpoint) as client:
        for number, sent_ns in enumerate((2**63, 2**64 - 1, -1)):
            client.send(m.Submit(f"r{number}", "generate", msgspec.Raw(encode(body(as_ids(4)))), sent_ns))
            end = client.wait_end(f"r{number}")
            assert isinstance(end, m.Rejected) and end.message.startswith("sent_ns: must be"), end
    canary.check()
