"""Steps and results off a socket: header and payload are one, or they are refused.

Owns: whether the frames of a message fit each other: their number, the sizes of the sections, the counts in the header.
Never does: look at the values in a payload: whoever can write to the sockets inside a group is the user who runs it.
Pure. What comes from a socket is checked once, where it is received; a step costs a microsecond.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from procengine.errors import ProtocolError
from procengine.messages import (
    UNREADABLE,
    AdapterLoaded,
    Begin,
    EmbedInput,
    EmbedResult,
    LoadAdapter,
    StepFailed,
    StepInput,
    StepResult,
    WorkerReady,
    decode_from_worker,
    decode_step,
)
from procengine.step_payload import EMBED_SECTIONS, RESULT_SECTIONS, SLOT_ROW, STEP_SECTIONS, block_update_width

__all__ = ["read_message", "read_result", "read_step"]

_T = TypeVar("_T")
_NUM_STEP, _NUM_EMBED, _NUM_RESULT = len(STEP_SECTIONS), len(EMBED_SECTIONS), len(RESULT_SECTIONS)
_NUM_EMBED_RESULT: Final = 3
_MAX_NUMBER: Final = (1 << 62) - 1
_SLOT_ROW_WIDTH: Final = len(SLOT_ROW)


def read_message(frames: Sequence[bytes], decode: Callable[[bytes], _T]) -> _T:
    """The message of a single frame.

    Raises:
        ProtocolError: there is another number of frames, or it is none of this socket's messages.
    """
    if len(frames) != 1:
        raise ProtocolError(f"it has {len(frames)} frames, not 1")
    return _decoded(frames[0], decode)


def read_step(frames: Sequence[bytes], num_groups: int = 1) -> StepInput | EmbedInput | Begin | LoadAdapter:
    """The header of a step whose payload is frame 1, or a message without one. `num_groups`: of the model's layers.

    Raises:
        ProtocolError: it is neither, or header and payload do not fit.
    """
    header = _decoded(frames[0], decode_step)
    if type(header) is StepInput:
        is_whole = len(frames) == 2 and _fits(header.sizes, _NUM_STEP, frames[1]) and _is_step(header, num_groups)
    elif type(header) is EmbedInput:
        is_whole = len(frames) == 2 and _fits(header.sizes, _NUM_EMBED, frames[1]) and _is_embed_step(header)
    else:
        is_whole = len(frames) == 1
    if not is_whole:
        raise ProtocolError(_does_not_fit(header, frames))
    return header


def read_result(frames: Sequence[bytes]) -> StepResult | EmbedResult | StepFailed | WorkerReady | AdapterLoaded:
    """The header of a result whose payload is frame 1, or a message without one.

    Raises:
        ProtocolError: it is neither, or header and payload do not fit.
    """
    header = _decoded(frames[0], decode_from_worker)
    if type(header) is StepResult:
        is_whole = len(frames) == 2 and _fits(header.sizes, _NUM_RESULT, frames[1]) and _is_result(header)
    elif type(header) is EmbedResult:
        is_whole = len(frames) == 2 and _fits(header.sizes, _NUM_EMBED_RESULT, frames[1]) and _is_embed_result(header)
    else:
        is_whole = len(frames) == 1
    if not is_whole:
        raise ProtocolError(_does_not_fit(header, frames))
    return header


def _decoded(frame: bytes, decode: Callable[[bytes], _T]) -> _T:
    try:
        return decode(frame)
    except UNREADABLE as error:
        raise ProtocolError(str(error)) from error


def _are_numbers(*values: int) -> bool:
    """What every number in a header is, and fits into everything that it goes into."""
    return min(values) >= 0 and max(values) <= _MAX_NUMBER


def _fits(sizes: tuple[int, ...], num_sections: int, payload: bytes) -> bool:
    return len(sizes) == num_sections and min(sizes) >= 0 and 4 * sum(sizes) == len(payload)


def _is_step(header: StepInput, num_groups: int) -> bool:
    (slots, starts, seq_lens, sample_rows, row_steps, input_ids, positions, slot_rows, block_updates) = header.sizes[:9]
    _, masked_rows, mask_words, prompt_rows, _, sample_counts = header.sizes[9:]
    rows = header.num_rows
    return (
        _are_numbers(header.step_id, header.epoch, header.num_tokens, header.max_query_len, header.max_seq_len)
        and slots == seq_lens == rows == starts - 1
        and row_steps in (0, rows)
        and 0 <= header.num_decode_rows <= rows
        and input_ids == positions == header.num_tokens
        and sample_rows == header.num_samples
        and sample_counts in (0, sample_rows)
        and header.decode_steps > 0
        and not slot_rows % _SLOT_ROW_WIDTH
        and not block_updates % block_update_width(num_groups)
        and not (mask_words % masked_rows if masked_rows else mask_words)
        and not prompt_rows % 3
    )


def _is_embed_step(header: EmbedInput) -> bool:
    key_words, starts, input_ids, positions, token_types = header.sizes
    rows = header.num_rows
    return (
        _are_numbers(header.step_id, header.epoch, header.max_query_len, header.num_sequence_tokens)
        and key_words == 2 * rows
        and starts == rows + 1
        and (header.num_sequence_tokens == 0 or rows == 1)
        and input_ids == positions == header.num_tokens
        and token_types in (0, header.num_tokens)
    )


def _is_result(header: StepResult) -> bool:
    key_words, positions, token_ids, logprob_rows, ids, logprobs, ranks, spans, *prompt = header.sizes
    rows = header.num_rows
    return (
        _are_numbers(header.rank, header.step_id, header.epoch, header.micro_step, header.busy_ns)
        and key_words == 2 * rows
        and positions == token_ids == rows
        and ids == logprobs == ranks
        and not (ids % logprob_rows if logprob_rows else ids)
        and prompt[0] == prompt[1] == prompt[2]
        and not spans % 4
        and (spans > 0 or prompt[0] == 0)
    )


def _is_embed_result(header: EmbedResult) -> bool:
    key_words, numbers, counts = header.sizes
    rows = header.num_rows
    return (
        _are_numbers(header.rank, header.step_id, header.epoch, header.busy_ns)
        and key_words == 2 * rows
        and counts in (0, rows)
        and (counts > 0 or not (numbers % rows if rows else numbers))
    )


def _does_not_fit(header: object, frames: Sequence[bytes]) -> str:
    sizes = ", ".join(str(len(frame)) for frame in frames[:4])
    return f"a {type(header).__name__} that does not fit its {len(frames)} frames (bytes: {sizes})"
