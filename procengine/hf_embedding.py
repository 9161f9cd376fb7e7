"""How a model embeds, from the files of sentence-transformers in its folder: `read_embedding`.

Owns: modules.json, 1_Pooling, 2_Normalize, sentence_bert_config.json and config_sentence_transformers.json, in their
old and new forms. Never does: default silently where they say something: what is not understood is a ModelError.
"""

from __future__ import annotations

from typing import Any

from procengine.config import Pooling
from procengine.hf_files import HuggingFaceFolder

__all__ = ["read_embedding"]

_MODES: dict[str, Pooling] = {
    "mean": "mean",
    "mean_tokens": "mean",
    "cls": "cls",
    "cls_token": "cls",
    "last": "last",
    "lasttoken": "last",
}
_ALL_MODES = {*_MODES, "max", "max_tokens", "mean_sqrt_len_tokens", "weightedmean", "weightedmean_tokens"}


def read_embedding(folder: HuggingFaceFolder, *, pooling: Pooling, normalize: bool, is_causal: bool) -> dict[str, Any]:
    """Fields of ModelConfig. `pooling` and `normalize` hold for a folder that says nothing. Of a causal model the first
    token has seen nothing: it is not what to pool."""
    kinds = _modules(folder)
    if kinds is not None:
        normalize = "Normalize" in kinds
    settings = folder.read_json("config_sentence_transformers.json", missing_ok=True)
    return {
        "pooling": _pooling(folder, "1_Pooling", pooling, is_causal),
        "normalize": normalize,
        "prompts": {str(name): str(text or "") for name, text in (settings.get("prompts") or {}).items()},
        "default_prompt": settings.get("default_prompt_name"),
        "max_seq_length": folder.read_json("sentence_bert_config.json", missing_ok=True).get("max_seq_length"),
    }


def _modules(folder: HuggingFaceFolder) -> set[str] | None:
    """The kinds of modules that follow each other, or None where no file says."""
    modules = folder.module_kinds()
    if modules is None:
        return None
    kinds = [kind for kind, _ in modules]
    # LogitScore is a reranker's (see `reranker`), which pools nothing.
    unknown = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize", "LogitScore")]
    if unknown:
        raise folder.error(
            f"modules.json: {', '.join(unknown)} is not supported; supported: Transformer, Pooling, Normalize"
        )
    return set(kinds)


def _pooling(folder: HuggingFaceFolder, name: str, default: Pooling, is_causal: bool) -> Pooling:
    config = folder.read_json(f"{name}/config.json", missing_ok=True)
    if not config:
        return default
    if config.get("include_prompt") is False:
        raise folder.error(f"{name}: include_prompt false is not supported")
    modes = {key.removeprefix("pooling_mode_") for key, on in config.items() if key != "pooling_mode" and on is True}
    modes &= _ALL_MODES
    new_form = config.get("pooling_mode", [])
    modes |= {str(mode) for mode in (new_form if isinstance(new_form, list) else [new_form])}
    known = {mode: kind for mode, kind in _MODES.items() if not (is_causal and kind == "cls")}
    if len(modes) != 1 or not modes <= known.keys():
        listed = ", ".join(sorted(modes)) or "no mode"
        raise folder.error(f"{name}: {listed} is not supported; supported: {', '.join(known)}")
    return known[modes.pop()]
