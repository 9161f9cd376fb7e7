"""`procengine chat`: a conversation with a running group, at the terminal.

Owns: the conversation. Never does: launch or end a group.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

from procengine.cli.examples import add_examples
from procengine.cli.sampling_args import add_sampling_arguments, sampling_params_from
from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from procengine.client import Client

__all__ = ["Conversation", "add_arguments", "run"]

_TEMPERATURE = 0.7
_CLEAR = "/clear"
# A conversation goes on from one text, and shows nothing else.
_WITHOUT = ("n", "logprobs", "prompt_logprobs", "detokenize")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.description = (
        "Talk to a running group; answers stream as they come. With MESSAGE, ask once and end. Ctrl-C stops an answer, "
        f"Ctrl-D ends,\n{_CLEAR} forgets what was said."
    )
    add_examples(
        parser,
        ("procengine chat", "a conversation with the only running group"),
        ('procengine chat "Why is the sky blue?" --max-tokens 80', "one question"),
        ("procengine chat --group tcp://10.0.0.7:7000 --curve-keys laptop", "a group of another machine"),
    )
    parser.add_argument("message", metavar="MESSAGE", nargs="?", help="one message instead of a conversation")
    parser.add_argument("--group", metavar="GROUP", help="name or endpoint of the group [the only running one]")
    parser.add_argument("--curve-keys", metavar="KEYS", help="file or name of this client's keys, for tcp://HOST:PORT")
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_arguments(parser, temperature=_TEMPERATURE, max_tokens=None, without=_WITHOUT)


def run(args: argparse.Namespace) -> int:
    """Ask once, or converse until the input ends."""
    from procengine.client import Client

    params = sampling_params_from(args)
    with Client(args.group, curve_keys=args.curve_keys) as client:
        conversation = Conversation(client, params, args.system)
        if args.message is not None:
            _print_answer(conversation.ask(args.message))
            return 0
        if sys.stdin.isatty():
            print(f"{client.welcome.model} ({client.welcome.group}). Ctrl-C stops an answer, Ctrl-D ends.")
        _converse(conversation)
    return 0


class Conversation:
    """What was said so far."""

    def __init__(self, client: Client, params: SamplingParams, system: str | None) -> None:
        self._client = client
        self._params = params
        self._beginning = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, oldest first."""
        return self._beginning + self._turns

    def ask(self, text: str) -> Generator[str, None, None]:
        """Say something; the answer comes in pieces. Of an answer that is stopped, what was seen stays in the history.

        Raises:
            ProcengineError: there is no answer; what was said is taken back.
        """
        question = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            for delta in self._client.stream(messages=[*self.messages, question], params=self._params):
                pieces.append(delta.text)
                yield delta.text
        finally:
            if pieces:
                self._turns += [question, {"role": "assistant", "content": "".join(pieces)}]

    def clear(self) -> None:
        """Forget all but the system message."""
        self._turns.clear()


def _converse(conversation: Conversation) -> None:
    for line in _input_lines():
        if line == _CLEAR:
            conversation.clear()
            continue
        answer = conversation.ask(line)
        try:
            _print_answer(answer)
        except KeyboardInterrupt:
            answer.close()  # this aborts the request
            print(" [stopped]")
        except InvalidRequestError as error:
            print(f"procengine: {error}; {_CLEAR} begins a new conversation", file=sys.stderr)


def _print_answer(pieces: Iterator[str]) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print()


def _input_lines() -> Iterator[str]:
    """Lines that say something, from a terminal with line editing where there is one."""
    if not sys.stdin.isatty():
        yield from (stripped for line in sys.stdin if (stripped := line.strip()))
        return
    import readline  # noqa: F401 - gives input() its editing and history

    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print()
            return
        if line:
            yield line
