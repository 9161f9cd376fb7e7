"""The prompt part of a request body, and the checks that every workflow makes on it.

Owns: "exactly one kind of prompt" and "token ids of this model, within its context". Never does: tokenize.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from procengine.adapter_table import AdapterFacts
from procengine.config import LimitsConfig
from procengine.errors import InvalidRequestError
from procengine.request import TokenMasks
from procengine.structured.spec import StructuredOutputs

__all__ = ["Identity", "ModelFacts", "Prepared", "PromptBody", "check_prompt"]


_MAX_TIMEOUT_S = 86_400


class PromptBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One of `prompt`, `prompt_token_ids` and `messages`, and how long the answer may take.

    Attributes:
        timeout_s: the request is aborted when it is not done so long after it came; None is the group's default.
    """

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None  # shown to the chat template; only with `messages`
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "prompt_token_ids", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                "prompt: exactly one of prompt, prompt_token_ids and messages must be given, "
                f"got {', '.join(given) or 'none'}"
            )
        if self.tools is not None and self.messages is None:
            raise InvalidRequestError("tools: can only be given with messages")
        if not getattr(self, given[0]):
            raise InvalidRequestError(f"{given[0]}: must not be empty")
        if self.timeout_s is not None and not 0 < self.timeout_s <= _MAX_TIMEOUT_S:
            raise InvalidRequestError(
                f"timeout_s: must be more than 0 and at most {_MAX_TIMEOUT_S} seconds, got {self.timeout_s}"
            )

    @property
    def words(self) -> tuple[str, ...]:
        """Texts beside the prompt that must be tokenized for `accept`."""
        return ()

    @property
    def grammar_spec(self) -> StructuredOutputs | None:
        """What must be compiled for `accept`."""
        return None

    @property
    def may_be_truncated(self) -> bool:
        """Whether a prompt longer than the context is fine, because only its end counts."""
        return False

    @property
    def second_text(self) -> str | None:
        """What the model reads behind the prompt, and apart from it."""
        return None

    @property
    def is_query_and_document(self) -> bool:
        """Whether prompt and second text are those of a reranker's template, where the model has one."""
        return False

    @property
    def instruction_for_pair(self) -> str | None:
        """What that template says of how a document is to answer; None: the model's own."""
        return None

    @property
    def named_prompt(self) -> str | None:
        """Which of the model's prompts goes before the text."""
        return None

    @property
    def takes_named_prompt(self) -> bool:
        """Whether the model's prompts, by name or by default, are for this task."""
        return False

    @property
    def max_tokens_kept(self) -> int | None:
        """How many tokens of a text are kept, special ones included; -1: those of the context. None: all."""
        return None

    def check_sizes(self, limits: LimitsConfig) -> None:
        """Refuse what would cost too much to prepare, before that is tried. Raises InvalidRequestError."""

    @property
    def is_prepared(self) -> bool:
        """Whether nothing needs to be tokenized or compiled."""
        return self.prompt_token_ids is not None and not self.words and self.grammar_spec is None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a body becomes off the event loop.

    Attributes:
        token_ids: of the prompt.
        word_ids: for each of `PromptBody.words`, its tokens with and without a space before it.
        make_grammar: a fresh grammar for each choice, if one was asked for.
        token_types: which of two texts each token belongs to, for models that are told.
    """

    token_ids: list[int]
    word_ids: tuple[tuple[int, ...], ...] = ()
    make_grammar: Callable[[], TokenMasks] | None = None
    token_types: list[int] | None = None  # of each token; None: all 0


class ModelFacts(msgspec.Struct, frozen=True):
    """What requests are checked against."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int  # most tokens one request can hold in a worker's KV pool
    max_embed_tokens: int  # of one sequence that is not cut
    eos_token_ids: tuple[int, ...]
    limits: LimitsConfig
    hidden_size: int = 0
    num_layers: int = 0
    num_token_types: int = 0  # that the model tells apart
    is_causal: bool = False  # tokens see those before them alone: a sequence can come piece by piece
    pooling: str = "last"  # how `embed` reduces hidden states
    adapters: dict[str, AdapterFacts] = {}  # LoRA adapters that requests may name


class Identity(Protocol):
    """Who a request belongs to: set by the frontend, not by the client's body."""

    @property
    def key(self) -> int: ...
    @property
    def client(self) -> bytes: ...
    @property
    def request_id(self) -> str: ...
    @property
    def seed(self) -> int: ...


def check_prompt(token_ids: list[int], facts: ModelFacts) -> NDArray[np.int32]:
    """The prompt as int32 [n].

    Raises:
        InvalidRequestError: it is empty, too long, or holds an id that the model does not have.
    """
    if not token_ids:
        raise InvalidRequestError("prompt: must have at least one token, got 0")
    if len(token_ids) > facts.max_model_len:
        raise InvalidRequestError(
            f"prompt: has {len(token_ids)} tokens, the context limit (max_model_len) is {facts.max_model_len}"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= facts.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequestError(
            f"prompt_token_ids: {wrong} is not a token of this model; ids go from 0 to {facts.vocab_size - 1}"
        )
    return np.array(token_ids, np.int32)
