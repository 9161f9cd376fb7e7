"""`TokenizeQueue`: text and messages to token ids, off the event loop's thread, everything that waits in one batch.

Owns: one thread. Never does: validate a request or know who sent it. The tokenizer releases the GIL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from procengine.chat_template import ChatTemplate
from procengine.errors import InvalidRequestError, ProcengineError
from procengine.tokenizer import Tokenizer

__all__ = ["TokenizeQueue"]

OnTokens = Callable[[list[int] | ProcengineError], None]
_Job = tuple[str | list[dict[str, Any]], OnTokens]


class TokenizeQueue:
    """Results come back on the loop, in the order of submission."""

    def __init__(self, loop: asyncio.AbstractEventLoop, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._template = template
        self._jobs: list[_Job] = []
        self._is_busy = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")

    def submit(self, prompt: str | list[dict[str, Any]], on_tokens: OnTokens) -> None:
        """Tokenize a text or a list of chat messages; `on_tokens` gets the ids, or the error."""
        self._jobs.append((prompt, on_tokens))
        if not self._is_busy:
            self._start()

    def close(self) -> None:
        """Let the thread end."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        jobs, self._jobs = self._jobs, []
        self._is_busy = True
        future = self._loop.run_in_executor(self._thread, self._tokenize, jobs)
        future.add_done_callback(lambda done: self._finish(jobs, done.result()))

    def _finish(self, jobs: list[_Job], results: list[list[int] | ProcengineError]) -> None:
        self._is_busy = False
        if self._jobs:
            self._start()  # the thread goes on while the loop hands out what it did
        for (_, on_tokens), result in zip(jobs, results, strict=True):
            on_tokens(result)

    def _tokenize(self, jobs: list[_Job]) -> list[list[int] | ProcengineError]:
        try:
            return self._encode(jobs)
        except Exception as error:  # noqa: BLE001 - at the rim: a prompt that breaks the tokenizer must get an answer
            if len(jobs) > 1:
                return [self._tokenize([job])[0] for job in jobs]  # it fails alone, the others of its batch are fine
            field = "prompt" if isinstance(jobs[0][0], str) else "messages"
            return [InvalidRequestError(f"{field}: cannot be tokenized: {error}")]

    def _encode(self, jobs: list[_Job]) -> list[list[int] | ProcengineError]:
        texts: list[str | ProcengineError] = [self._to_text(prompt) for prompt, _ in jobs]
        results: list[list[int] | ProcengineError] = [t if isinstance(t, ProcengineError) else [] for t in texts]
        # A chat template writes the special tokens itself; a raw text gets the tokenizer's.
        for is_chat in (False, True):
            rows = [
                at for at, (p, _) in enumerate(jobs) if isinstance(p, list) == is_chat and isinstance(texts[at], str)
            ]
            ids = self._tokenizer.encode_batch([str(texts[at]) for at in rows], add_special_tokens=not is_chat)
            for at, token_ids in zip(rows, ids, strict=True):
                results[at] = token_ids
        return results

    def _to_text(self, prompt: str | list[dict[str, Any]]) -> str | ProcengineError:
        if isinstance(prompt, str):
            return prompt
        if self._template is None:
            return InvalidRequestError("messages: this model has no chat template; send a prompt instead")
        try:
            return self._template.render(prompt)
        except ProcengineError as error:
            return error
