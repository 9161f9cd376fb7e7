"""Decode steps by graphs of a few batch sizes: what is padded, with what, and that no token changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from procengine.config import ModelConfig
from procengine.decode_graphs import DecodeGraphs, graph_sizes
from procengine.device_streams import HostStreams
from procengine.executor import ForwardBatch
from procengine.models.decoder import Decoder
from procengine.models.loader import load_model
from procengine.request import RowSampling
from procengine.row_features import PENALTIES, RANDOM, TOP_P
from procengine.torch_executor import TorchModel
from tests.model_configs import model_config_from_hf
from tests.unit.models.tiny_models import save_tiny_model
from tests.unit.runner_engine import PROMPTS, Engine, TinyModel


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (6, (1, 2, 4, 6)),
        (32, (1, 2, 4, 8, 16, 32)),
        (100, (1, 2, 4, 8, 16, 32, 64, 96, 100)),
    ],
)
def test_sizes_end_with_the_most_rows_there_may_be(max_num_seqs: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_no_batch_is_padded_to_more_than_twice_its_size_and_very_large_ones_have_no_graph() -> None:
    sizes = graph_sizes(4096)
    assert sizes[-1] == 512
    assert list(sizes) == sorted(set(sizes))
    assert all(min(size for size in sizes if size >= rows) < 2 * rows for rows in range(2, 513))


def batch_of(num_rows: int, tables: Tensor, **changes: Any) -> ForwardBatch[Tensor]:
    own: dict[str, Any] = {
        "input_ids": torch.arange(num_rows, dtype=torch.int32) + 10,
        "positions": torch.arange(num_rows) + 20,
        "query_start_loc": torch.arange(num_rows + 1, dtype=torch.int32),
        "seq_lens": torch.arange(num_rows, dtype=torch.int32) + 21,
        "slots": torch.arange(num_rows).flip(0),
        "block_tables": tables,
        "num_decode_rows": num_rows,
        "max_query_len": 1,
        "max_seq_len": 20 + num_rows,
        "wanted": None,
    }
    return ForwardBatch(**(own | changes))


class Recorded:
    """Graphs of a forward pass that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: list[ForwardBatch[Tensor]] = []
        self.tables = torch.zeros((1, 9, 6), dtype=torch.int32)
        self.graphs = DecodeGraphs(graph_sizes(8), self._forward, HostStreams(), self.tables, 4)

    def _forward(self, batch: ForwardBatch[Tensor]) -> Tensor:
        self.seen.append(batch)
        return torch.stack((batch.input_ids, batch.positions), dim=1).float()


def test_a_batch_runs_in_the_smallest_graph_that_holds_it_and_padding_touches_nobody() -> None:
    recorded = Recorded()
    assert sorted(batch.seq_lens.shape[0] for batch in recorded.seen) == [1, 2, 4, 8]
    for num_rows, size in ((7, 8), (3, 4), (8, 8), (5, 8), (1, 1)):  # after fuller ones too
        hidden = recorded.graphs.run(batch_of(num_rows, recorded.tables))
        assert hidden.tolist() == [[10 + row, 20 + row] for row in range(num_rows)]
        batch = recorded.seen[-1]
        padding = size - num_rows
        assert batch.num_decode_rows == size
        assert batch.query_start_loc.tolist() == list(range(size + 1))
        assert batch.seq_lens.tolist() == [21 + row for row in range(num_rows)] + [1] * padding
        assert batch.positions.tolist() == [20 + row for row in range(num_rows)] + [0] * padding
        assert batch.slots.tolist() == [*reversed(range(num_rows)), *[8] * padding]
        assert batch.max_seq_len == 24, "a graph serves contexts of any length"


def test_only_whole_decode_batches_have_a_graph() -> None:
    recorded = Recorded()
    tables = recorded.tables
    fits = recorded.graphs.fits
    assert fits(batch_of(8, tables))
    assert not fits(batch_of(9, tables)), "too many"
    assert not fits(batch_of(4, tables, num_decode_rows=3)), "a row of a prompt"
    assert not fits(batch_of(4, tables, input_ids=torch.zeros(7))), "several tokens a row"
    assert not fits(batch_of(4, tables, wanted=torch.tensor([1]))), "not all hidden states"
    assert not fits(batch_of(4, tables.clone())), "tables that the graphs do not read"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ModelConfig, Decoder]]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder: Path = tmp_path_factory.mktemp("llama")
    oracle = save_tiny_model("llama", folder)
    config = model_config_from_hf(oracle.config, folder)
    yield oracle, config, load_model(config, torch.float32, "cpu", progress=False)
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("options", [{}, {"depth": 3, "decode_steps": 4, "num_blocks": 40}], ids=str)
def test_every_token_is_the_one_without_graphs(
    llama: tuple[Any, ModelConfig, Decoder], options: dict[str, Any]
) -> None:
    """Rows come and go, so that batches of all sizes run; greedy ones are also those of transformers."""
    oracle, config, model = llama
    engines = [Engine(TinyModel(config, TorchModel(model, sizes)), **options) for sizes in ((), graph_sizes(8))]
    for engine in engines:
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, 6 + 3 * number)
            engine.add(prompt, 12, RowSampling(number, 0.8, features=RANDOM | TOP_P, top_p=0.9))
        engine.add(PROMPTS[0], 9, RowSampling(9, features=PENALTIES, repetition_penalty=1.3))
        engine.run()
    assert engines[1].tokens == engines[0].tokens
    for number, prompt in enumerate(PROMPTS):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            expected = oracle.generate(
                ids, max_new_tokens=6 + 3 * number, min_new_tokens=6 + 3 * number, do_sample=False
            )
        assert engines[1].tokens[2 * number] == expected[0, len(prompt) :].tolist()


def test_nvtx_ranges_name_what_runs_and_change_nothing(
    llama: tuple[Any, ModelConfig, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    @contextmanager
    def named(name: str) -> Iterator[None]:
        names.append(name)
        yield

    monkeypatch.setattr("procengine.nvtx_executor.nvtx.range", named)
    _, config, model = llama
    engines = [Engine(TinyModel(config, TorchModel(model, nvtx=nvtx))) for nvtx in (False, True)]
    for engine in engines:
        assert names[1:] == []
        engine.add(PROMPTS[0], 3)
        engine.add(PROMPTS[1], 2, RowSampling(1, 0.9, features=RANDOM))
        engine.run()
    assert engines[1].tokens == engines[0].tokens
    assert names[:2] == ["prepare", "forward 28 tokens of 2 rows, 0 decode"]
    assert {"logits", "sample", "greedy"} <= set(names)
