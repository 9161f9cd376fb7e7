"""What makes a language model a reranker: the tokens whose logits score a pair, and the prompt: `with_reranker`.

Owns: what the options and a folder's files may say of them. Never does: render a pair, or compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from procengine.config import ModelConfig
from procengine.errors import ConfigError, ProcengineError
from procengine.hf_files import HuggingFaceFolder
from procengine.pair_template import QWEN3_RERANKER, PairTemplate
from procengine.tokenizer import Tokenizer

__all__ = ["declared_tokens", "with_reranker"]

_NAMED_TEMPLATES = {"qwen3-reranker": QWEN3_RERANKER}
_MODULE = "LogitScore"


def declared_tokens(folder: HuggingFaceFolder, config: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Yes, and no where there is one, as a folder's files have them: its module LogitScore (sentence-transformers), or
    `classifier_from_token` of its config.json (vLLM), which names no first. Ids are of the first kind, texts of the
    second."""
    for kind, path in folder.module_kinds() or ():
        if kind == _MODULE:
            if Path(path).name != path:
                raise folder.error(f"modules.json names a folder that is not in its own: {path!r}")
            settings = folder.read_json(f"{path}/config.json")
            ids = [settings.get("true_token_id"), settings.get("false_token_id")]
            if not isinstance(ids[0], int):
                raise folder.error(f"{path}: true_token_id {ids[0]!r} is no token id")
            return tuple(one for one in ids if isinstance(one, int))
    named = config.get("classifier_from_token")
    if named is None:
        return ()
    if not (isinstance(named, list) and len(named) in (1, 2) and all(isinstance(one, str) for one in named)):
        raise folder.error(f"config.json: classifier_from_token must name one token or two, got {named!r}")
    return tuple(reversed(named))


def with_reranker(model: ModelConfig, tokens: Sequence[str | int], template: str | None) -> ModelConfig:
    """`model` that scores pairs by these tokens, yes first, if there are any; and whose pairs are written so, if there
    is a `template`: the text, a file that holds it, or the name of one that is known here.

    Raises:
        ConfigError: tokens or template are none, or the model has no use for them.
    """
    if tokens:
        if "generate" not in model.workflows:
            raise ConfigError(f"score_tokens: {model.name} has no head that tokens could be scored with")
        if len(tokens) > 2:
            raise ConfigError(f"score_tokens: must be one token or two (yes, no), got {len(tokens)}")
        workflows = tuple(dict.fromkeys((*model.workflows, "score")))
        model = replace(model, score_token_ids=_token_ids(model, tokens), workflows=workflows)
    if template is None:
        template = model.pair_template or _own_template(model)
    if template is None:
        return model
    if "score" not in model.workflows:
        raise ConfigError(f"score_template: {model.name} does not score pairs; score_tokens make it do so")
    text = _template_text(template)
    PairTemplate(text)
    return replace(model, pair_template=text)


def _token_ids(model: ModelConfig, tokens: Sequence[str | int]) -> tuple[int, ...]:
    tokenizer = Tokenizer.load(model.tokenizer_path)
    found = tuple(_token_id(tokenizer, token) for token in tokens)
    for token_id in found:
        if not 0 <= token_id < model.vocab_size:
            raise ConfigError(f"score_tokens: {token_id} is no token of {model.name}, which has {model.vocab_size}")
    return found


def _token_id(tokenizer: Tokenizer, token: str | int) -> int:
    if isinstance(token, int):
        return token
    own = tokenizer.token_to_id(token)
    if own is not None:
        return own
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError(f"score_tokens: {token!r} is {len(ids)} tokens of this model, must be one")
    return ids[0]


def _own_template(model: ModelConfig) -> str | None:
    """A chat template that knows the roles query and document, as sentence-transformers uses it; or, of a Qwen3 that
    scores by tokens, the one that it was trained with."""
    if "score" in model.workflows and _knows_roles(model.chat_template or ""):
        return _rendered(model)
    if not model.score_token_ids:
        return None
    if model.architecture == "qwen3":
        return QWEN3_RERANKER
    raise ConfigError(f"score_template: {model.name} scores pairs by tokens, and its files have no prompt for them")


def _knows_roles(source: str) -> bool:
    return all(f"'{role}'" in source or f'"{role}"' in source for role in ("query", "document"))


def _rendered(model: ModelConfig) -> str:
    """The chat template with our placeholders for texts."""
    from procengine.chat_template import ChatTemplate  # Jinja, which few need here

    template = ChatTemplate(model.chat_template or "", model.chat_bos_token, model.chat_eos_token)
    turns = [{"role": role, "content": f"{{{role}}}"} for role in ("query", "document")]
    if model.default_prompt is not None:
        turns.insert(0, {"role": "system", "content": "{instruction}"})
    try:
        return template.render(turns)
    except ProcengineError as error:
        raise ConfigError(
            f"score_template: {model.name}'s chat template refuses a query and a document: {error}"
        ) from error


def _template_text(template: str) -> str:
    if template in _NAMED_TEMPLATES:
        return _NAMED_TEMPLATES[template]
    if "{document}" in template:
        return template
    path = Path(template).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        known = ", ".join(_NAMED_TEMPLATES)
        raise ConfigError(
            f"score_template: {template!r:.200} is neither a text with {{query}} and {{document}}, nor {known}, nor a "
            f"file that can be read ({error})"
        ) from error
