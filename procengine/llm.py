"""`LLM`: answers prompts in a script, with a process group of its own that ends with it.

Owns: the private group and the client on it. Never does: more than those two do.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from tqdm import tqdm

from procengine.beam_search import BeamSearchOutput, BeamSearchParams, search
from procengine.client import Client
from procengine.client_bodies import (
    Body,
    Messages,
    Prompts,
    conversations,
    generate_body,
    messages_body,
    one_params_each,
    prefill_body,
    prompt_body,
    prompt_list,
)
from procengine.client_link import new_call_seed
from procengine.config import EngineConfig
from procengine.engine_args import OPTIONS, EngineArgs, nearest_option
from procengine.errors import ConfigError
from procengine.launch import Group, launch_group
from procengine.outputs import EmbeddingOutput, RequestOutput
from procengine.resolve import resolve
from procengine.sampling_params import SamplingParams
from procengine.scores import (
    ClassificationOutput,
    HiddenStatesOutput,
    MultiVectorOutput,
    RerankResult,
    ScoreOutput,
    SparseEmbeddingOutput,
    TextScoreOutput,
    TokenClassificationOutput,
)
from procengine.tokenizer import Tokenizer
from procengine.tool_calls.offer import ToolChoice, Tools, make_offer
from procengine.tool_calls.reading import read_calls

__all__ = ["LLM"]

_counter: Final = itertools.count()  # several LLMs of one process need different group names


class LLM:
    """A model to run prompts through, offline.

    Args:
        model: a folder, a .gguf file, an alias such as "smollm2-135m", or a hub id.
        resubmit_lost: as for `Client`.
        config: any option of `procengine serve`, by its Python name (`max_num_seqs=64`); see `EngineArgs`.

    Raises:
        ConfigError: an option is unknown or wrong.
        ModelError: the model cannot be found or is not supported.
        StartupError: the group did not come up.

    The group ends with `close`, at the end of a `with` block, when this object is collected, or with the process.
    """

    def __init__(self, model: str, *, resubmit_lost: bool = True, **config: Any) -> None:
        self._config = resolve(_engine_args(model, config))
        group = launch_group(self._config)
        try:
            self._client = Client(group.endpoint, resubmit_lost=resubmit_lost)
        except BaseException:
            group.close()
            raise
        self._finalizer = weakref.finalize(self, _end, os.getpid(), self._client, group)

    @property
    def config(self) -> EngineConfig:
        """What the options were resolved to."""
        return self._config

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        echo: bool = False,
        lora_name: str = "",
    ) -> list[RequestOutput]:
        """Complete prompts: texts, lists of token ids, or one of either. Results are in the order of the prompts.

        With `echo` the texts begin with the prompts'. `lora_name` is one of the adapters of `lora_modules`.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; the others are aborted.
            EngineDeadError: the group has died.
        """
        each, _ = prompt_list(prompts)
        bodies = [prompt_body(prompt) for prompt in each]
        return self._run(bodies, sampling_params, use_tqdm=use_tqdm, echo=echo, lora_name=lora_name)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        lora_name: str = "",
    ) -> list[RequestOutput]:
        """Answer one conversation (`[{"role": "user", "content": "..."}]`) or a list of them.

        `tools` and `tool_choice` are those of `Client.chat`, for all of them. Raises as `generate`.
        """
        each, _ = conversations(messages)
        offer = make_offer(tools, tool_choice, self._client.welcome.tool_call_parser)
        bodies = [messages_body(one, offer.tools) for one in each]
        params = [offer.params(one) for one in one_params_each(sampling_params, len(each))]
        with offer.naming_tools():
            outputs = self._run(bodies, params, use_tqdm=use_tqdm, lora_name=lora_name)
        return [read_calls(output, offer.style, new_call_seed()) for output in outputs]

    def beam_search(self, prompts: Prompts, params: BeamSearchParams) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, in the order of the prompts. Raises as `generate`.

        A step asks for 2 * beam_width alternatives a token: beyond a width of 10, raise `max_logprobs`.
        """
        each, _ = prompt_list(prompts)
        bodies = [prompt_body(prompt) for prompt in each]
        tokenizer = Tokenizer.load(self._config.model.tokenizer_path)
        return search(bodies, params, self._config, self._client.generate_bodies, tokenizer.decode)

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Vectors of prompts, in their order; the options are those of `Client.embed`. Raises as `generate`."""
        each, _ = prompt_list(prompts)
        options: dict[str, Any] = {
            "dimensions": dimensions,
            "prompt_name": prompt_name,
            "truncate_prompt_tokens": truncate_prompt_tokens,
        }
        bodies = [prefill_body(prompt, **options) for prompt in each]
        return _with_progress(len(bodies), use_tqdm, lambda on_end: self._client.embed_bodies(bodies, on_end))

    def ask(self, workflow: str, bodies: Sequence[Body]) -> list[list[float]]:
        """See `Client.ask`."""
        return self._client.ask(workflow, bodies)

    def embed_sparse(self, prompts: Prompts, **options: Any) -> list[SparseEmbeddingOutput]:
        """See `Client.embed_sparse`."""
        return self._client.embed_sparse(prompts, **options)

    def embed_multi(self, prompts: Prompts, **options: Any) -> list[MultiVectorOutput]:
        """See `Client.embed_multi`."""
        return self._client.embed_multi(prompts, **options)

    def classify(self, prompts: Prompts, **options: Any) -> list[ClassificationOutput]:
        """See `Client.classify`."""
        return self._client.classify(prompts, **options)

    def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str], **options: Any) -> list[ScoreOutput]:
        """See `Client.score`."""
        return self._client.score(text_1, text_2, **options)

    def rerank(self, query: str, documents: Sequence[str], **options: Any) -> list[RerankResult]:
        """See `Client.rerank`."""
        return self._client.rerank(query, documents, **options)

    def reward(self, prompts: Prompts, **options: Any) -> list[ScoreOutput]:
        """See `Client.reward`."""
        return self._client.reward(prompts, **options)

    def token_classify(self, prompts: Prompts, **options: Any) -> list[TokenClassificationOutput]:
        """See `Client.token_classify`."""
        return self._client.token_classify(prompts, **options)

    def score_text(self, prompts: Prompts, **options: Any) -> list[TextScoreOutput]:
        """See `Client.score_text`."""
        return self._client.score_text(prompts, **options)

    perplexity = score_text

    def hidden_states(self, prompts: Prompts, **options: Any) -> list[HiddenStatesOutput]:
        """See `Client.hidden_states`."""
        return self._client.hidden_states(prompts, **options)

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """The group's counters and percentiles since the last reset."""
        return self._client.stats(reset=reset)

    def close(self) -> None:
        """End the group and wait for it. Closing twice is fine."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(
        self,
        prompts: Sequence[Body],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        use_tqdm: bool,
        echo: bool = False,
        lora_name: str = "",
    ) -> list[RequestOutput]:
        each = one_params_each(sampling_params, len(prompts))
        bodies = [
            generate_body(prompt, params, echo=echo, lora_name=lora_name)
            for prompt, params in zip(prompts, each, strict=True)
        ]
        return _with_progress(len(bodies), use_tqdm, lambda on_end: self._client.generate_bodies(bodies, on_end=on_end))


def _engine_args(model: str, config: dict[str, Any]) -> EngineArgs:
    """Options by name, checked by type: a misspelt or wrong one is an error, not ignored."""
    named = {"name": f"llm-{os.getpid()}-{next(_counter)}", **config, "model": os.fspath(model)}
    for option in named:
        if option not in OPTIONS:
            near = nearest_option(option)
            raise ConfigError(f"LLM: {option}: no such option" + (f"; did you mean {near}?" if near else ""))
    try:
        return msgspec.convert(named, EngineArgs)
    except msgspec.ValidationError as error:
        raise ConfigError(f"LLM: {error}") from error


def _with_progress(total: int, use_tqdm: bool, run: Callable[[Callable[[], object]], list[Any]]) -> list[Any]:
    with tqdm(total=total, desc="Processed prompts", unit="req", disable=not use_tqdm, dynamic_ncols=True) as bar:
        return run(lambda: bar.update(1))


def _end(owner: int, client: Client, group: Group) -> None:
    if os.getpid() != owner:
        return  # a forked child: both are its parent's
    client.close()
    group.close()
