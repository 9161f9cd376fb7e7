"""All requests of a group, its pipelines, and the output process beside them: every request ends once, everywhere."""

from __future__ import annotations

import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from procengine.config import LimitsConfig
from procengine.engine import Engine, admitted_message
from procengine.errors import InvalidRequestError
from procengine.messages import (
    Admitted,
    Delta,
    EmbedResult,
    Finish,
    Register,
    Replay,
    StepResult,
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
LETTERS = [TOKENIZER.token_to_id(byte_alphabet()[ord(letter)]) or 0 for letter in "abcd "]


def letter_rule(seed: int, prefix: np.ndarray[tuple[int], np.dtype[np.int32]]) -> int:
    return LETTERS[zlib.crc32(prefix.tobytes(), seed) % len(LETTERS)]


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
        self.recent_results = [RecentResults() for _ in range(num_workers)]
        self.epochs = [0] * num_workers
        self.told: list[Register | Finish | Replay | Admitted | tuple[bytes, bytes]] = []

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
                    self.told.append(admitted_message(step, 0))
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
        self.recent_results[header.rank].add(*frames)
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
        self.told += self.recent_results[rank].take_all()
        self.told += self.engine.lose_worker(rank)
        self.epochs[rank] += 1
        self.workers[rank] = SimulatedWorker(self.limits, self.truth, rank=rank, epoch=self.epochs[rank])

    def restore_worker(self, rank: int) -> None:
        """The successor says that it is ready."""
        self.engine.restore_worker(rank, self.epochs[rank] - 1)  # too late: this one has died since
        self.engine.restore_worker(rank, self.epochs[rank])

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


class OutputSide:
    """The output process of a group: takes what the group has for it, when it is told to."""

    def __init__(self, group: Group) -> None:
        self.outputs = TextOutputs(TOKENIZER)
        self.deltas: dict[str, list[Delta]] = {}
        self.feedback: deque[int] = deque()
        self._group = group
        self._num_heard = 0
        self.num_replays = 0

    @property
    def has_heard_all(self) -> bool:
        return self._num_heard == len(self._group.told) and not self.feedback and not any(self._group.to_output)

    def hear(self) -> None:
        """One message of the frontend."""
        if self._num_heard == len(self._group.told):
            return
        message = self._group.told[self._num_heard]
        self._num_heard += 1
        match message:
            case Register():
                self.outputs.register(message)
            case Admitted(keys, counts):
                for key, count in zip(keys, counts, strict=True):
                    self.outputs.admit(key, count)
            case Finish(key, reason):
                ended = self.outputs.finish(key, reason)
                self._take(ended[1] if ended else [])
            case (_, _):  # a result again
                self._take_result(message)
            case Replay(key, position, token_ids):
                self.num_replays += 1
                self._ask_for(self.outputs.replay(key, position, token_ids))

    def take_result(self, rank: int) -> None:
        """One result of a worker."""
        if self._group.to_output[rank]:
            self._take_result(self._group.to_output[rank].popleft())

    def _take_result(self, frames: tuple[bytes, bytes]) -> None:
        self._ask_for(self.outputs.take_result(*decoded(frames)))

    def _ask_for(self, gaps: list[tuple[int, int]]) -> None:
        self._group.told += [self._group.engine.resync(key, position) for key, position in gaps]

    def flush(self) -> None:
        """Deltas to clients, ends by text to the frontend."""
        taken = self.outputs.take_items()
        self.feedback.extend(taken.text_stopped_keys)
        for items in taken.items_by_client.values():
            self._take(items)

    def tell(self) -> None:
        """One end by text reaches the frontend."""
        if self.feedback:
            self._group.engine.end(self.feedback.popleft(), "stop")

    def _take(self, items: Sequence[Any]) -> None:
        for delta in items:
            self.deltas.setdefault(delta.request_id, []).append(delta)


def submit_random(rng: random.Random, group: Group, name: str) -> Register:
    prompt = [rng.choice(LETTERS) for _ in range(rng.randint(1, 24))]
    stop = rng.choice(((), ("ab",), ("abc", "bcda", "c c")))
    return group.submit(name, prompt, seed=rng.randrange(99), stop=stop, max_tokens=rng.randint(1, 20))


def check_deltas(group: Group, register: Register, got: list[Delta], was_aborted: bool) -> None:
    assert [delta.finish_reason is not None for delta in got] == [False] * (len(got) - 1) + [True]
    text, tokens = "".join(delta.text for delta in got), [token for delta in got for token in delta.token_ids]
    wanted = expected(group, register)
    if got[-1].finish_reason == "abort":
        assert was_aborted
        assert wanted[1][: len(tokens)] == tokens
    else:
        assert (text, tokens, got[-1].finish_reason) == wanted


@pytest.mark.parametrize("seed", range(12))
def test_group_and_output_process_agree_in_whatever_order_messages_come(seed: int) -> None:
    run_at_random(seed, num_kills=0)


@pytest.mark.parametrize("seed", range(24))
def test_a_worker_that_dies_takes_no_token_with_it_and_doubles_none(seed: int) -> None:
    run_at_random(seed, num_kills=1 + seed % 4)


def run_at_random(seed: int, num_kills: int) -> None:
    rng = random.Random(seed)
    num_killed = 0
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

    shares: dict[Callable[[], object], int] = {
        kill: 1,
        restore: 3,
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
    assert bool(num_killed) == bool(num_kills)
    assert num_kills or not output.num_replays, "nothing was lost"
    assert group.engine.num_unfinished == output.outputs.num_unfinished == 0
    for name, register in registers.items():
        check_deltas(group, register, output.deltas[name], name in aborted)
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
        Admitted([0], [0]),
        Admitted([1], [32]),
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
    with pytest.raises(InvalidRequestError, match="has 65 tokens, one step embeds at most 64"):
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
