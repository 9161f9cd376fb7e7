"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file.

Owns: what the `tokenizer.ggml.*` keys mean, and the text splits that `tokenizer.ggml.pre` stands for.
Never does: read a file, or guess: an unknown model or split is a ModelError, because a wrong split gives ids that the
model never saw in training, and nothing downstream can notice it.
Sources: each model's published tokenizer.json; the key names and defaults are those of llama.cpp (llama-vocab.cpp).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from procengine.errors import ModelError

__all__ = ["SUPPORTED_PRE_TOKENIZERS", "build_tokenizer", "end_token_ids", "token_text"]

_log = logging.getLogger(__name__)

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type

# Names of end-of-turn tokens, for the many files that give only `eos_token_id` (often the end of a *document*).
_END_OF_TURN = frozenset({"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<EOT>", "[EOT]"})

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATH_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_1 = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+"
_CASED_2 = rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_MARKED_PUNCTUATION = r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_CJK = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"  # Han, Hiragana, Katakana

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _PUNCTUATION, _SPACES))
_QWEN2 = "|".join((_CONTRACTIONS, _WORD, r"\p{N}", _PUNCTUATION, _SPACES))
_QWEN35 = "|".join((_CONTRACTIONS, _MARKED_WORD, r"\p{N}", _MARKED_PUNCTUATION, _SPACES))
_TEKKEN = "|".join((_CASED_1, _CASED_2, r"\p{N}", _PATH_PUNCTUATION, _SPACES))
_GPT4O = "|".join(
    (f"{_CASED_1}{_CONTRACTIONS}?", f"{_CASED_2}{_CONTRACTIONS}?", r"\p{N}{1,3}", _PATH_PUNCTUATION, _SPACES)
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


class _Split(NamedTuple):
    """How text is cut before byte-level BPE: digits alone first, then each regex in turn, then GPT-2's own regex."""

    regexes: tuple[str, ...] = ()
    single_digits: bool = False
    gpt2_regex: bool = False
    digits_last: tuple[str, ...] = ()  # regexes applied after GPT-2's
    nfc: bool = False  # Unicode composition first
    ignore_merges: bool = False  # a word that is a token is that token, whatever the merges say
    add_bos: bool = False  # when the file does not say


_GPT2_SPLIT = _Split(gpt2_regex=True)
_DIGITS_SPLIT = _Split(single_digits=True, gpt2_regex=True)
_LLAMA3_SPLIT = _Split((_LLAMA3,), ignore_merges=True, add_bos=True)

_SPLIT_BY_PRE: dict[str, _Split] = {
    **dict.fromkeys(("gpt2", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "gigachat"), _GPT2_SPLIT),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_SPLIT),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_SPLIT),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split((_LLAMA3,))),
    **dict.fromkeys(("glm4", "chatglm-bpe"), _Split((_LLAMA3,))),
    "qwen2": _Split((_QWEN2,), nfc=True),
    **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"), _Split((_QWEN2,))),
    "qwen35": _Split((_QWEN35,), nfc=True),
    "tekken": _Split((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _Split((_GPT4O,))),
    "deepseek-v3": _Split((r"\p{N}{1,3}", _CJK, _DEEPSEEK3)),
    "falcon": _Split((r"[\p{P}\$\+<=>\^~\|`]+",), gpt2_regex=True, digits_last=("[0-9][0-9][0-9]",)),
    # What llama.cpp does with files that say "default" or nothing.
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+",), gpt2_regex=True, digits_last=(r"\p{N}+", "[0-9][0-9][0-9]")),
}

SUPPORTED_PRE_TOKENIZERS: tuple[str, ...] = tuple(sorted(_SPLIT_BY_PRE))


def build_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """The tokenizer that `metadata` describes. `source` names the file in errors.

    Raises ModelError when a key is missing or malformed, or names a tokenizer or split that is not supported.
    """
    model = metadata.get("tokenizer.ggml.model")
    builder = _BUILDERS.get(str(model))
    if builder is None:
        supported = ", ".join(sorted(_BUILDERS))
        raise ModelError(f"{source}: tokenizer.ggml.model is {model!r}; supported: {supported}")
    vocab = _read_vocab(metadata, source)
    tokenizer, add_bos = builder(vocab, metadata, source)
    _add_special_tokens(tokenizer, vocab, metadata, source)
    _add_template(tokenizer, vocab, metadata, add_bos, source)
    return tokenizer


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: the file's eos, eot and eom ids; with no eot id, also tokens named like a turn's end.

    The eos of many chat models is the end of a document while their turns end with e.g. `<|im_end|>`.
    """
    ids = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    if ids[1] is None:
        ids += _control_ids_named(metadata, _END_OF_TURN)
    return tuple(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def token_text(metadata: Mapping[str, Any], token_id: int | None) -> str:
    """The vocabulary's string for `token_id`, "" for None or an id outside the vocabulary."""
    tokens: Sequence[str] = metadata.get("tokenizer.ggml.tokens", ())
    return tokens[token_id] if token_id is not None and 0 <= token_id < len(tokens) else ""


def _control_ids_named(metadata: Mapping[str, Any], names: frozenset[str]) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type", ())
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    return [i for i, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL and tokens[i] in names]


