"""What tests of running groups are made of: a tiny model, a group in its own processes, and a look at those.

Nothing here sleeps and hopes: `wait_until` polls a condition up to a deadline and says what did not come true.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from procengine.client import Client
from procengine.mock_runner import mock_token

__all__ = [
    "EOS",
    "MAX_MODEL_LEN",
    "NUM_SPECIAL",
    "PATIENCE_S",
    "VOCAB_SIZE",
    "Served",
    "as_ids",
    "children_of",
    "cli",
    "cpu_seconds",
    "descendants",
    "finish",
    "has_line",
    "is_running",
    "key_of",
    "make_model",
    "num_open_fds",
    "tokens_of",
    "wait_until",
]

NUM_SPECIAL = 64  # mock tokens start behind them, so that none ends a text by chance
_MODULUS = 4093  # a prime: a token and its position tell the request's key, for the first 4093 requests of a group
VOCAB_SIZE = NUM_SPECIAL + _MODULUS
MAX_MODEL_LEN = 2048
EOS = 2
_CLI = "import sys; from procengine.cli.main import main; sys.exit(main())"
PATIENCE_S = 60.0  # for what comes at once, unless others want the cores: only a failure waits so long

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], timeout_s: float = PATIENCE_S) -> T:
    """Poll until `condition()` is true and return it; fail with `what` after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline_s:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"within {timeout_s:g} s this did not come true: {text}")
        time.sleep(0.005)


# --- the mock device's arithmetic


def tokens_of(key: int, num_prompt_tokens: int, count: int) -> list[int]:
    """What request `key` must yield after a prompt of that length."""
    return [int(mock_token(key, num_prompt_tokens + at, VOCAB_SIZE)) for at in range(count)]


def key_of(token_id: int, position: int) -> int:
    """Whose token this is: the inverse of `mock_token` for keys below 4093."""
    rest = token_id - NUM_SPECIAL - int(mock_token(0, position, VOCAB_SIZE)) + NUM_SPECIAL
    step = int(mock_token(1, 0, VOCAB_SIZE)) - int(mock_token(0, 0, VOCAB_SIZE))
    return rest * pow(step, -1, _MODULUS) % _MODULUS


# --- a model without weights


def make_model(
    folder: Path, *, chat_template: bool = True, max_position_embeddings: int = MAX_MODEL_LEN, **changes: object
) -> Path:
    """A Hugging Face folder: 64 special tokens, 256 bytes, then pairs of printable characters; no tensor. `changes`
    override values of config.json."""
    folder.mkdir(parents=True)
    specials = ["<s>", "<|im_start|>", "<|im_end|>", *(f"<|{number}|>" for number in range(3, NUM_SPECIAL))]
    printable = [chr(code) for code in range(0x21, 0x7F)]
    pairs = (a + b for a in printable for b in printable)
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [pair for pair, _ in zip(pairs, range(VOCAB_SIZE - len(tokens)), strict=False)]
    backend = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in specials])
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": max_position_embeddings,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "dtype": "float32",
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", **({"chat_template": template} if chat_template else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")  # an empty header: no tensor
    return folder


# --- processes, as /proc shows them


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie; one whose first thread is gone may still hold files and locks."""
    if _status(pid).get("State", "X")[0] not in "XZ":
        return True
    try:
        return len(list(Path(f"/proc/{pid}/task").iterdir())) > 1
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`, by /proc/*/status."""
    entries = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [entry for entry in entries if _status(entry).get("PPid") == str(pid)]


def descendants(pid: int) -> list[int]:
    """Children, their children, and so on."""
    found: list[int] = []
    for child in children_of(pid):
        found += [child, *descendants(child)]
    return found


def num_open_fds(pid: int) -> int:
    """Open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def cpu_seconds(pid: int) -> float:
    """User and system time so far, with the scheduler's clock (ns), not in ticks of 10 ms."""
    return sum(int((task / "schedstat").read_text().split()[0]) for task in Path(f"/proc/{pid}/task").iterdir()) / 1e9


def _status(pid: int) -> dict[str, str]:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# --- groups


def cli(*arguments: object) -> list[str]:
    """The command line as a subprocess."""
    return [sys.executable, "-P", "-c", _CLI, *map(str, arguments)]


def finish(process: subprocess.Popen[bytes], timeout_s: float = 10.0) -> int:
    """Wait for the end of a process of ours; kill it and fail if it does not come."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"process {process.pid} was still running after {timeout_s:g} s") from None


class Served:
    """A group run by `procengine serve`, with its output in files. `stop` ends it, whatever state it is in."""

    def __init__(
        self,
        model: Path,
        folder: Path,
        *options: object,
        name: str | None = "g",
        env: dict[str, str] | None = None,
        max_files: int | None = None,
    ) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        named = () if name is None else ("--name", name)
        limits = () if max_files is None else ("bash", "-c", f'ulimit -n {max_files} && exec "$@"', "--")
        self.pids: dict[str, int] = {}
        self.ready: dict[str, Any] = {}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*limits, *cli("serve", model, "--device", "mock", *named, *options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | (env or {}),
            )

    def wait_ready(self) -> Self:
        """Until the ready line is there."""
        event = self.next_event()
        assert event["event"] == "ready", event
        self.ready = event
        self.pids = event["pids"]
        return self

    def next_event(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """The next JSON line of its stdout."""
        assert self.process.stdout is not None
        line = b""
        deadline_s = time.monotonic() + timeout_s
        while not line.endswith(b"\n"):
            left_s = max(0.0, deadline_s - time.monotonic())
            readable, _, _ = select.select([self.process.stdout], [], [], left_s)
            data = os.read(self.process.stdout.fileno(), 1 << 16) if readable else b""
            assert data, f"no line on stdout; its log:\n{self.log}"
            line += data
        return dict(json.loads(line))

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return str(self.ready["endpoint"])

    @property
    def log(self) -> str:
        """All that it wrote to stderr."""
        return self.log_path.read_text(errors="replace")

    @property
    def pid(self) -> int:
        """The supervisor's."""
        return self.process.pid

    def client(self) -> Client:
        """A new connection."""
        return Client(self.endpoint)

    def signal(self, number: signal.Signals) -> None:
        """To the supervisor."""
        self.process.send_signal(number)

    @contextlib.contextmanager
    def paused(self, *roles: str) -> Iterator[None]:
        """SIGSTOP these processes for a while."""
        try:
            for role in roles:
                os.kill(self.pids[role], signal.SIGSTOP)
            yield
        finally:
            for role in roles:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pids[role], signal.SIGCONT)

    def finish(self, timeout_s: float = 10.0) -> int:
        """Wait for its end by itself, and see that nothing is left. Returns the exit status."""
        status = finish(self.process, timeout_s)
        self.expect_gone()
        return status

    def expect_gone(self, timeout_s: float = 10.0) -> None:
        """No process of the group is left."""
        pids = self.pids.values()
        wait_until(lambda: not any(map(is_running, pids)), f"the processes {self.pids} are gone", timeout_s)

    def stop(self) -> None:
        """End it now, if it runs, with everything below it."""
        for pid in [*descendants(self.pid), *self.pids.values()] if self.process.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.expect_gone()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()


def has_line(text: str, *parts: str) -> bool:
    """Whether one line of `text` holds all `parts`."""
    return any(all(part in line for part in parts) for line in text.splitlines())


def as_ids(length: int, start: int = 100) -> list[int]:
    """A prompt of `length` tokens; different starts share no prefix."""
    return [NUM_SPECIAL + (start * 31 + at) % _MODULUS for at in range(length)]
