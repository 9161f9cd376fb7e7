"""Small tokenizers and GGUF metadata, made on the spot: one of each family, with the odd tokens that break things."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from procengine.gguf_tokenizer import build_tokenizer
from procengine.tokenizer import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


@cache
def byte_alphabet() -> tuple[str, ...]:
    """The character of each byte, 0 to 255, as the tokenizers library has it."""
    probe = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    # Every byte but those that UTF-8 never has turns up in some character; the others are found by elimination.
    seen: dict[int, str] = {}
    for char in [chr(i) for i in range(0x800)] + [
        chr(i) for i in range(0x800, 0x110000, 0xFC0) if not 0xD800 <= i < 0xE000
    ]:
        data = char.encode()
        seen.update(zip(data, probe.pre_tokenize_str(char)[0][0], strict=True))
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(seen.values()))
    missing = [byte for byte in range(256) if byte not in seen]
    return tuple(seen.get(byte) or rest[missing.index(byte)] for byte in range(256))


def spell(text: str | bytes) -> str:
    """`text` in the alphabet of byte-level BPE."""
    data = text.encode() if isinstance(text, str) else text
    alphabet = byte_alphabet()
    return "".join(alphabet[byte] for byte in data)


def byte_level_metadata(words: Sequence[str | bytes] = (), pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """GGUF metadata of a byte-level BPE: 256 bytes, the `words` (merged byte by byte from the left), then specials.

    Specials: `<|end|>` control, `<|start|>` control, `<tool>` user-defined, `<ü ok>` user-defined with odd characters.
    """
    tokens = [*byte_alphabet()]
    merges: list[str] = []
    for word in (spell(word) for word in words):
        for cut in range(1, len(word)):
            if word[: cut + 1] not in tokens:
                tokens.append(word[: cut + 1])
                merges.append(f"{word[:cut]} {word[cut]}")
    types = [NORMAL] * len(tokens) + [CONTROL, CONTROL, USER_DEFINED, USER_DEFINED]
    tokens += ["<|end|>", "<|start|>", "<tool>", "<ü ok>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": tokens.index("<|end|>"),
        "tokenizer.ggml.bos_token_id": tokens.index("<|start|>"),
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in more.items()})
    return {key: value for key, value in metadata.items() if value is not None}


def sentencepiece_metadata(pieces: Sequence[str], **more: Any) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece BPE: <unk>, <s>, </s>, 256 byte tokens, then `pieces`, best score first."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    metadata.update({f"tokenizer.ggml.{key}": value for key, value in more.items()})
    return metadata


WORDS = (" the", " Paris", "cat", "日本", "語", "👩", b"\xe6\x97", b"\xf0\x9f", "é", "\n\n", b"\xff\xfe", " ")
PIECES = ("▁the", "▁t", "he", "▁", "a", "b", "t", "h", "e", "ab", "▁a", "日", "é", "▁▁", "\n")


def byte_level() -> Tokenizer:
    return Tokenizer(build_tokenizer(byte_level_metadata(WORDS), "tiny"))


def sentencepiece(add_space_prefix: bool = True) -> Tokenizer:
    return Tokenizer(build_tokenizer(sentencepiece_metadata(PIECES, add_space_prefix=add_space_prefix), "tiny"))


def metaspace() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(("<unk>", *dict.fromkeys(PIECES)))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return Tokenizer(backend)


def wordpiece() -> Tokenizer:
    words = ("[UNK]", "the", "cat", "##s", "##.", ".", ",", "don", "'", "t", "##日", "é", "�")
    backend = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    return Tokenizer(backend)


def byte_level_in_sequence() -> Tokenizer:
    """A byte-level decoder behind another step: not recognised as plain, so it takes the general way."""
    backend = build_tokenizer(byte_level_metadata(WORDS), "tiny")
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return Tokenizer(backend)


FAMILIES = {
    "byte_level": byte_level,
    "sentencepiece": sentencepiece,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "byte_level_in_sequence": byte_level_in_sequence,
}
