"""bge-m3's lexical weights and ColBERT vectors through groups: its formulas in torch, over transformers' encoder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from procengine import LLM, InvalidRequestError, StartupError
from procengine.scores import MultiVectorOutput
from tests.e2e.test_encoders import encode
from tests.tiny_encoders import build_tiny_encoder, save_encoder

TEXTS = ["the cat sat on the mat", "hello hello world", "a", "cat " * 60, "the [MASK] sat"]
_SPECIAL = {0, 1, 2, 3, 4}
_VECTOR_SIZE = 20  # not the hidden size: files may say otherwise
_OPTIONS: dict[str, Any] = {"kernels": "torch", "threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 160}


def linear(num_outputs: int, seed: int) -> torch.nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Linear(48, num_outputs).requires_grad_(False)


SPARSE, COLBERT = linear(1, 4), linear(_VECTOR_SIZE, 2)


@pytest.fixture(scope="module")
def model() -> Any:
    """With weights of about 1, and about as many above 0 as below: a random model's tokens are much alike."""
    made = build_tiny_encoder("xlm-roberta")
    mean = torch.cat([hidden_of(made, text)[1] for text in TEXTS]).mean(dim=0)
    SPARSE.weight *= 10
    SPARSE.bias.copy_(-(SPARSE.weight @ mean))
    return made


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_encoder(model, tmp_path_factory.mktemp("m3"))
    torch.save(SPARSE.state_dict(), path / "sparse_linear.pt")
    torch.save(COLBERT.state_dict(), path / "colbert_linear.pt")
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **_OPTIONS) as made:
        yield made


def hidden_of(model: Any, text: str) -> tuple[list[int], torch.Tensor]:
    ids = encode(text)["input_ids"]
    with torch.no_grad():
        return ids[0].tolist(), model(ids).last_hidden_state[0]


def lexical_weights(model: Any, text: str) -> dict[int, float]:
    """The formula of FlagEmbedding: relu of the layer, the largest of equal tokens, nothing of special ones."""
    ids, hidden = hidden_of(model, text)
    weights = torch.relu(SPARSE(hidden)).squeeze(-1).tolist()
    found: dict[int, float] = {}
    for token_id, weight in zip(ids, weights, strict=True):
        if token_id not in _SPECIAL and weight > 0:
            found[token_id] = max(weight, found.get(token_id, 0.0))
    return found


def colbert_vectors(model: Any, text: str) -> Any:
    _, hidden = hidden_of(model, text)
    return torch.nn.functional.normalize(COLBERT(hidden[1:]), dim=-1).detach().numpy()


def check_sparse(found: dict[int, float], model: Any, text: str) -> None:
    expected = lexical_weights(model, text)
    assert sorted(found) == sorted(expected)
    assert found == pytest.approx(expected, abs=1e-4)


def array_of(output: MultiVectorOutput) -> Any:
    return np.frombuffer(output.data, "<f4").reshape(output.num_vectors, -1)


def test_weights_are_the_formulas(llm: LLM, model: Any) -> None:
    num_weights = [len(lexical_weights(model, text)) for text in TEXTS]
    assert num_weights[0] in range(1, 5) and num_weights[1] == 2  # some are 0; a token that occurs twice has one
    for text, one in zip(TEXTS, llm.embed_sparse(TEXTS), strict=True):
        check_sparse(one.weights, model, text)


def test_vectors_are_the_formulas(llm: LLM, model: Any) -> None:
    for text, one in zip(TEXTS, llm.embed_multi(TEXTS), strict=True):
        np.testing.assert_allclose(array_of(one), colbert_vectors(model, text), atol=1e-4)
        assert one.vectors() == array_of(one).tolist()


def test_all_three_kinds_are_served_at_once(llm: LLM, model: Any) -> None:
    assert {"embed", "embed_sparse", "embed_multi"} <= set(llm.config.model.workflows)
    dense = llm.embed(TEXTS, use_tqdm=False)
    np.testing.assert_allclose(
        [one.embedding for one in dense], [hidden_of(model, text)[1].mean(dim=0) for text in TEXTS], atol=1e-4
    )


def test_one_token_has_a_weight_and_no_vector(llm: LLM, model: Any) -> None:
    (sparse,), (multi,) = llm.embed_sparse([[7]]), llm.embed_multi([[7]])
    with torch.no_grad():
        weight = torch.relu(SPARSE(model(torch.tensor([[7]])).last_hidden_state[0])).item()
    assert sparse.weights == pytest.approx({7: weight} if weight else {}, abs=1e-4)
    assert (multi.num_vectors, multi.data, multi.vectors()) == (0, b"", [])


def test_native_kernels_and_safetensors_give_the_same(model: Any, tmp_path: Path) -> None:
    folder = save_encoder(model, tmp_path)
    save_file(SPARSE.state_dict(), folder / "sparse_linear.safetensors")
    save_file({"weight": COLBERT.weight.half(), "bias": COLBERT.bias}, folder / "colbert_linear.safetensors")
    with LLM(str(folder), **_OPTIONS | {"kernels": "native"}) as llm:
        for text, sparse, multi in zip(TEXTS, llm.embed_sparse(TEXTS), llm.embed_multi(TEXTS), strict=True):
            assert sparse.weights == pytest.approx(lexical_weights(model, text), abs=5e-3)
            np.testing.assert_allclose(array_of(multi), colbert_vectors(model, text), atol=5e-3)


def test_a_folder_as_torch_saves_it_is_served_without_unpickling(model: Any, tmp_path: Path) -> None:
    """As bge-m3 is published: all weights in files of torch.save."""
    folder = save_encoder(model, tmp_path)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    torch.save(COLBERT.state_dict(), folder / "colbert_linear.pt")
    with LLM(str(folder), **_OPTIONS | {"kernels": "native"}) as llm:
        for text, one in zip(TEXTS, llm.embed_multi(TEXTS), strict=True):
            np.testing.assert_allclose(array_of(one), colbert_vectors(model, text), atol=5e-3)


def test_a_model_without_the_layers_says_so(model: Any, tmp_path: Path) -> None:
    with LLM(str(save_encoder(model, tmp_path)), **_OPTIONS) as llm:
        with pytest.raises(InvalidRequestError, match="'embed_sparse' is not supported by this model"):
            llm.embed_sparse("a")
        with pytest.raises(InvalidRequestError, match="'embed_multi' is not supported by this model"):
            llm.embed_multi("a")


def test_a_layer_that_does_not_fit_ends_the_start(model: Any, tmp_path: Path) -> None:
    folder = save_encoder(model, tmp_path)
    torch.save(torch.nn.Linear(49, 1).state_dict(), folder / "sparse_linear.pt")
    with pytest.raises(StartupError, match=r"weight has 49 inputs, the model's hidden size is 48"):
        LLM(str(folder), **_OPTIONS)


@pytest.mark.parametrize("kind", ["sparse", "multi"])
def test_the_command_line_prints_them(kind: str, folder: Path, model: Any) -> None:
    code = "import sys; from procengine.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "embed", str(folder), "hello world", "--kind", kind, "--threads", "1"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    line = json.loads(done.stdout)
    if kind == "sparse":
        weights = {int(token): weight for token, weight in line["weights"].items()}
        assert weights == pytest.approx(lexical_weights(model, "hello world"), abs=5e-3)
    else:
        np.testing.assert_allclose(line["embeddings"], colbert_vectors(model, "hello world"), atol=5e-3)
