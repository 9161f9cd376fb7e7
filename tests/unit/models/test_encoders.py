"""Encoders of each family: transformers' hidden states, in torch and on the native kernels, whatever the batch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from procengine.encoder_model import EncoderModel, NativeEncoderModel, TorchEncoderModel
from procengine.errors import ModelError
from procengine.kernels.native import library
from procengine.model_source import resolve_model
from procengine.models.encoder_weights import EncoderCheckpoint
from procengine.models.packed_encoder import load_packed_encoder
from procengine.models.torch_encoder import TorchEncoder
from procengine.models.weights import open_weights
from tests.tiny_encoders import ENCODERS, VOCAB_SIZE, build_tiny_encoder, save_encoder

LENGTHS = (5, 1, 17, 33, 64, 2, 31, 100)
native = pytest.mark.skipif(not library.is_available(), reason="native kernels are not built")
Int32s = NDArray[np.int32]


@cache
def reference(family: str) -> Any:
    return build_tiny_encoder(family)


def checkpoint(family: str, folder: Path) -> EncoderCheckpoint:
    config = resolve_model(str(save_encoder(reference(family), folder)), folder)
    return EncoderCheckpoint(config, open_weights(config))


def in_torch(family: str, folder: Path) -> EncoderModel:
    return TorchEncoderModel(TorchEncoder(checkpoint(family, folder), torch.float32, "cpu"))


def on_native_kernels(family: str, folder: Path) -> EncoderModel:
    return NativeEncoderModel(load_packed_encoder(checkpoint(family, folder), progress=False), "any")


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[Int32s]:
    source = np.random.default_rng(3)
    return [source.integers(5, VOCAB_SIZE, length).astype(np.int32) for length in lengths]


def types_of(family: str, length: int) -> Int32s | None:
    return (np.arange(length) >= length // 2).astype(np.int32) if family == "bert" else None


def expected(family: str, ids: Int32s, layer: int = -1) -> NDArray[np.float32]:
    types = types_of(family, len(ids))
    given = {} if types is None else {"token_type_ids": torch.from_numpy(types).long()[None]}
    with torch.inference_mode():
        found = reference(family)(torch.from_numpy(ids).long()[None], output_hidden_states=True, **given)
    states: NDArray[np.float32] = (found.last_hidden_state if layer == -1 else found.hidden_states[layer])[0].numpy()
    return states


def encode(model: EncoderModel, family: str, batch: list[Int32s], num_layers: int | None = None) -> list[Any]:
    bounds = np.concatenate(([0], np.cumsum([len(ids) for ids in batch]))).astype(np.int32)
    types = [types_of(family, len(ids)) for ids in batch]
    joined = None if types[0] is None else np.concatenate([one for one in types if one is not None])
    hidden = model.encode(np.concatenate(batch), joined, bounds, num_layers)
    return np.split(hidden, bounds[1:-1])


@pytest.mark.parametrize("family", ENCODERS)
def test_torch_gives_the_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    model, batch = in_torch(family, tmp_path), sequences()
    for ids, found in zip(batch, encode(model, family, batch), strict=True):
        np.testing.assert_allclose(found, expected(family, ids), atol=2e-4, rtol=1e-4)


@native
@pytest.mark.parametrize("family", ENCODERS)
def test_native_kernels_come_close_and_a_row_depends_on_itself_alone(family: str, tmp_path: Path) -> None:
    model, batch = on_native_kernels(family, tmp_path), sequences()
    together = encode(model, family, batch)
    for ids, found in zip(batch, together, strict=True):
        wanted = expected(family, ids)
        cosines = (found * wanted).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(wanted, axis=1)
        assert cosines.min() > 1 - 2e-6  # random weights magnify what rounding leaves
        np.testing.assert_array_equal(encode(model, family, [ids])[0], found)


@native
@pytest.mark.parametrize("isa", [isa for isa in library.Isa if library.is_available() and isa <= library.best_isa()])
def test_every_instruction_set_gives_the_same(isa: library.Isa, tmp_path: Path) -> None:
    model, batch = on_native_kernels("modernbert", tmp_path), sequences()
    usual = encode(model, "modernbert", batch)
    with library.forced_isa(isa):
        forced = encode(model, "modernbert", batch)
    for one, other in zip(usual, forced, strict=True):
        np.testing.assert_allclose(one, other, atol=0.02)


@pytest.mark.parametrize("make", [in_torch, pytest.param(on_native_kernels, marks=native)])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_hidden_states_of_any_layer(make: Any, layer: int, tmp_path: Path) -> None:
    model, (ids,) = make("modernbert", tmp_path), sequences((40,))
    (found,) = encode(model, "modernbert", [ids], layer)
    np.testing.assert_allclose(found, expected("modernbert", ids, layer), atol=0.02)


@native
def test_no_sequence_at_all(tmp_path: Path) -> None:
    model = on_native_kernels("bert", tmp_path)
    assert model.encode(np.empty(0, np.int32), None, np.zeros(1, np.int32), None).shape == (0, 48)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = build_tiny_encoder("bert", num_hidden_layers=2)
    model.config.num_hidden_layers = 3
    config = resolve_model(str(save_encoder(model, tmp_path)), tmp_path)
    with pytest.raises(ModelError, match=r"encoder\.layer\.2\..* is missing"):
        TorchEncoder(EncoderCheckpoint(config, open_weights(config)), torch.float32, "cpu")