def _read_vocab(metadata: Mapping[str, Any], source: str) -> dict[str, int]:
    tokens = _strings(metadata, "tokenizer.ggml.tokens", source)
    if not tokens:
        raise ModelError(f"{source}: tokenizer.ggml.tokens is empty")
    vocab: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        text = token or f"[EMPTY_{token_id}]"  # llama.cpp's name for such holes
        if vocab.setdefault(text, token_id) != token_id:
            raise ModelError(f"{source}: token {text!r} is in the vocabulary twice ({vocab[text]} and {token_id})")
    return vocab


def _strings(metadata: Mapping[str, Any], key: str, source: str) -> list[str]:
    strings = metadata.get(key)
    if strings is None:
        raise ModelError(f"{source}: {key} is missing")
    if isinstance(strings, str | int | float) or not all(isinstance(string, str) for string in strings):
        raise ModelError(f"{source}: {key} is not an array of strings")
    return list(strings)


def _byte_level_bpe(vocab: dict[str, int], metadata: Mapping[str, Any], source: str) -> tuple[Tokenizer, bool]:
    split = _find_split(metadata.get("tokenizer.ggml.pre"), source)
    merges = _read_merges(metadata, vocab, source)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.add_bos


def _find_split(pre: object, source: str) -> _Split:
    if pre is None:
        _log.warning("%s: tokenizer.ggml.pre is missing: using llama.cpp's 'default' split, ids may be wrong", source)
        pre = "default"
    split = _SPLIT_BY_PRE.get(str(pre))
    if split is None:
        supported = ", ".join(SUPPORTED_PRE_TOKENIZERS)
        raise ModelError(f"{source}: tokenizer.ggml.pre is {pre!r}, which is not supported; supported: {supported}")
    return split


def _pre_tokenizer(split: _Split) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in split.regexes]
    if split.digits_last:  # GPT-2's regex as a plain split, so that bytes are mapped only after the last cut
        steps.append(pre_tokenizers.Split(Regex(_GPT2), behavior="isolated"))
        steps += [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in split.digits_last]
    use_regex = split.gpt2_regex and not split.digits_last
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex))
    return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _read_merges(metadata: Mapping[str, Any], vocab: dict[str, int], source: str) -> list[tuple[str, str]]:
    lines = _strings(metadata, "tokenizer.ggml.merges", source)
    merges: list[tuple[str, str]] = []
    for index, line in enumerate(lines):
        left, _, right = line[1:].partition(" ")  # from the second character on: a merge may start with a space
        left = line[:1] + left
        if not right or left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"{source}: tokenizer.ggml.merges[{index}] = {line!r} does not join two tokens")
        merges.append((left, right))
    return merges


def _sentencepiece_bpe(vocab: dict[str, int], metadata: Mapping[str, Any], source: str) -> tuple[Tokenizer, bool]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(vocab):
        raise ModelError(f"{source}: tokenizer.ggml.scores is missing or shorter than the vocabulary")
    types = metadata.get("tokenizer.ggml.token_type", ())
    byte_fallback = "<0x00>" in vocab and "<0xFF>" in vocab
    if not byte_fallback:
        raise ModelError(
            f"{source}: a tokenizer.ggml.model 'llama' without byte tokens <0x00>..<0xFF> is not supported"
        )
    merges = _merges_from_scores(vocab, scores, types)
    unknown = token_text(metadata, _optional_id(metadata, "unknown")) or None
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if prefix else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first: BPE over these merges picks what SentencePiece picks.

    Control, unknown and byte tokens never arise by merging.
    """
    unmerged = {_UNKNOWN, _CONTROL, _BYTE}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, token_id in vocab.items():
        if len(token) < 2 or (token_id < len(types) and types[token_id] in unmerged):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-float(scores[token_id]), token_id, cut, left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


_Builder = Callable[[dict[str, int], Mapping[str, Any], str], tuple[Tokenizer, bool]]
_BUILDERS: dict[str, _Builder] = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}


def _add_special_tokens(tokenizer: Tokenizer, vocab: dict[str, int], metadata: Mapping[str, Any], source: str) -> None:
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    if len(types) < len(vocab):
        raise ModelError(f"{source}: tokenizer.ggml.token_type has {len(types)} entries for {len(vocab)} tokens")
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, token_id in vocab.items():
        kind = types[token_id]
        if kind in (_CONTROL, _UNKNOWN):
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == _USER_DEFINED:
            plain.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_template(
    tokenizer: Tokenizer, vocab: dict[str, int], metadata: Mapping[str, Any], add_bos: bool, source: str
) -> None:
    """What `add_special_tokens=True` puts round a text: `add_bos_token` / `add_eos_token`, llama.cpp's defaults."""
    names: dict[str, int] = {}
    for kind, default in (("bos", add_bos), ("eos", False)):
        if bool(metadata.get(f"tokenizer.ggml.add_{kind}_token", default)):
            token_id = _optional_id(metadata, kind)
            if token_id is None or not 0 <= token_id < len(vocab):
                raise ModelError(f"{source}: tokenizer.ggml.{kind}_token_id is {token_id}, but it is to be added")
            names[kind] = token_id
    if not names:
        return
    bos, eos = [name for name in names if name == "bos"], [name for name in names if name == "eos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *bos, "$B:1", *eos],
        # Named rather than spelt: a template piece may not hold spaces or colons, a token may.
        special_tokens=[
            {"id": name, "ids": [token_id], "tokens": [token_text(metadata, token_id)]}
            for name, token_id in names.items()
        ],
    )


def _optional_id(metadata: Mapping[str, Any], kind: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{kind}_token_id")
    return None if value is None else int(value)
