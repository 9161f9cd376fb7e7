"""Detokenizer: joined deltas are `decode(ids)`, and no delta shows half a character."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from procengine.detokenizer import Detokenizer
from procengine.gguf_tokenizer import build_tokenizer
from procengine.model_source import resolve_model
from procengine.stop_strings import StopBuffer
from procengine.tokenizer import Tokenizer
from tests import tiny_tokenizers

# The bytes of SmolLM2's greedy tokens for the Japanese prompt: 2 + 1 + 3 tokens for three characters.
JAPANESE = [b"\xe6\x97", b"\xa5", "本".encode(), b"\xe8", b"\xaa", b"\x9e"] * 2


@cache
def family(name: str) -> tuple[Tokenizer, Detokenizer]:
    tokenizer = tiny_tokenizers.FAMILIES[name]()
    return tokenizer, Detokenizer(tokenizer)


@cache
def japanese() -> tuple[Tokenizer, Detokenizer, tuple[int, ...]]:
    metadata = tiny_tokenizers.byte_level_metadata(JAPANESE)
    tokenizer = Tokenizer(build_tokenizer(metadata, "tiny"))
    ids = tuple(metadata["tokenizer.ggml.tokens"].index(tiny_tokenizers.spell(data)) for data in JAPANESE)
    return tokenizer, Detokenizer(tokenizer), ids


def deltas(detokenizer: Detokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = detokenizer.stream(skip_special_tokens=skip)
    return [*(stream.push([token_id]) for token_id in ids), stream.flush()]


def test_det_01_split_characters_are_held_back() -> None:
    _, detokenizer, ids = japanese()
    shown = [text for text in deltas(detokenizer, ids) if text]
    assert shown == list("日本語日本語")


def test_det_01_streams_do_not_share_state() -> None:
    _, detokenizer, ids = japanese()
    streams = [detokenizer.stream() for _ in range(8)]
    texts = [""] * 8
    for step in range(len(ids) + 7):  # each stream is one token behind the one before it
        for index, stream in enumerate(streams):
            if 0 <= step - index < len(ids):
                texts[index] += stream.push([ids[step - index]])
    assert texts == ["日本語日本語"] * 8


@pytest.mark.parametrize(
    ("count", "text"), [(1, "\ufffd"), (2, "日"), (3, "日本"), (4, "日本\ufffd"), (5, "日本\ufffd")]
)
def test_det_03_end_inside_a_character(count: int, text: str) -> None:
    tokenizer, detokenizer, ids = japanese()
    shown = deltas(detokenizer, ids[:count])
    assert "".join(shown) == text == tokenizer.decode(ids[:count])
    assert "\ufffd" not in "".join(shown[:-1])  # only the flush shows it


def test_det_05_leading_space_is_neither_lost_nor_doubled() -> None:
    tokenizer, detokenizer = family("byte_level")
    ids = tokenizer.encode(" Paris the the")
    assert deltas(detokenizer, ids)[0] == " Paris"
    assert "".join(deltas(detokenizer, ids)) == " Paris the the"


@pytest.mark.parametrize(
    "text", ["👩‍👩‍👧‍👦 ok", "٣٤ ½", "a\r\n\n\tb\u2028c", "e\u0301é", "\x00\x7f\xa0\xad", "🇯🇵日", "\ufffd!"]
)
def test_text_of_any_script_streams_byte_by_byte(text: str) -> None:
    tokenizer, detokenizer = family("byte_level")
    ids = [tokenizer.token_to_id(tiny_tokenizers.spell(bytes([byte]))) for byte in text.encode()]
    shown = deltas(detokenizer, [token_id for token_id in ids if token_id is not None])
    assert "".join(shown) == text
    assert all(len(delta) <= 1 for delta in shown)


@pytest.mark.parametrize("name", tiny_tokenizers.FAMILIES)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_equal_decode(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer, detokenizer = family(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=24))  # some beyond the vocabulary
    stream = detokenizer.stream(skip_special_tokens=skip)
    text, rest = "", ids
    while rest:
        size = data.draw(st.integers(1, 4))
        text += stream.push(rest[:size])
        rest = rest[size:]
    assert text + stream.flush() == tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=20))
def test_valid_text_never_shows_a_replacement_character(text: str) -> None:
    tokenizer, detokenizer = family("byte_level")
    shown = deltas(detokenizer, tokenizer.encode(text))
    assert "".join(shown) == text
    assert shown[-1] == ""
    assert "".join(shown).count("\ufffd") == text.count("\ufffd")


def test_special_tokens_do_not_interrupt_a_character() -> None:
    tokenizer, detokenizer = family("byte_level")
    end = tokenizer.token_to_id("<|end|>")
    start, *rest = (tokenizer.token_to_id(tiny_tokenizers.spell(bytes([byte]))) for byte in "é".encode())
    ids = [i for i in (start, end, *rest) if i is not None]
    assert "".join(deltas(detokenizer, ids)) == "é"
    assert "".join(deltas(detokenizer, ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)


def test_prompt_tail_keeps_the_space_that_a_text_alone_would_lose() -> None:
    tokenizer, detokenizer = family("sentencepiece")
    prompt, output = tokenizer.encode("ab"), [tokenizer.token_to_id("▁the"), tokenizer.token_to_id("▁a")]
    ids = [token_id for token_id in output if token_id is not None]
    assert "".join(deltas(detokenizer, ids)) == "the a" == tokenizer.decode(ids)
    stream = detokenizer.stream(prompt[-4:])
    assert [stream.push([token_id]) for token_id in ids] == [" the", " a"]


@given(st.lists(st.integers(3, 273), max_size=12), st.lists(st.integers(3, 273), max_size=12))
def test_text_after_a_prompt_is_the_whole_text_less_the_prompt(prompt: list[int], output: list[int]) -> None:
    tokenizer, detokenizer = family("sentencepiece")
    ending = tokenizer.token_to_id("ab")
    assert ending is not None
    prompt = [*prompt, ending]  # a prompt that is text, not half a character
    stream = detokenizer.stream(prompt[-6:])
    text = "".join(stream.push([token_id]) for token_id in output) + stream.flush()
    assert text == tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


def test_token_bytes() -> None:
    tokenizer, detokenizer = family("byte_level")
    half = tokenizer.token_to_id(tiny_tokenizers.spell(b"\xe6\x97"))
    assert half is not None
    assert detokenizer.token_bytes(half) == b"\xe6\x97"
    assert detokenizer.token_bytes(10**6) == b""
    tokenizer, detokenizer = family("sentencepiece")
    assert detokenizer.token_bytes(3 + 0xE6) == b"\xe6"


@pytest.mark.parametrize("skip", [True, False])
def test_every_token_alone_equals_decode(skip: bool) -> None:
    tokenizer, detokenizer = family("byte_level")
    for token_id in range(tokenizer.vocab_size):
        assert "".join(deltas(detokenizer, [token_id], skip)) == tokenizer.decode([token_id], skip)


P2_IDS = [33203, 23960, 57, 58, 59, 34519, 62, 7627, 43323, 3127, 19539, 71]
P3_IDS = [23274, 115, 40993, 179, 120, 248] * 2


@pytest.fixture(scope="module")
def real(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Detokenizer]:
    model = resolve_model(str(smollm2_gguf), tmp_path_factory.mktemp("home"))
    tokenizer = Tokenizer.load(model.tokenizer_path)
    return tokenizer, Detokenizer(tokenizer)


@pytest.mark.model
def test_det_01_and_det_03_on_the_real_tokenizer(real: tuple[Tokenizer, Detokenizer]) -> None:
    tokenizer, detokenizer = real
    assert [text for text in deltas(detokenizer, P3_IDS) if text] == list("日本語日本語")
    for count in range(len(P3_IDS)):
        assert "".join(deltas(detokenizer, P3_IDS[:count])) == tokenizer.decode(P3_IDS[:count])


@pytest.mark.model
def test_det_05_on_the_real_tokenizer(real: tuple[Tokenizer, Detokenizer]) -> None:
    assert deltas(real[1], [7042, 30, 198, 198]) == [" Paris", ".", "\n", "\n", ""]


@pytest.mark.model
@pytest.mark.parametrize(
    ("stops", "include", "text"),
    [
        (("DEFGHIJ",), False, ""),  # DET-07
        (("FGHI",), False, "DE"),  # DET-08
        (("GHIJ",), False, "DEF"),
        (("E",), False, "D"),  # DET-10
        (("E",), True, "DE"),
        (("G", "EF"), True, "DEF"),
        (("zzz",), False, "DEFGHIJKLMNOPQRSTUVW"),
    ],
)
def test_det_07_08_10_on_the_real_tokenizer(
    real: tuple[Tokenizer, Detokenizer], stops: tuple[str, ...], include: bool, text: str
) -> None:
    stream, buffer = real[1].stream(), StopBuffer(stops, include)
    shown, matched = "", None
    for token_id in P2_IDS:
        emit, matched = buffer.push(stream.push([token_id]))
        shown += emit
        if matched is not None:
            break
    assert shown + buffer.flush() == text


@pytest.mark.model
@given(data=st.data(), skip=st.booleans())
def test_random_ids_of_the_real_tokenizer(real: tuple[Tokenizer, Detokenizer], data: st.DataObject, skip: bool) -> None:
    tokenizer, detokenizer = real
    low = st.integers(0, 300)  # specials and single bytes
    ids = data.draw(st.lists(low | st.integers(0, tokenizer.vocab_size), max_size=40))
    assert "".join(deltas(detokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@pytest.mark.model
def test_every_token_of_the_real_tokenizer(real: tuple[Tokenizer, Detokenizer]) -> None:
    tokenizer, detokenizer = real
    for token_id in range(tokenizer.vocab_size):
        assert "".join(deltas(detokenizer, [token_id], skip=False)) == tokenizer.decode([token_id], False)
