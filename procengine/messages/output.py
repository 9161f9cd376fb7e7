"""What the frontend and the output process tell each other about requests."""

from __future__ import annotations

from procengine.messages.base import Message

__all__ = [
    "Admitted",
    "ClientGone",
    "Delivered",
    "Finish",
    "Register",
    "Replay",
    "Resume",
    "Resync",
    "TextStop",
]


# --- frontend -> output -----------------------------------------------------------------------------------------------


class Register(Message, tag="register"):
    """An accepted request: all that the output process needs to turn its tokens into text."""

    key: int
    client: bytes
    request_id: str
    index: int
    workflow: str
    prompt_token_ids: list[int]
    end_position: int  # the sequence is complete when it has this many tokens
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    requested_stop_token_ids: tuple[int, ...] = ()  # those the request itself named: they become the stop_reason
    num_logprobs: int = -1  # alternatives to show; -1 is no logprobs at all
    min_position: int = 0  # stop tokens and stop strings before this position do not count
    num_prompt_logprobs: int = -1
    detokenize: bool = True
    echo: bool = False  # the text begins with the prompt's
    output_kind: str = "delta"  # delta | cumulative | final
    stream_interval: int = 1
    client_sent_ns: int = 0  # see RequestTimes
    received_ns: int = 0
    prepared_ns: int = 0


class Admitted(Message, tag="admitted"):
    """Requests that got a slot, with the prompt tokens found in the cache; again when they come back to a worker."""

    keys: list[int]
    num_cached_tokens: list[int]
    sent_ns: int = 0  # when their step was sent
    num_preemptions: tuple[int, ...] = ()  # of each so far: it may also have come back from a worker that died


class Finish(Message, tag="finish"):
    """A request ends for a reason the output process cannot see in the tokens (abort, error)."""

    key: int
    finish_reason: str
    error: str | None = None
    is_told: bool = False  # the client knows already: it is sent nothing


class Replay(Message, tag="replay"):
    """The tokens of a request from `position` on: the answer to Resync, and what a new output process is told."""

    key: int
    position: int
    token_ids: list[int]


class Resume(Message, tag="resume"):
    """All that a new output process must know has been sent; it takes results and answers clients from here on."""

    epoch: int  # of that output process


# --- output -> frontend -----------------------------------------------------------------------------------------------


class TextStop(Message, tag="text_stop"):
    """A stop string matched: the request is over, its blocks can go."""

    key: int


class ClientGone(Message, tag="client_gone"):
    """A client cannot be reached any more: abort all it has running."""

    client: bytes


class Resync(Message, tag="resync"):
    """Tokens are missing before a position that arrived: send them from `position` on."""

    key: int
    position: int


class Delivered(Message, tag="delivered"):
    """The last messages of these requests have been sent to their clients."""

    keys: list[int]
