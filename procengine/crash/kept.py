"""What the frontend keeps of a request anyway, as a part of a crash record. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from procengine.crash.record import RecordedRequest, RecordedTokens, recorded_body
from procengine.messages import Register, decode_from_frontend
from procengine.output_ledger import LedgerEntry

__all__ = ["recorded_request"]


def recorded_request(key: int, entry: LedgerEntry, token_ids: NDArray[np.int32]) -> RecordedRequest:
    """A request with the tokens (int32 [n], prompt and output) that are confirmed."""
    register = decode_from_frontend(entry.registered)
    assert isinstance(register, Register)
    prompt = np.array(register.prompt_token_ids, np.int32)
    return RecordedRequest(
        key=key,
        index=register.index,
        request_id=register.request_id,
        workflow=register.workflow,
        body=recorded_body(entry.body),
        seed=entry.seed,
        received_ns=register.received_ns,
        prompt=RecordedTokens.of(prompt),
        output=RecordedTokens.of(token_ids[entry.num_prompt_tokens :]),
        ended=entry.finish_reason,
        error=entry.finish.error if entry.finish is not None else None,
    )
