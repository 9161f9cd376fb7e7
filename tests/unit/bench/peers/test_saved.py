"""Comparisons in pieces: what was neighbours stays so, and files that do not belong together are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from procengine.bench.peers.comparison import compare_engines, tables
from procengine.bench.peers.loads import WORKLOADS
from procengine.bench.peers.results import EngineResult, EngineSpec
from procengine.bench.peers.saved import decode_results, encode_results, measured_workloads, merge_results, only_quiet
from procengine.errors import ConfigError

W2, W3 = WORKLOADS["w2"], WORKLOADS["w3"]


def engine(name: str, version: str = "1", **runs: Sequence[float | None]) -> EngineResult:
    spec = EngineSpec(name, "bf16", ["run", name], frozenset(WORKLOADS), is_ours=name == "us")
    figures = {workload: [figures_at(rate) for rate in rates] for workload, rates in runs.items()}
    return EngineResult(spec, version=version, precision="bf16", runs_by_workload=figures)


def figures_at(rate: float | None) -> dict[str, Any] | None:
    return None if rate is None else {"output_tokens_per_s": rate, "prompt_tokens_per_s": rate}


def ratios(results: list[EngineResult], workload: str = "w2") -> dict[str, tuple[float, ...]]:
    return {row.engine: row.ratios for row in compare_engines(results, [WORKLOADS[workload]]) if not row.is_ours}


def test_file_gives_back_what_was_measured() -> None:
    measured = [engine("us", w2=[100, 200]), engine("peer", w2=[50, None])]
    measured[1].error = "it has ended"
    read = decode_results(encode_results(measured, [W2]), "a.json")
    assert read == measured
    assert tables(read, [W2]) == tables(measured, [W2])


def test_pairs_of_pieces_are_those_of_their_runs() -> None:
    """The peer is slower in the second piece; the machine was, and so were we."""
    pieces = [
        [engine("us", w2=[100, 120]), engine("peer", w2=[50, 60])],
        [engine("us", w2=[10]), engine("peer", w2=[5])],
    ]
    assert ratios(merge_results(pieces)) == {"peer": (2.0, 2.0, 2.0)}


def test_engine_that_a_piece_went_without_is_paired_with_nobody_there() -> None:
    pieces = [
        [engine("us", w2=[100, 100]), engine("a", w2=[50, 50])],
        [engine("us", w2=[300], w3=[9]), engine("b", w2=[100], w3=[3])],
    ]
    merged = merge_results(pieces)
    assert ratios(merged) == {"a": (2.0, 2.0), "b": (3.0,)}
    assert ratios(merged, "w3") == {"b": (3.0,)}
    assert measured_workloads(merged) == [W2, W3]


def test_interrupted_piece_does_not_shift_the_next_one() -> None:
    pieces = [[engine("us", w2=[100, 100]), engine("peer", w2=[50])], [engine("us", w2=[40]), engine("peer", w2=[10])]]
    assert ratios(merge_results(pieces)) == {"peer": (2.0, 4.0)}


def test_failure_in_one_piece_is_told_and_memory_is_the_most_of_all() -> None:
    pieces = [[engine("us", w2=[100])], [engine("us", w2=[None])], [engine("us", w2=[100])]]
    for piece, peak, error in zip(pieces, (10.0, 30.0, 20.0), (None, "no memory", None), strict=True):
        piece[0].peak_rss_mib, piece[0].error = peak, error
    (us,) = merge_results(pieces)
    assert (us.peak_rss_mib, us.error) == (30.0, "no memory")
    assert pieces[0][0].runs_by_workload == {"w2": [figures_at(100)]}, "pieces are left alone"


def test_two_versions_of_an_engine_are_not_one() -> None:
    with pytest.raises(ConfigError, match="the version of peer is 1 in one file and 2 in another"):
        merge_results([[engine("peer", w2=[1])], [engine("peer", "2", w2=[1])]])


@pytest.mark.parametrize("data", [b"", b"{}", b'{"engines": [{"spec": 1}]}', b"\xff"])
def test_other_file_is_refused_by_name(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"--merge: notes.json was not written by --json"):
        decode_results(data, "notes.json")


def test_runs_that_others_disturbed_make_no_pair() -> None:
    measured = [engine("us", w2=[100, 30, 100]), engine("peer", w2=[50, 50, 5])]
    for result, shares in zip(measured, ([0.0, 0.9, 0.1], [0.05, 0.0, 1.2]), strict=True):
        for run, share in zip(result.runs_by_workload["w2"], shares, strict=True):
            assert run is not None
            run["others_cores"] = share
    assert ratios(only_quiet(measured, 0.1)) == {"peer": (2.0,)}
    assert ratios(measured) == {"peer": (2.0, 0.6, 20.0)}
