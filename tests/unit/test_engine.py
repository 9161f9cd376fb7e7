"""All requests of a group, its pipelines, and the output process beside them: every request ends once, everywhere."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from procengine.config import LimitsConfig
from procengine.delta_cursor import DeltaCursor
from procengine.embed_outputs import EmbedOutputs
from procengine.engine import Engine
from procengine.errors import InvalidRequestError
from procengine.messages import (
    Admitted,
    Delivered,
    Delta,
    EmbedResult,
    Finish,
    Register,
    Replay,
    Resume,
    StepResult,
    TextStop,
    TokenLogprobs,
    decode_from_frontend,
    decode_from_worker,
    encode,
)
from procengine.pipeline import Pipeline
from procengine.recent_results import RecentResults
from procengine.sampling_params import SamplingParams
from procengine.step_output import EmbedOutput, PassTimes, WorkerIdentity
from procengine.step_payload import EMBED_SECTIONS, cut_sections, join_int64
from procengine.text_outputs import TextOutputs
from procengine.workflows.embed import EmbedBody
from procengine.workflows.generate import GenerateBody
from procengine.workflows.parts import load_frontend_parts
from procengine.workflows.prompt import ModelFacts, Prepared
from tests.tiny_tokenizers import byte_alphabet, byte_level
from tests.unit.simulated_worker import SimulatedWorker, TrueSequences, limits

TOKENIZER = byte_level()
NO_LOGPROBS = TokenLogprobs((), (), ())
LETTERS = [TOKENIZER.token_to_id(byte_alphabet()[ord(letter)]) or 0 for letter in "abcd "]


def letter_rule(seed: int, prefix: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    return LETTERS[zlib.crc32(prefix.tobytes(), seed) % len(LETTERS)]


Told = Register | Finish | Replay | Admitted | Resume | tuple[bytes, bytes]


class Group:
    """An engine with simulated workers, and queues where sockets would be. Nothing moves unless it is told to."""

    def __init__(self, num_workers: int = 1, depth: int = 2, **changes: int | bool) -> None:
        own = limits(**changes)
        self.limits = own
        self.truth = TrueSequences(letter_rule)
        self.workers = [SimulatedWorker(own, self.truth, rank=rank) for rank in range(num_workers)]
        parts = {name: load_frontend_parts(name) for name in ("generate", "embed")}
        pipelines = [
            Pipeline(rank, lambda: {name: part.planner(own) for name, part in parts.items()}, depth)
            for rank in range(num_workers)
        ]
        facts = ModelFacts(1000, own.max_model_len, own.pool_tokens, own.max_num_batched_tokens, (), LimitsConfig())
        self.engine = Engine(parts, pipelines, facts)
        self.to_frontend: deque[tuple[bytes, bytes]] = deque()
        self.to_output: list[deque[tuple[bytes, bytes]]] = [deque() for _ in range(num_workers)]
        self.recent_results = RecentResults()
        self.epochs = [0] * num_workers
        self.told: list[Told] = []
        self.num_to_show = 0  # results to show to the output process, too: it may have been killed with them

    def submit(self, name: str, prompt: list[int], client: bytes = b"c", seed: int = 0, **params: Any) -> Register:
        body = GenerateBody(prompt_token_ids=prompt, sampling_params=SamplingParams(**params))
        registers = self.engine.accept("generate", body, Prepared(prompt), client, name, seed)
        for register in registers:
            self.truth.add(register.key, np.array(prompt, np.int32), seed + register.index)
        self.told += registers
        return registers[0]

    def pump(self) -> list[int]:
        """Send what can be sent; returns the ranks it went to."""
        ranks = []
        for pipeline in self.engine.pipelines:
            while (step := pipeline.next_step()) is not None:
                ranks.append(pipeline.rank)
                if step.admitted:
                    self.told.append(self.engine.admitted(step, 0))
                for frames in self._results(pipeline.rank, step.header, step.payload):
                    self.to_frontend.append(frames)
                    self.to_output[pipeline.rank].append(frames)
        for pipeline in self.engine.pipelines:
            scheduler: Any = pipeline.planners["generate"]
            scheduler.scheduler.check_integrity()
        return ranks

    def receive(self) -> bool:
        """One result to the frontend."""
        if not self.to_frontend:
            return False
        frames = self.to_frontend.popleft()
        header, payload = decoded(frames)
        self.recent_results.add(header.rank, *frames)
        if self.num_to_show:
            self.num_to_show -= 1
            self.told.append(frames)
        self.engine.apply(header, payload)
        return True

    def kill_worker(self, rank: int, rng: random.Random) -> None:
        """It dies, and the newest of what it sent with it: of what reached the frontend, the output process may miss
        some; of what did not reach the frontend, it misses all. What did is taken in, then the frontend hears of it.
        """
        unheard = [frames for frames in self.to_frontend if decoded(frames)[0].rank == rank]
        lost = unheard[rng.randint(0, len(unheard)) :]
        self.to_frontend = deque(f for f in self.to_frontend if not any(f is gone for gone in lost))
        shown = [f for f in self.to_output[rank] if not any(f is gone for gone in lost)]
        self.to_output[rank] = deque(shown[: rng.randint(0, len(shown))])
        while self.receive():
            pass
        self.told += self.recent_results.of_worker(rank)
        self.told += self.engine.lose_worker(rank, self.epochs[rank])
        self.epochs[rank] += 1
        self.workers[rank] = SimulatedWorker(self.limits, self.truth, rank=rank, epoch=self.epochs[rank])

    def restore_worker(self, rank: int) -> None:
        """The successor says that it is ready."""
        self.engine.restore_worker(rank, self.epochs[rank] - 1)  # too late: this one has died since
        self.engine.restore_worker(rank, self.epochs[rank])

    def resume_output(self, num_heard: int, rng: random.Random) -> None:
        """The frontend hears that the output process is gone, which has heard so much: all that it has not is lost, and
        so are some of the results it was sent. What has come from the workers is taken in before it is told again."""
        for _ in range(rng.randint(0, len(self.to_frontend))):
            self.receive()
        for results in self.to_output:
            for _ in range(rng.randint(0, len(results))):
                results.popleft()
        del self.told[num_heard:]
        for message in self.engine.resume_output(self.recent_results):
            self.told.append(decode_from_frontend(message) if isinstance(message, bytes) else message)
        self.told.append(Resume(1))
        self.num_to_show = len(self.to_frontend)

    def run(self) -> None:
        while self.pump() or self.receive():
            pass
        assert self.engine.num_unfinished == 0

    def _results(self, rank: int, header: Any, payload: Any) -> list[tuple[bytes, bytes]]:
        if header.workflow == "generate":
            return list(self.workers[rank].run(encode(header), payload.tobytes()))
        sections = cut_sections(EMBED_SECTIONS, header.sizes, payload)
        keys = join_int64(sections["key_words"])
        vectors = np.ones((keys.size, 2), np.float32)
        output = EmbedOutput(header.step_id, keys, lambda: vectors, PassTimes(0, 0, 0, 0))
        result, data = output.to_message(WorkerIdentity(rank, 0), vectors)
        return [(encode(result), data.tobytes())]


def decoded(frames: tuple[bytes, bytes]) -> tuple[Any, Any]:
    header = decode_from_worker(frames[0])
    assert isinstance(header, StepResult | EmbedResult)
    return header, np.frombuffer(frames[1], np.int32)


def expected(group: Group, register: Register) -> tuple[str, list[int], str]:
    """Text, tokens and finish reason by the rules alone: `str.find` on the unstopped text."""
    count = len(register.prompt_token_ids)
    tokens = group.truth.first(register.key, register.end_position)[count:].tolist()
    text = "".join("abcd "[LETTERS.index(token)] for token in tokens)
    ends = [text.find(stop) + len(stop) for stop in register.stop if stop in text]
    if not ends:
        return text, tokens, "length"
    end = min(ends)
    longest = max(len(stop) for stop in register.stop if text[:end].endswith(stop))
    return text[: end - longest], tokens[:end], "stop"


class ModelClient:
    """Follows the rule for deltas that repeat what came before."""

    def __init__(self) -> None:
        self.deltas: dict[str, list[Delta]] = {}
        self._cursors: dict[str, DeltaCursor] = {}

    def expect(self, name: str, *, is_cumulative: bool) -> None:
        self._cursors[name] = DeltaCursor(is_cumulative=is_cumulative)

    def take(self, delta: Delta) -> None:
        new = self._cursors.setdefault(delta.request_id, DeltaCursor()).take(delta)
        if new is not None:
            self.deltas.setdefault(delta.request_id, []).append(new)


class OutputSide:
    """The output process of a group: takes what the group has for it, when it is told to. It may die."""

    def __init__(self, group: Group) -> None:
        self.outputs = TextOutputs(TOKENIZER)
        self.client = ModelClient()
        self.feedback: deque[TextStop | Delivered] = deque()
        self.to_client: deque[Delta] = deque()
        self.is_dead = False
        self._has_resumed = True
        self._ended_items: list[Any] = []
        self._group = group
        self._num_heard = 0
        self.num_replays = 0

    @property
    def has_heard_all(self) -> bool:
        is_busy = self.is_dead or self.feedback or self.to_client or any(self._group.to_output)
        return self._num_heard == len(self._group.told) and not is_busy

    def hear(self) -> None:
        """One message of the frontend."""
        if self.is_dead or self._num_heard == len(self._group.told):
            return
        message = self._group.told[self._num_heard]
        self._num_heard += 1
        match message:
            case Register():
                self._ask_for(self.outputs.register(message))
            case Admitted(keys, counts, _, num_preemptions):
                for admission in zip(keys, counts, num_preemptions, strict=True):
                    self.outputs.admit(*admission)
            case Finish(key, reason, error):
                ended = self.outputs.finish(key, reason, error)
                self._ended_items += ended[1] if ended else []
            case (_, _):  # a result again
                self._take_result(message)
            case Replay(key, position, token_ids):
                self.num_replays += 1
                self._ask_for(self.outputs.replay(key, position, token_ids))
            case Resume():
                self._has_resumed = True

    def take_result(self, rank: int) -> None:
        """One result of a worker."""
        if self._group.to_output[rank] and not self.is_dead and self._has_resumed:
            self._take_result(self._group.to_output[rank].popleft())

    def _take_result(self, frames: tuple[bytes, bytes]) -> None:
        self._ask_for(self.outputs.take_result(*decoded(frames)))

    def _ask_for(self, gaps: list[tuple[int, int]]) -> None:
        while gaps and self._group.receive():  # what the worker sent before it sent what shows the gap
            pass
        self._group.told += [self._group.engine.resync(key, position) for key, position in gaps]

    def flush(self) -> None:
        """Deltas to clients, ends to the frontend."""
        if self.is_dead or not self._has_resumed:
            return
        self.to_client.extend(self._ended_items)
        self._ended_items = []
        taken = self.outputs.take_items()
        self.feedback.extend(map(TextStop, taken.text_stopped_keys))
        for items in taken.items_by_client.values():
            self.to_client.extend(items)  # type: ignore[arg-type]
        if taken.ended:
            self.feedback.append(Delivered([ended.key for ended in taken.ended]))

    def tell(self) -> None:
        """One message reaches the frontend."""
        if not self.feedback:
            return
        match self.feedback.popleft():
            case TextStop(key):
                self._group.engine.end(key, "stop")
            case Delivered(keys):
                self._group.engine.deliver(keys)

    def deliver(self) -> None:
        """One message reaches its client."""
        if self.to_client:
            self.client.take(self.to_client.popleft())

    def die(self, rng: random.Random) -> None:
        """What it sent last does not leave it, whoever it was for."""
        self.is_dead, self._has_resumed = True, False
        for _ in range(rng.randint(0, len(self.to_client))):
            self.deliver()
        self.to_client.clear()
        self._ended_items.clear()
        for _ in range(rng.randint(0, len(self.feedback))):
            self.feedback.pop()

    def be_replaced(self, rng: random.Random) -> None:
        """The frontend hears of the death, and tells the successor all it needs."""
        if self.is_dead:
            self._group.resume_output(self._num_heard, rng)
            self.outputs = TextOutputs(TOKENIZER)
            self.is_dead = False


def submit_random(rng: random.Random, group: Group, name: str) -> Register:
    prompt = [rng.choice(LETTERS) for _ in range(rng.randint(1, 24))]
    params: dict[str, Any] = {
        "stop": rng.choice(((), ("ab",), ("abc", "bcda", "c c"))),
        "max_tokens": rng.randint(1, 20),
        "logprobs": rng.choice((None, 0)),
        "output_kind": rng.choice(("delta", "delta", "cumulative", "final")),
    }
    return group.submit(name, prompt, seed=rng.randrange(99), **params)


def check_deltas(group: Group, register: Register, got: list[Delta], *, was_aborted: bool, may_miss: bool) -> None:
    assert [delta.finish_reason is not None for delta in got] == [False] * (len(got) - 1) + [True]
    if register.output_kind == "cumulative":
        for before, after in itertools.pairwise(got):
            assert (after.text.startswith(before.text), after.token_ids[: len(before.token_ids)]) == (
                True,
                before.token_ids,
            )
        got = got[-1:]
    assert register.output_kind != "final" or len(got) == 1
    text, tokens = "".join(delta.text for delta in got), [token for delta in got for token in delta.token_ids]
    check_logprobs(register, tokens, [at for delta in got for at in delta.logprobs or ()], may_miss=may_miss)
    wanted = expected(group, register)
    if got[-1].error:
        assert may_miss and got[-1].error == "the worker died 3 times while this request was running"
        assert wanted[1][: len(tokens)] == tokens
    elif got[-1].finish_reason == "abort":
        assert was_aborted
        assert wanted[1][: len(tokens)] == tokens
    else:
        assert (text, tokens, got[-1].finish_reason) == wanted


def check_logprobs(register: Register, tokens: list[int], got: list[TokenLogprobs], *, may_miss: bool) -> None:
    """One a token: its position, as the simulated worker has it. `may_miss`: or nothing."""
    if register.num_logprobs < 0:
        assert not got
        return
    count = len(register.prompt_token_ids)
    assert len(got) == len(tokens)
    for position, (token, at) in enumerate(zip(tokens, got, strict=True), count):
        assert at == TokenLogprobs((token,), (-float(position),), (1,)) or (may_miss and at == NO_LOGPROBS)


@pytest.mark.parametrize("seed", range(12))
def test_group_and_output_process_agree_in_whatever_order_messages_come(seed: int) -> None:
    run_at_random(seed, num_kills=0)


@pytest.mark.parametrize("seed", range(24))
def test_a_worker_that_dies_takes_no_token_with_it_and_doubles_none(seed: int) -> None:
    run_at_random(seed, num_kills=1 + seed % 4)


@pytest.mark.parametrize("seed", range(40))
def test_an_output_process_that_dies_leaves_no_gap_and_nothing_twice(seed: int) -> None:
    run_at_random(seed, num_kills=0, num_output_kills=1 + seed % 5)


@pytest.mark.parametrize("seed", range(24))
def test_workers_and_output_processes_may_die_in_turns(seed: int) -> None:
    run_at_random(seed, num_kills=1 + seed % 3, num_output_kills=1 + seed % 4)


def run_at_random(seed: int, num_kills: int, num_output_kills: int = 0) -> None:  # noqa: C901 - one action a function
    rng = random.Random(seed)
    num_killed = num_output_killed = 0
    group = Group(
        num_workers=1 + seed % 2,
        depth=1 + seed % 3,
        decode_steps=rng.choice((1, 4)),
        block_size=4,
        num_blocks=rng.choice((12, 20, 200)),
        max_model_len=44,
        max_num_batched_tokens=rng.choice((8, 64)),
    )
    output = OutputSide(group)
    registers: dict[str, Register] = {}
    aborted: set[str] = set()

    def submit() -> None:
        if len(registers) < 16:
            name = str(len(registers))
            registers[name] = submit_random(rng, group, name)
            output.client.expect(name, is_cumulative=registers[name].output_kind == "cumulative")

    def abort() -> None:
        name = str(rng.randrange(16))
        if finishes := group.engine.abort(b"c", name):
            group.told += finishes
            aborted.add(name)

    def kill() -> None:
        nonlocal num_killed
        if num_killed < num_kills and len(registers) > 4:
            num_killed += 1
            group.kill_worker(rng.randrange(len(group.workers)), rng)

    def restore() -> None:
        group.restore_worker(rng.randrange(len(group.workers)))

    def kill_output() -> None:
        nonlocal num_output_killed
        if num_output_killed < num_output_kills and len(registers) > 4 and not output.is_dead:
            num_output_killed += 1
            output.die(rng)

    shares: dict[Callable[[], object], int] = {
        kill: 2,
        restore: 3,
        kill_output: 3,
        lambda: output.be_replaced(rng): 3,
        output.deliver: 7,
        submit: 10,
        abort: 1,
        group.pump: 28,
        group.receive: 20,
        output.hear: 10,
        lambda: output.take_result(rng.randrange(len(group.workers))): 20,
        output.tell: 5,
        output.flush: 6,
    }
    for action in itertools.chain.from_iterable(
        rng.choices(list(shares), list(shares.values())) for _ in range(50_000)
    ):
        action()
        is_over = len(registers) == 16 and not group.engine.num_unfinished and not group.to_frontend
        if is_over and output.has_heard_all:
            break
    output.flush()
    while output.to_client:
        output.deliver()
    while output.feedback:
        output.tell()
    assert (bool(num_killed), bool(num_output_killed)) == (bool(num_kills), bool(num_output_kills))
    assert num_kills or num_output_kills or not output.num_replays, "nothing was lost"
    assert group.engine.num_undelivered == 0
    assert group.engine.num_unfinished == output.outputs.num_unfinished == 0
    for name, register in registers.items():
        check_deltas(group, register, output.client.deltas[name], was_aborted=name in aborted, may_miss=bool(num_kills))
    for pipeline in group.engine.pipelines:
        planner: Any = pipeline.planners["generate"]
        assert planner.scheduler.pool.num_used == 0


def test_keys_are_never_used_again_and_a_refused_request_costs_none() -> None:
    group = Group()
    assert group.submit("a", [1], max_tokens=1).key == 0
    with pytest.raises(InvalidRequestError):
        group.submit("b", [5000])
    assert group.engine.num_unfinished == 1
    group.run()
    assert group.submit("a", [1], max_tokens=1).key == 1


def test_name_is_free_again_when_its_request_ended() -> None:
    group = Group()
    group.submit("a", [1], client=b"x", max_tokens=2)
    assert group.engine.is_running(b"x", "a")
    assert not group.engine.is_running(b"y", "a")
    group.submit("a", [1], client=b"y", max_tokens=2)
    assert group.engine.is_running(b"x", "a")
    assert group.engine.is_running(b"y", "a")
    assert group.engine.num_unfinished == 2
    group.run()
    assert not group.engine.is_running(b"x", "a")


def test_abort_ends_a_request_once() -> None:
    group = Group()
    register = group.submit("a", [1], max_tokens=9)
    group.pump()
    assert group.engine.abort(b"other", "a") == []
    assert group.engine.abort(b"c", "a") == [Finish(register.key, "abort", None)]
    assert group.engine.abort(b"c", "a") == []
    assert group.engine.end(register.key, "stop") is None
    group.run()


def test_requests_of_a_client_or_all_end_together() -> None:
    group = Group()
    for name, client in (("a", b"x"), ("b", b"y"), ("c", b"x"), ("d", b"z")):
        group.submit(name, [1], client=client, max_tokens=9)
    group.pump()
    assert [finish.key for finish in group.engine.abort_client(b"x")] == [0, 2]
    assert group.engine.abort_client(b"x") == []
    assert [finish.key for finish in group.engine.abort_all()] == [1, 3]
    group.run()


def test_end_with_an_error_says_why() -> None:
    group = Group()
    register = group.submit("a", [1])
    assert group.engine.end(register.key, "error", "why") == Finish(register.key, "error", "why")


def test_lost_result_is_replayed_from_the_history() -> None:
    group, output = Group(), TextOutputs(TOKENIZER)
    register = group.submit("a", [LETTERS[0]], max_tokens=8)
    output.register(register)
    gaps = []
    for count in range(8):
        group.pump()
        frames = group.to_output[0].popleft()
        if count != 3:
            gaps = output.take_result(*decoded(frames))
        if gaps:
            answer = group.engine.resync(*gaps[0])
            assert isinstance(answer, Replay)
            assert answer.position == 1 + 3
            output.replay(answer.key, answer.position, answer.token_ids)
            gaps = []
            assert output.take_result(*decoded(frames)) == [], "the replay brought it"
        group.receive()
    (delta,) = output.take_items().items_by_client[b"c"]
    assert isinstance(delta, Delta)
    assert (delta.text, delta.token_ids, delta.finish_reason) == expected(group, register)


def test_resync_of_a_request_that_is_gone_is_an_error_and_not_silence() -> None:
    group = Group()
    register = group.submit("a", [1], max_tokens=2)
    group.run()
    tokens = group.truth.first(register.key, 3)[1:].tolist()
    assert group.engine.resync(register.key, 1) == Replay(register.key, 1, tokens), "it may have ended just now"
    answer = group.engine.resync(register.key + 1, 1)
    assert answer == Finish(register.key + 1, "error", "tokens of this request were lost")


def retell(group: Group, outputs: TextOutputs | EmbedOutputs) -> list[Any]:
    """What a new output process makes of what it is told: all items of its clients."""
    items: list[Any] = []
    for message in group.engine.resume_output(group.recent_results):
        if not isinstance(message, bytes):
            outputs.take_result(*decoded(message))
            continue
        match decode_from_frontend(message):
            case Register() as register:
                outputs.register(register)
            case Replay(key, position, token_ids):
                outputs.replay(key, position, token_ids)
            case Finish(key, reason, error):
                ended = outputs.finish(key, reason, error)
                items += ended[1] if ended else []
            case _:
                pass
    return items + [item for taken in outputs.take_items().items_by_client.values() for item in taken]


def test_a_new_output_process_ends_everything_that_has_ended_each_in_its_way() -> None:
    group = Group()
    unstopped = group.submit("a", [LETTERS[0]], max_tokens=40)
    text = expected(group, unstopped)[0]
    by_length = group.submit("length", [LETTERS[1]], max_tokens=3, logprobs=0)
    by_text = group.submit("text", [LETTERS[0]], max_tokens=40, stop=text[10:13])
    group.submit("aborted", [LETTERS[2]], max_tokens=40)
    running = group.submit("running", [LETTERS[3]], max_tokens=40)
    for _ in range(20):
        group.pump()
        group.receive()
    assert group.engine.end(by_text.key, "stop")
    assert group.engine.abort(b"c", "aborted")
    items = retell(group, TextOutputs(TOKENIZER))
    ends = {item.request_id: item.finish_reason for item in items}
    assert ends == {"a": None, "length": "length", "text": "stop", "aborted": "abort", "running": None}
    by_name = {item.request_id: item for item in items}
    assert (by_name["length"].text, by_name["length"].token_ids, "length") == expected(group, by_length)
    assert (by_name["text"].text, by_name["text"].token_ids, "stop") == expected(group, by_text)
    assert by_name["running"].text and expected(group, running)[0].startswith(by_name["running"].text)


def test_a_request_whose_end_cannot_be_told_again_ends_with_an_error() -> None:
    """Its vector is not among the newest results any more, or the tokens that made its stop string are nowhere."""
    group = Group()
    group.engine.accept("embed", EmbedBody(prompt_token_ids=[1]), Prepared([1]), b"c", "e", 0)
    group.run()
    assert [len(item.data) for item in retell(group, EmbedOutputs(TOKENIZER))] == [8]
    group.recent_results = RecentResults()
    (end,) = retell(group, EmbedOutputs(TOKENIZER))
    assert (end.finish_reason, end.error, end.data) == ("error", "the results of this request were lost", b"")

    group = Group()
    register = group.submit("r", [1], stop=("zz",))
    assert group.engine.end(register.key, "stop")
    (end,) = retell(group, TextOutputs(TOKENIZER))
    assert (end.finish_reason, end.error) == ("error", "the results of this request were lost")


def test_a_request_at_whose_text_output_processes_die_ends_and_is_not_told_again() -> None:
    group = Group()
    bad, _ = (group.submit(name, [LETTERS[0]], max_tokens=40) for name in ("bad", "good"))
    for _ in range(6):
        group.pump()
        group.receive()
    group.engine.blame_for_output_death(bad.key)
    assert {item.request_id: item.finish_reason for item in retell(group, TextOutputs(TOKENIZER))} == {
        "bad": None,
        "good": None,
    }
    group.engine.blame_for_output_death(bad.key)
    assert not group.engine.is_running(b"c", "bad")
    items = {item.request_id: item for item in retell(group, TextOutputs(TOKENIZER))}
    assert (items["bad"].finish_reason, items["bad"].text, items["bad"].token_ids) == ("error", "", [])
    assert "output process died" in str(items["bad"].error)
    assert items["good"].finish_reason is None and items["good"].token_ids
    group.engine.deliver([bad.key])
    group.run()
    assert group.engine.num_unfinished == 0


def test_a_request_whose_end_was_not_delivered_may_be_the_cause_too() -> None:
    group = Group()
    bad = group.submit("bad", [1], max_tokens=2)
    group.run()
    assert group.engine.num_undelivered == 1
    for key in (bad.key, bad.key, 77, 77):
        group.engine.blame_for_output_death(key)
    (end,) = retell(group, TextOutputs(TOKENIZER))
    assert (end.request_id, end.finish_reason) == ("bad", "error")


# --- which worker


def test_requests_spread_over_workers_by_load() -> None:
    group = Group(num_workers=2)
    for count in range(6):
        group.submit(str(count), [count + 1], max_tokens=5)
    assert [pipeline.num_unfinished for pipeline in group.engine.pipelines] == [3, 3]
    assert set(group.pump()) == {0, 1}
    group.run()


def test_request_goes_where_its_prefix_is_cached_even_if_that_worker_is_busier() -> None:
    group = Group(num_workers=2)
    long_prompt = [letter for letter in LETTERS for _ in range(8)]
    group.submit("a", [1, 2], max_tokens=1)  # worker 0
    group.submit("b", long_prompt, max_tokens=1)  # worker 1
    group.run()
    for name in "cde":
        group.submit(name, [*long_prompt, 1], max_tokens=4)
    assert [pipeline.num_unfinished for pipeline in group.engine.pipelines] == [0, 3]
    group.run()


def test_admitted_message_tells_who_starts_and_how_much_was_cached() -> None:
    group = Group()
    prompt = [5] * 40
    group.submit("a", prompt, max_tokens=1)
    group.run()
    group.submit("b", prompt, max_tokens=1)
    group.run()
    assert [message for message in group.told if isinstance(message, Admitted)] == [
        Admitted([0], [0], 0, (0,)),
        Admitted([1], [32], 0, (0,)),
    ]


# --- embed


def test_embed_requests_are_batched_by_tokens_and_rows_and_keep_their_order() -> None:
    group = Group(max_num_seqs=3, max_num_batched_tokens=64, depth=1)
    for name, length in enumerate((40, 20, 30, 1, 1, 1, 1)):
        group.engine.accept(
            "embed", EmbedBody(prompt_token_ids=[1] * length), Prepared([1] * length), b"c", str(name), 0
        )
    keys = []
    while group.pump():
        header, payload = decoded(group.to_output[0].popleft())
        keys.append(join_int64(payload[: header.sizes[0]]).tolist())
        group.receive()
    assert keys == [[0, 1], [2, 3, 4], [5, 6]]
    assert group.engine.num_unfinished == 0


def test_embed_prompt_that_fits_no_step_is_refused_with_both_numbers() -> None:
    group = Group(max_num_batched_tokens=64)
    body = EmbedBody(prompt_token_ids=[1] * 65)
    with pytest.raises(InvalidRequestError, match="has 65 tokens, one step takes at most 64"):
        group.engine.accept("embed", body, Prepared([1] * 65), b"c", "a", 0)
    (register,) = group.engine.accept("embed", body, Prepared([1] * 64), b"c", "a", 0)
    assert register.workflow == "embed"


def test_aborted_embed_requests_do_not_run_or_end_twice() -> None:
    group = Group(max_num_batched_tokens=64, depth=1)
    for name in "abc":
        group.engine.accept("embed", EmbedBody(prompt_token_ids=[1] * 40), Prepared([1] * 40), b"c", name, 0)
    group.pump()
    assert group.engine.abort(b"c", "a") == [Finish(0, "abort", None)]  # under way
    assert group.engine.abort(b"c", "b") == [Finish(1, "abort", None)]  # waiting
    group.run()
    assert group.engine.pipelines[0].num_steps == 2
    assert group.engine.pipelines[0].num_unfinished == 0


def test_embed_and_generate_share_a_worker() -> None:
    group = Group(depth=2)
    group.submit("g", [1, 2, 3], max_tokens=20)
    for name in range(5):
        group.engine.accept("embed", EmbedBody(prompt_token_ids=[1] * 40), Prepared([1] * 40), b"c", f"e{name}", 0)
    group.run()
    assert group.engine.pipelines[0].num_steps == 20 + 5
