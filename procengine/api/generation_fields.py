"""What requests of all kinds of generation may say: sampling, the form of the answer, streaming. Pure.

Owns: the fields, and how they become `SamplingParams`. vLLM's extensions of OpenAI's API have vLLM's names.
Never does: check a range (`SamplingParams` and the frontend do), or know where the prompt is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from procengine.errors import InvalidRequestError
from procengine.sampling_params import SamplingParams
from procengine.structured.spec import StructuredOutputs

__all__ = ["GenerationFields", "JsonSchemaFormat", "ResponseFormat", "StreamOptions", "sampling_params"]

_PLAIN: Final = (  # fields with the name and the meaning that they have in SamplingParams
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "bad_words",
    "logit_bias",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "prompt_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`stream_options`."""

    include_usage: bool | None = None  # one more event behind the last, with the counts
    continuous_usage_stats: bool | None = None  # the counts so far in every event, too
    include_obfuscation: bool | None = None  # taken, without effect: nothing is hidden


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format.json_schema`."""

    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # the answer satisfies the schema in any case


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`structured_outputs`: ours and vLLM's names."""

    json_schema: dict[str, Any] | str | None = None
    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None

    def plain(self) -> dict[str, Any]:
        """The fields that are given, by our names."""
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        if "json" in given:
            given["json_schema"] = given.pop("json")
        return given


class GenerationFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """null and a missing field are the same. Fields that change nothing here are taken, since clients send them."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredFields | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: tuple[str, ...] | None = None
    guided_grammar: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None  # tokens between two events, at least
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether the stream ends with the counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_always(self) -> bool:
        """Whether each event has the counts."""
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self, refused: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse what would silently be something else than was asked for.

        refused: fields that are there to be refused, with the values beside null that ask for nothing.

        Raises:
            InvalidRequestError: names the field.
        """
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options: can only be given with stream, which is not true")
        if self.store:
            raise InvalidRequestError("store: must be false: nothing is stored here")
        for name, harmless in refused.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(f"{name}: is not supported here, got {value!r}")


def sampling_params(
    fields: GenerationFields, *, max_tokens: int | None, logprobs: int | None, streams: bool, **extra: Any
) -> SamplingParams:
    """The parameters of a request whose API has these defaults, or these names, for the rest.

    Raises:
        InvalidRequestError: names the field.
    """
    values = {name: value for name in _PLAIN if (value := getattr(fields, name)) is not None} | extra
    if streams and fields.stream_interval is not None:
        values["stream_interval"] = fields.stream_interval
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        structured_outputs=_structured(fields),
        output_kind="delta" if streams else "final",
        **values,
    )


def _structured(fields: GenerationFields) -> StructuredOutputs | None:
    given: dict[str, dict[str, Any]] = {}
    if fields.structured_outputs is not None:
        given["structured_outputs"] = fields.structured_outputs.plain()
    if (of_format := _of_format(fields.response_format)) is not None:
        given["response_format"] = of_format
    for name, ours in (
        ("guided_json", "json_schema"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
    ):
        if (value := getattr(fields, name)) is not None:
            given[name] = {ours: value}
    if len(given) > 1:
        raise InvalidRequestError(f"{list(given)[1]}: cannot be given along with {next(iter(given))}")
    return StructuredOutputs(**next(iter(given.values()))) if given else None


def _of_format(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {"json_object": True}
    wanted = response_format.json_schema
    if wanted is None or wanted.schema is None:
        raise InvalidRequestError("response_format.json_schema.schema: must be given with the type json_schema")
    if wanted.schema is True:
        return {"json_schema": {}}
    if wanted.schema is False:
        raise InvalidRequestError("response_format.json_schema.schema: false is satisfied by nothing")
    return {"json_schema": wanted.schema}
