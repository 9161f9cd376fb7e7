"""`TokenizeQueue`: text, messages, bad words and grammars to what `accept` needs, off the event loop's thread.

Owns: one thread that tokenizes everything that waits in one batch, and one that compiles grammars. Refuses what cannot
be prepared, and a text that is too long for certain, which would hold up the others. Never does: validate a request
otherwise, or know who sent it. The tokenizer releases the GIL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

from procengine.chat_template import ChatTemplate
from procengine.errors import InvalidRequestError, OverloadedError, ProcengineError
from procengine.interruptible import Interrupted, Interruptible
from procengine.profiling.records import RecordKind
from procengine.profiling.span_ring import SpanWriter
from procengine.request import TokenMasks
from procengine.structured.compiler import GrammarCompiler
from procengine.token_bounds import longest_token_bytes, min_num_tokens
from procengine.tokenizer import Tokenizer
from procengine.workflows.prompt import Prepared, PromptBody

if TYPE_CHECKING:
    from procengine.pair_template import PairTemplate

__all__ = ["OnPrepared", "TokenizeQueue"]

OnPrepared = Callable[[Prepared | ProcengineError], None]
_Job = tuple[PromptBody, OnPrepared]
_Result = Prepared | ProcengineError
_TOKENIZED = int(RecordKind.TOKENIZED)


class TokenizeQueue:
    """Results come back on the loop, in the order of submission; those with a grammar when that is compiled."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        compiler: GrammarCompiler,
        grammar_timeout_s: float,
        max_model_len: int,
        spans: SpanWriter,
        template_timeout_s: float = 5.0,
        prompts: Mapping[str, str] | None = None,
        default_prompt: str | None = None,
        pair_template: str | None = None,
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._template = template
        self._compiler = compiler
        self._grammar_timeout_s = grammar_timeout_s
        self._max_model_len = max_model_len
        self._spans = spans  # the tokenizer thread's
        self._template_timeout_s = template_timeout_s
        self._prompts = prompts or {}  # what goes before a text, by name
        self._default_prompt = default_prompt
        self._pair_template = None if pair_template is None else self._open_pairs(pair_template)
        self._rendering = Interruptible()
        self._watch: asyncio.TimerHandle | None = None
        self._num_batches = 0
        self._jobs: list[_Job] = []
        self._is_busy = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._grammar_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")
        self._compiling: set[asyncio.Task[None]] = set()

    def submit(self, body: PromptBody, on_prepared: OnPrepared) -> None:
        """Prepare a body; `on_prepared` gets what it becomes, or the error."""
        self._jobs.append((body, on_prepared))
        if not self._is_busy:
            self._start()

    def close(self) -> None:
        """Let the threads end."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        jobs, self._jobs = self._jobs, []
        self._is_busy = True
        if any(body.messages is not None for body, _ in jobs):
            self._watch = self._loop.call_later(self._template_timeout_s, self._watch_rendering)
        future = self._loop.run_in_executor(self._thread, self._tokenize_batch, [body for body, _ in jobs])
        future.add_done_callback(lambda done: self._finish(jobs, done.result()))

    def _finish(self, jobs: list[_Job], results: list[_Result]) -> None:
        self._is_busy = False
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._jobs:
            self._start()  # the thread goes on while the loop hands out what it did
        for (body, on_prepared), result in zip(jobs, results, strict=True):
            if body.grammar_spec is None or isinstance(result, ProcengineError):
                on_prepared(result)
            else:
                task = self._loop.create_task(self._compile(body, result, on_prepared))
                self._compiling.add(task)
                task.add_done_callback(self._compiling.discard)

    def _watch_rendering(self) -> None:
        """On the loop, while the thread is at work: a template that goes on for too long is ended."""
        self._rendering.end_if_longer_than(self._template_timeout_s)
        self._watch = self._loop.call_later(self._template_timeout_s / 4, self._watch_rendering)

    async def _compile(self, body: PromptBody, prepared: Prepared, on_prepared: OnPrepared) -> None:
        result: _Result
        try:
            async with asyncio.timeout(self._grammar_timeout_s):
                make = await self._loop.run_in_executor(self._grammar_thread, self._grammar_maker, body)
            result = Prepared(prepared.token_ids, prepared.word_ids, make)
        except TimeoutError:
            result = OverloadedError(f"structured_outputs: not compiled within {self._grammar_timeout_s:g} s")
        except ProcengineError as error:
            result = error
        except Exception as error:  # noqa: BLE001 - at the rim: a grammar that breaks the compiler must get an answer
            result = InvalidRequestError(f"structured_outputs: cannot be compiled: {error}")
        on_prepared(result)

    def _grammar_maker(self, body: PromptBody) -> Callable[[], TokenMasks]:
        spec = body.grammar_spec
        assert spec is not None
        return self._compiler.compile(
            spec
        ).copy  # the choices get grammars of their own, on the loop: not compiled again

    def _tokenize_batch(self, bodies: list[PromptBody]) -> list[_Result]:
        started_ns = time.monotonic_ns()
        results = self._tokenize(bodies)
        self._spans.record(_TOKENIZED, self._num_batches, started_ns, time.monotonic_ns(), len(bodies))
        self._num_batches += 1
        return results

    def _tokenize(self, bodies: list[PromptBody]) -> list[_Result]:
        try:
            return self._encode(bodies)
        except Exception as error:  # noqa: BLE001 - at the rim: a prompt that breaks the tokenizer must get an answer
            if len(bodies) > 1:
                return [self._tokenize([body])[0] for body in bodies]  # it fails alone, the others are fine
            field = "prompt" if bodies[0].messages is None else "messages"
            return [InvalidRequestError(f"{field}: cannot be tokenized: {error}")]

    def _encode(self, bodies: list[PromptBody]) -> list[_Result]:
        texts = [self._to_text(body) for body in bodies]
        ids_by_row = {
            row: body.prompt_token_ids for row, body in enumerate(bodies) if body.prompt_token_ids is not None
        }
        # A chat template writes the special tokens itself; a raw text gets the tokenizer's.
        for is_chat in (False, True):
            rows = [
                row
                for row, body in enumerate(bodies)
                if row not in ids_by_row and (body.messages is not None) == is_chat and isinstance(texts[row], str)
            ]
            encoded = self._tokenizer.encode_batch([str(texts[row]) for row in rows], add_special_tokens=not is_chat)
            ids_by_row |= dict(zip(rows, encoded, strict=True))
        return [self._prepared(body, texts[row], ids_by_row.get(row)) for row, body in enumerate(bodies)]

    def _prepared(self, body: PromptBody, text: str | ProcengineError | None, ids: list[int] | None) -> _Result:
        if isinstance(text, ProcengineError):
            return text
        try:
            limit = self._max_model_len if body.max_tokens_kept == -1 else body.max_tokens_kept
            is_text = text is not None and body.messages is None
            if body.is_query_and_document and self._pair_template is not None:
                return Prepared(self._pair_ids(self._pair_template, body, limit))
            if body.instruction_for_pair is not None:
                raise InvalidRequestError("instruction: this model writes two texts by no template that takes one")
            if is_text and body.second_text is not None:
                ids, types = self._tokenizer.encode_cut(str(text), body.second_text, limit)
                return Prepared(ids, token_types=types if any(types) else None)
            assert ids is not None
            if is_text and limit is not None and len(ids) > limit:
                ids, _ = self._tokenizer.encode_cut(str(text), None, limit)
            return Prepared(ids, self._word_ids(body.words))
        except ProcengineError as error:
            return error

    def _open_pairs(self, text: str) -> PairTemplate:
        """How a reranker's pairs are written; its default prompt is their instruction."""
        from procengine.pair_template import PairTemplate  # of rerankers alone

        return PairTemplate(text, self._prompts.get(self._default_prompt or ""))

    def _pair_ids(self, template: PairTemplate, body: PromptBody, limit: int | None) -> list[int]:
        """A template writes special tokens itself. Of what is too long the end of the document goes."""
        before, behind = template.render(body.prompt or "", body.second_text or "", body.instruction_for_pair)
        first, last = (self._tokenizer.encode(text, add_special_tokens=False) for text in (before, behind))
        if limit is None:
            return first + last
        if limit <= len(last):
            raise InvalidRequestError(
                f"truncate_prompt_tokens: {limit} leave no room beside the {len(last)} tokens behind the document"
            )
        return first[: limit - len(last)] + last

    def _word_ids(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word as a text's first and behind a space; a word of spaces only is taken as it is."""
        bare = (word.lstrip() or word for word in words)
        forms = (form for word in bare for form in (word, " " + word))
        ids = (tuple(self._tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        return tuple(dict.fromkeys(i for i in ids if i))

    def _to_text(self, body: PromptBody) -> str | ProcengineError | None:
        """The text to tokenize, or why that need not be tried; None for a body that has token ids."""
        if body.messages is None:
            return self._short_enough("prompt", body.prompt, body) if body.prompt is None else self._named(body)
        if self._template is None:
            return InvalidRequestError("messages: this model has no chat template; send a prompt instead")
        template, messages = self._template, body.messages
        try:
            text = self._rendering.run(lambda: template.render(messages, tools=body.tools))
            return self._short_enough("messages", text, body)
        except Interrupted:
            limit_s = self._template_timeout_s
            return InvalidRequestError(f"messages: the model's chat template did not finish within {limit_s:g} s")
        except ProcengineError as error:
            return error

    def _named(self, body: PromptBody) -> str | ProcengineError | None:
        """The text behind the prompt that it names, or the model's default one."""
        name = body.named_prompt
        if name is not None and name not in self._prompts:
            known = ", ".join(sorted(self._prompts)) or "none"
            return InvalidRequestError(f"prompt_name: {name!r} is not one of this model's, which are: {known}")
        before = self._prompts.get(name or self._default_prompt or "", "") if body.takes_named_prompt else ""
        return self._short_enough("prompt", before + str(body.prompt), body)

    def _short_enough(self, field: str, text: str | None, body: PromptBody) -> str | ProcengineError | None:
        if text is None or body.may_be_truncated or len(text) <= self._max_model_len:
            return text
        num_bytes, longest = len(text.encode(errors="replace")), self._longest_token_bytes
        least = 0 if longest is None else min_num_tokens(num_bytes, longest)
        if least <= self._max_model_len:
            return text
        return InvalidRequestError(
            f"{field}: has {num_bytes} bytes, which are at least {least} tokens; the context limit (max_model_len) is "
            f"{self._max_model_len}"
        )

    @cached_property
    def _longest_token_bytes(self) -> int | None:
        """Worked out when a text is first long enough to need it: that costs some tens of milliseconds."""
        return longest_token_bytes(self._tokenizer.backend)
