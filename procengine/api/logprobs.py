"""Log probabilities in the two shapes of OpenAI's API. Pure.

Owns: tokens as texts and bytes inside them. JSON has no infinities: what is less likely than -9999 is said to be -9999.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from procengine.messages import TokenLogprobs

__all__ = ["TokenNames", "chat_logprobs", "completion_logprobs", "prompt_logprob_maps"]

_LEAST: Final = -9999.0


class TokenNames:
    """What tokens are called. `as_ids`: `token_id:17` instead of a text, which several tokens may share."""

    def __init__(self, token_bytes: Callable[[int], bytes], *, as_ids: bool = False) -> None:
        self.bytes_of = token_bytes
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Its text; bytes that are no whole character come out as U+FFFD."""
        return f"token_id:{token_id}" if self._as_ids else self.bytes_of(token_id).decode("utf-8", "replace")


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[TokenLogprobs], names: TokenNames, num_top: int
) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry a token."""
    entries = []
    for token_id, at in zip(token_ids, positions, strict=True):
        chosen = _chat_entry(token_id, at.logprobs[0] if at.logprobs else _LEAST, names)
        top = zip(at.token_ids[1 : num_top + 1], at.logprobs[1 : num_top + 1], strict=True)
        chosen["top_logprobs"] = [_chat_entry(one, logprob, names) for one, logprob in top]
        entries.append(chosen)
    return {"content": entries, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs | None],
    names: TokenNames,
    num_top: int,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """`logprobs` of a completion, and where in the text the next token begins. None: a text's first token has none."""
    tokens = [names.name(token_id) for token_id in token_ids]
    offsets = []
    for token_id in token_ids:
        offsets.append(offset)
        offset += len(names.bytes_of(token_id).decode("utf-8", "replace"))
    top: list[dict[str, float] | None] = []
    for at in positions:
        pairs = () if at is None else zip(at.token_ids[1 : num_top + 1], at.logprobs[1 : num_top + 1], strict=True)
        top.append(None if at is None else {names.name(one): max(logprob, _LEAST) for one, logprob in pairs})
    chosen = [None if at is None else max(at.logprobs[0], _LEAST) if at.logprobs else _LEAST for at in positions]
    return {"text_offset": offsets, "token_logprobs": chosen, "tokens": tokens, "top_logprobs": top}, offset


def prompt_logprob_maps(
    positions: Sequence[TokenLogprobs | None], names: TokenNames
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs` as vLLM shows them: for each token of the prompt a map from token id."""
    return [
        None
        if at is None
        else {
            str(token_id): {"logprob": max(logprob, _LEAST), "rank": rank, "decoded_token": names.name(token_id)}
            for token_id, logprob, rank in zip(at.token_ids, at.logprobs, at.ranks, strict=True)
        }
        for at in positions
    ]


def _chat_entry(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": max(logprob, _LEAST), "bytes": list(names.bytes_of(token_id))}
